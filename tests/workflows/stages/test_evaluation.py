"""The loss of an evaluation is that of transformers; answers are judged as the file says."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import DataError, EngineError
from raytide.core.io.token_dataset import load_manifest
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.core.specs.model import ModelSpec
from raytide.core.specs.train import TrainSpec
from raytide.pipelines.build import build
from raytide.pipelines.runners.inline import InlineRunner
from raytide.workflows.stages.configs import EvalSpec
from raytide.workflows.stages.evaluation import answers, held_out_loss, is_right, main, read_cases

SEQ_LEN = 16


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    spec = DataSpec(
        inputs=(str(folder / "a.txt"),),
        tokenizer=TokenizerSpec(train=TrainTokenizer(vocab_size=320)),
        out=str(folder / "dataset"),
    )
    build(spec, runner=InlineRunner())
    return folder / "dataset"


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    model = ModelSpec(dim=32, layers=2, heads=2, kv_heads=1, max_seq_len=64)
    train_local(TrainSpec(dataset=str(dataset), out=str(out), model=model, steps=3, global_batch=4, seq_len=SEQ_LEN))
    return out


def test_the_loss_is_that_of_transformers_over_the_same_sequences(run: Path, dataset: Path) -> None:
    spec = EvalSpec(model=str(run), dataset=str(dataset), seq_len=SEQ_LEN, batch=3, max_sequences=7)
    found = held_out_loss(spec)
    (shard,) = load_manifest(str(dataset)).shards
    tokens = torch.from_numpy(np.fromfile(dataset / shard.file, dtype="<u2").astype(np.int64))[: 7 * SEQ_LEN + 1]
    rows = torch.stack([tokens[at * SEQ_LEN : (at + 1) * SEQ_LEN + 1] for at in range(7)])
    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(rows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    assert found["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-4)
    assert found["tokens"] == 7 * SEQ_LEN


def test_the_process_writes_its_metrics_whole_or_fails_with_the_reason(
    run: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYTIDE_STAGE_OUT", str(tmp_path))
    good = {"model": str(run), "dataset": str(dataset), "seq_len": SEQ_LEN, "max_sequences": 2}
    assert main(json.dumps(good)) == 0
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["tokens"] == 2 * SEQ_LEN
    assert main(json.dumps({**good, "model": str(tmp_path / "none")})) != 0
    assert "holds no model" in capsys.readouterr().err
    assert json.loads((tmp_path / "metrics.json").read_text()) == written


def prompts(folder: Path, *lines: str) -> EvalSpec:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return EvalSpec(prompts=str(path), endpoint="http://x/v1", endpoint_model="m")


def test_answers_are_right_if_they_hold_the_text_or_match_the_pattern(tmp_path: Path) -> None:
    spec = prompts(
        tmp_path,
        '{"prompt": "2+2", "expect": "4"}',
        "",
        '{"prompt": "3+3", "matches": "^(6|six)$"}',
        '{"prompt": "5+5", "expect": "10"}',
    )
    said = {"2+2": "it is 4.", "3+3": "six", "5+5": "11"}
    assert answers(spec, said.__getitem__) == {"accuracy": pytest.approx(2 / 3), "prompts": 3.0}
    assert not is_right("66", {"matches": "^6$"})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{half", "line 2: "),
        ('{"prompt": "a"}', "line 2: it has no texts"),
        ('["prompt"]', "line 2: it has no texts"),
        ('{"prompt": 3, "expect": "a"}', "line 2: it has no texts"),
        ('{"prompt": "a", "matches": "("}', "line 2: `matches` is no pattern"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    spec = prompts(tmp_path, '{"prompt": "a", "expect": "b"}', line)
    with pytest.raises(DataError, match=r"prompts\.jsonl, " + why.replace("(", r"\(")):
        read_cases(spec.prompts)


def test_a_file_without_prompts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 0 prompts"):
        read_cases(prompts(tmp_path, "").prompts)


class Keyed(BaseHTTPRequestHandler):
    """A gateway that demands a key, and answers each prompt with 4."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        is_allowed = self.headers["Authorization"] == "Bearer rk-secret"
        body = {"choices": [{"text": "4"}]} if is_allowed else {"error": {"message": "No such API key."}}
        text = json.dumps(body).encode()
        self.send_response(200 if is_allowed else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Returns the spec of an evaluation by a gateway that demands a key."""
    with HTTPServer(("127.0.0.1", 0), Keyed) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spec = prompts(tmp_path, '{"prompt": "2+2", "expect": "4"}')
        yield {"prompts": spec.prompts, "endpoint": f"http://127.0.0.1:{server.server_port}/v1", "endpoint_model": "m"}
        server.shutdown()


def test_the_key_of_an_endpoint_is_read_from_a_file(keyed: dict[str, str], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("rk-secret\n")
    assert answers(EvalSpec.parse({**keyed, "api_key_file": str(key)}, where="eval"))["accuracy"] == 1.0
    key.write_text("rk-secret\nand more\n")
    with pytest.raises(DataError, match="is no API key"):
        answers(EvalSpec.parse({**keyed, "api_key_file": str(key)}, where="eval"))


def test_an_endpoint_that_refuses_the_key_ends_the_process_with_the_reason(
    keyed: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(json.dumps(keyed)) == EngineError.exit_code
    assert "No such API key" in capsys.readouterr().err
