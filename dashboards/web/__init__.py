"""The web page: the files of its bundle, and the rows, streams and sums that only it shows."""
