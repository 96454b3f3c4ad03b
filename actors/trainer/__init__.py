"""The trainer. Its training loop (`trainer.py`) can run in three ways: in one process (`runners/local.py`), inside Ray
Train (`runners/ray_train.py`), or over an elastic gang (`elastic/driver.py`).

Importing the trainer requires only torch, numpy, safetensors and pydantic. Only the driver's Ray worker needs Ray.
"""
