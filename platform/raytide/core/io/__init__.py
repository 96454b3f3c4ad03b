"""Files, URLs, processes and the environment."""
