"""Answers that need not be computed: those that are being computed already, and those that are kept."""
