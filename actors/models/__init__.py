"""Model definitions shared by engine and trainer: `Architecture`, the supported families, and the names of each
family's weights in its files.

Everything imports with torch, safetensors and pydantic alone; the parts that planning needs import no torch.
"""
