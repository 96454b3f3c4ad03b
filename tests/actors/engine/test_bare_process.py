"""The engine needs few of raytide's dependencies: with all others out of reach it imports, generates, embeds and
shows its progress.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NEEDED = {"numpy", "pydantic", "safetensors", "tokenizers", "torch"}
LAZY = {"jinja2"}  # for chat templates alone
MODULES = {"prometheus-client": "prometheus_client", "pyyaml": "yaml"}

SCRIPT = """
import importlib, pkgutil, sys
blocked = set(sys.argv[2].split(","))
sys.modules.update(dict.fromkeys(blocked))  # None: as if it were not installed
import raytide.actors.engine, raytide.kernels
for package in (raytide.actors.engine, raytide.kernels):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
from raytide.actors.engine import LLM, SamplingParams
llm = LLM(sys.argv[1])
answers = llm.generate(["import os", "def main("], SamplingParams(max_tokens=5, ignore_eos=True), progress=True)
assert [len(answer.token_ids) for answer in answers] == [5, 5]
assert len(llm.embed(["import os"])) == 1
assert not [name for name, module in sys.modules.items() if module and name.split(".")[0] in blocked]
print("done")
"""


def blocked() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[^a-z0-9-]", line)[0] for line in project["dependencies"]} - NEEDED - LAZY
    return {MODULES.get(name, name) for name in names}


def test_the_engine_works_with_five_libraries(model_dir: Path) -> None:
    assert {"ray", "sqlalchemy", "prometheus_client", "rich", "fastapi"} <= blocked()
    command = [sys.executable, "-c", SCRIPT, str(model_dir), ",".join(blocked() | {"transformers", "vllm"})]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr
    assert "answers 2/2" in ran.stderr
