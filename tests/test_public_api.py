"""`import raytide` is the whole public API, complete, sorted, and light."""

import ast
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import raytide
from raytide.control.views import ClusterStatus, to_json

HEAVY = {"torch", "ray", "sqlalchemy", "pyarrow", "transformers", "numpy", "httpx", "rich"}


def loaded_by(*command: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded once `command` is over."""
    code = f"""
import atexit, json, sys
atexit.register(lambda: print("\\n" + json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}}))))
{"; ".join(command)}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_public_names_are_sorted() -> None:
    """As ruff sorts them: capitals, classes, functions."""
    assert raytide.__all__ == sorted(
        raytide.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )


def test_the_public_names_are_complete() -> None:
    """The names a type checker sees, those that load, and those announced are the same."""
    tree = ast.parse(Path(str(raytide.__file__)).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == raytide._HOME_OF
    assert set(raytide.__all__) == {*seen, "__version__"}
    assert dir(raytide) == sorted(raytide.__all__)


@pytest.mark.parametrize("name", raytide.__all__)
def test_a_public_name_loads(name: str) -> None:
    assert getattr(raytide, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trane'"):
        _ = raytide.Trane


def test_importing_raytide_loads_nothing_heavy() -> None:
    assert loaded_by("import raytide") & HEAVY == set()


def of_command(*args: str) -> tuple[str, ...]:
    return "import sys", f"sys.argv = {['raytide', *args]}", "from raytide.cli import main", "main()"


def test_the_command_line_s_help_loads_nothing_heavy() -> None:
    loaded = loaded_by(*of_command("--help"))
    assert "typer" in loaded
    assert loaded & {*HEAVY, "pydantic"} == set()


STATUS = ClusterStatus("local", 1.0, None, (), {}, 0, 0, 0, "", {}, "")


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = json.dumps(to_json(STATUS) if self.path == "/v1/status" else []).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("command", ["ps", "status"])
def test_looking_at_a_cluster_loads_nothing_heavy(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Answers) as api:
        thread = threading.Thread(target=api.handle_request, daemon=True)
        thread.start()
        monkeypatch.setenv("RAYTIDE_API", f"http://127.0.0.1:{api.server_port}")
        monkeypatch.setenv("RAYTIDE_TOKEN", "token")
        loaded = loaded_by(*of_command(command))
        thread.join(10)
    assert "typer" in loaded
    assert loaded & HEAVY == set()
