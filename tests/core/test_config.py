from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from raytide.core.config import Config, environment, home, load_yaml
from raytide.core.errors import ConfigError


class Inner(Config):
    learning_rate: float = Field(default=1.0, gt=0)


class Outer(Config):
    steps: int
    inner: Inner = Inner()
    others: tuple[Inner, ...] = ()


def test_an_unknown_key_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"train\.yaml: unknown key stepz \(did you mean steps\?\)"):
        Outer.parse({"steps": 1, "stepz": 2}, where="train.yaml")
    with pytest.raises(ConfigError, match=r"unknown key others\.0\.learning_rat \(did you mean learning_rate\?\)"):
        Outer.parse({"steps": 1, "others": [{"learning_rat": 2}]}, where="x")
    with pytest.raises(ConfigError) as caught:
        Outer.parse({"steps": 1, "zzz": 2}, where="x")
    assert caught.value.message == "x: unknown key zzz."


def test_every_bad_field_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Outer.parse({"inner": {"learning_rate": -1}}, where="x")
    assert "steps: Field required" in caught.value.message
    assert "inner.learning_rate: Input should be greater than 0" in caught.value.message


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Outer(steps=1).steps = 2  # type: ignore[misc]


def test_yaml_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_text("a: 1\n")
    assert load_yaml(good) == {"a": 1}
    with pytest.raises(ConfigError, match="cannot read"):
        load_yaml(tmp_path / "none.yaml")
    good.write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_yaml(good)
    for content in (b"deadline: 2026-11-31\n", b"at: !!timestamp noon\n", b"a: " + b"1" * 5000):
        good.write_bytes(content)
        with pytest.raises(ConfigError, match="not valid YAML"):
            load_yaml(good)
    good.write_bytes("name: café".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8: byte 9"):
        load_yaml(good)
    good.write_text("- 1\n")
    with pytest.raises(ConfigError, match="no mapping"):
        load_yaml(good)


def test_the_environment_is_read_in_one_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYTIDE_HOME", str(tmp_path))
    monkeypatch.setenv("RAYTIDE_EMPTY", "")
    assert home() == tmp_path
    assert environment("EMPTY") is None
    monkeypatch.delenv("RAYTIDE_HOME")
    assert home() == Path.home() / ".raytide"
