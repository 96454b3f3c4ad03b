"""What a decoder is, for the engine and the trainer alike: `Architecture`, the supported families, and where their
files keep a weight.

Everything here imports with torch, safetensors and pydantic alone; what only plans needs no torch.
"""
