"""The web page: its built files, and the tables, live stream and sums that only this page shows."""
