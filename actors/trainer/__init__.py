"""The trainer: one training loop (`trainer.py`) with three ways to run it: in one process (`runners/local.py`), inside
Ray Train (`runners/ray_train.py`), or over an elastic gang (`elastic/driver.py`).

To import the trainer, torch, numpy, safetensors and pydantic are enough. Only the driver's Ray worker needs Ray.
"""
