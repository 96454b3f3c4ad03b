"""Cleaning steps that change a document: they scrub personal data, secrets and licence headers."""
