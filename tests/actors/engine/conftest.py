from pathlib import Path

import pytest
import torch
from tests.actors.engine.tiny import save_llama


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    save_llama(path)
    return path
