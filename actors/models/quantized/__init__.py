"""Quantized weights of every supported file format, read into the one form that the engine computes with
(`raytide.kernels.core.QuantizedWeight`)."""
