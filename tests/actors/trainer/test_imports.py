"""A bare GPU machine suffices: the loop imports and trains with torch, numpy, safetensors and pydantic alone."""

from __future__ import annotations

import subprocess
import sys

from raytide.core.specs.train import TrainSpec

SCRIPT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"ray", "sqlalchemy", "fsspec", "prometheus_client", "yaml", "httpx"}:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Absent())
from raytide.core.specs.train import TrainSpec
assert "torch" not in sys.modules
from raytide.actors.trainer.runners.local import train_local
import raytide.actors.trainer.elastic.driver, raytide.actors.trainer.elastic.worker
import torch
torch.set_num_threads(1)
assert train_local(TrainSpec.model_validate_json(sys.argv[1])).steps == 2
"""


def test_the_trainer_runs_without_ray_fsspec_and_sqlalchemy(spec: TrainSpec) -> None:
    spec = spec.model_copy(update={"steps": 2, "export": True})
    done = subprocess.run([sys.executable, "-c", SCRIPT, spec.model_dump_json()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
