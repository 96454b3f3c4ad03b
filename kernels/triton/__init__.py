"""GPU operators as Triton kernels, from one source for CUDA and ROCm. torch computes operators that have no kernel
here.
"""
