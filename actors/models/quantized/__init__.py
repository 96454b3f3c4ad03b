"""Reads quantized weights of every supported file format into the one form with which the engine computes
(`raytide.kernels.core.QuantizedWeight`).
"""
