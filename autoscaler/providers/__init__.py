"""Where nodes come from: one small interface, one file for each provider."""
