"""Readers of the formats that inputs come in. Each yields its records in file order."""
