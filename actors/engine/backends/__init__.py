"""The implementations of the engine interface in `base.py`: native, vLLM and a fake."""
