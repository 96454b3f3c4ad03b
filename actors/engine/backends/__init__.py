"""The implementations of the engine interface in `base.py`: native, vLLM, a fake, and a client of an engine in another
process (`remote`).
"""
