"""Quantisation to fewer bits for each weight. This package rounds weights itself, or calls llm-compressor for
calibrated methods.
"""
