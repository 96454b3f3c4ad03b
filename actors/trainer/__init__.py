"""The trainer: one loop (`loop.py`) that runs alone (`local.py`) or over an elastic gang (`driver.py`).

Everything but the driver imports with torch, numpy, safetensors and pydantic alone.
"""
