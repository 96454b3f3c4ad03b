"""The trainer: one training loop (`trainer.py`) that runs in one process (`runners/local.py`), inside Ray Train
(`runners/ray_train.py`) or over an elastic gang (`elastic/driver.py`).

Everything except the driver's Ray worker imports with torch, numpy, safetensors and pydantic alone.
"""
