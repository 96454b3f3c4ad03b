"""Tools for files, URLs, processes and environment variables."""
