"""Operators for GPUs as Triton kernels, one source for CUDA and ROCm; torch computes the other operators."""
