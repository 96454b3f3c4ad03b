"""Model definitions shared by engine and trainer: `Architecture`, the supported families, and where their files keep
each weight.

Everything imports with torch, safetensors and pydantic alone; what planning needs imports no torch.
"""
