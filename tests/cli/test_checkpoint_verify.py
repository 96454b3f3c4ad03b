"""`raytide checkpoint verify`: what it says of whole, altered and unfinished checkpoints, and its exit codes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.manifest import FileRecord, Manifest
from raytide.actors.trainer.checkpoint.storage import LocalStore
from raytide.cli.app import app
from raytide.core.errors import CheckpointError, NotFoundError

BODY = b"weights" * 100


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints at 10 and 20."""
    store = LocalStore(tmp_path / "run" / "checkpoints")
    for step in (10, 20):
        name = manifest.folder_name(step, "0123abcd")
        with store.write(f"{name}/__0_0.distcp") as stream:
            stream.write(BODY)
        record = FileRecord(sha256=hashlib.sha256(BODY).hexdigest(), size=len(BODY))
        body = Manifest(step=step, samples=step, digests={}, world=1, files={"__0_0.distcp": record})
        manifest.commit(store, name, body)
    return tmp_path / "run"


def file_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / manifest.folder_name(step, "0123abcd") / "__0_0.distcp"


def verified(target: Path) -> tuple[list[tuple[int, str]], BaseException | None]:
    result = CliRunner().invoke(app, ["checkpoint", "verify", str(target), "--json"])
    said = [(each["step"], each["state"]) for each in json.loads(result.stdout)] if result.stdout else []
    return said, result.exception


def test_a_run_a_folder_of_checkpoints_and_one_of_them_can_be_named(run_dir: Path) -> None:
    both = [(20, "whole"), (10, "whole")]
    assert verified(run_dir) == (both, None)
    assert verified(run_dir / "checkpoints") == (both, None)
    assert verified(file_of(run_dir, 10).parent) == ([(10, "whole")], None)


def test_one_changed_byte_in_any_of_them_is_found_and_the_exit_code_says_so(run_dir: Path) -> None:
    file_of(run_dir, 10).write_bytes(BODY[:-1] + b"S")
    said, error = verified(run_dir)
    assert said == [(20, "whole"), (10, "bad")]
    assert isinstance(error, CheckpointError)
    assert error.exit_code == 1
    assert "1 of 2 checkpoints" in str(error)
    assert verified(file_of(run_dir, 20).parent)[1] is None
    table = CliRunner().invoke(app, ["checkpoint", "verify", str(run_dir)]).stdout
    assert "__0_0.distcp was altered: its SHA-256 is not the manifest's." in table


def test_an_unfinished_write_is_said_and_is_no_damage(run_dir: Path) -> None:
    (file_of(run_dir, 20).parent / "manifest.json").unlink()
    assert verified(run_dir) == ([(20, "unfinished"), (10, "whole")], None)
    (file_of(run_dir, 10).parent / "manifest.json").unlink()
    said, error = verified(run_dir)
    assert said == [(20, "unfinished"), (10, "unfinished")]
    assert "is whole" in str(error)


def test_where_there_is_nothing_it_is_not_found(tmp_path: Path) -> None:
    assert isinstance(verified(tmp_path)[1], NotFoundError)
