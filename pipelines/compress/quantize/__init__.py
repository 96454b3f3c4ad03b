"""Fewer bits for each weight: rounding here, or calibrated by llm-compressor."""
