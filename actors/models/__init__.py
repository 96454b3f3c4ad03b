"""Model definitions shared by engine and trainer: `Architecture`, the supported families, and the names of each
family's weights in its files.

Everything here needs only torch, safetensors and pydantic. The parts that planning uses do not import torch.
"""
