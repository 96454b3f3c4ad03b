"""A model three times the memory limit answers, with the tokens of an engine that has room for it.

The limit is the kernel's RLIMIT_DATA, on all memory that is private to the process and not a file's, with Python and
torch in it; and the peak of its resident set, mapped files included, has to stay below it too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.actors.engine.tiny import save_llama

LAYERS, IN_A_FILE = 80, 10
LIMIT = 400 << 20
WEIGHTS_GB = 0.06
ANSWER = """
import json, resource, sys
model, limit, memory = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
import torch
torch.set_num_threads(1)
from raytide.actors.engine import LLM, SamplingParams
llm = LLM(model, weights_memory_gb=memory, num_blocks=8, block_size=8, max_batch_tokens=64)
(answer,) = llm.generate([list(range(40, 70))], SamplingParams(temperature=0, max_tokens=2))
peak_kb = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([answer.outputs[0].token_ids, llm.info.streamed_layers, peak_kb * 1024]))
"""


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of 17 MB and its copies, each turned by another row, in files of ten."""
    folder = tmp_path_factory.mktemp("large")
    save_llama(folder, hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=8,
               num_hidden_layers=1, initializer_range=0.05)  # fmt: skip
    tensors, weight_map = load_file(folder / "model.safetensors"), dict[str, str]()
    layer = {name: tensors.pop(name) for name in list(tensors) if ".layers.0." in name}
    for first in range(0, LAYERS, IN_A_FILE):
        part = {
            name.replace(".0.", f".{index}."): torch.roll(tensor, index, 0)
            for index in range(first, first + IN_A_FILE)
            for name, tensor in layer.items()
        } | (tensors if not first else {})
        file = f"model-{first:05}.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answered(folder: Path, limit: int, weights_memory_gb: float | None) -> subprocess.CompletedProcess[str]:
    order = json.dumps([str(folder), limit, weights_memory_gb])
    return subprocess.run([sys.executable, "-c", ANSWER, order], capture_output=True, text=True, timeout=300)


def test_a_model_three_times_the_memory_limit_answers(large_model: Path) -> None:
    assert sum(path.stat().st_size for path in large_model.glob("*.safetensors")) > 3 * LIMIT
    refused = answered(large_model, LIMIT, None)
    assert refused.returncode != 0, "the limit holds"
    assert "memory" in refused.stderr
    streamed, kept = (answered(large_model, *each) for each in ((LIMIT, WEIGHTS_GB), (-1, None)))
    found, expected = (read(each) for each in (streamed, kept))
    assert found[0] == expected[0]
    assert len(found[0]) == 2
    assert found[1] > 2 * LAYERS // 3
    assert found[2] < LIMIT
    assert expected[2] > 3 * LIMIT


def read(process: subprocess.CompletedProcess[str]) -> Any:
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])
