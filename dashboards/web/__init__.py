"""The web page: the files of its bundle, and the rows, streams and sums that are made only for it."""
