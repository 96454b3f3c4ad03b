"""The trained network and its loss, with the options for precision and memory."""
