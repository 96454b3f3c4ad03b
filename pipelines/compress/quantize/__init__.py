"""Quantisation to fewer bits for each weight: by rounding in this package, or calibrated by llm-compressor."""
