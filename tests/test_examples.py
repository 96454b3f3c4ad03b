"""The examples as they are committed: notebooks without results, and templates of CI that say what raytide knows.

tests/live/test_notebooks.py runs the notebooks, tests/test_howtos.py the commands of the templates.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.workflows.spec import FlowSpec

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
TEMPLATES = ("github", "gitlab", "argo")


def pipeline(ci: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((EXAMPLES / "ci" / f"{ci}.yaml").read_text())
    return found


def commands(ci: str) -> list[str]:
    """Returns the commands of a template in the order in which its CI runs them."""
    file = pipeline(ci)
    if ci == "github":
        return [step["run"] for step in file["jobs"]["release"]["steps"] if "run" in step]
    if ci == "gitlab":
        return [*file["release-model"]["script"], *file["release-model"]["after_script"]]
    (template,) = file["spec"]["templates"]
    return str(template["container"]["args"][0]).splitlines()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_results(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert [cell.source for cell in cells if cell.outputs or cell.execution_count is not None] == []
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"from-text-to-an-endpoint", "cost-and-capacity"}


@pytest.mark.parametrize("ci", TEMPLATES)
def test_every_template_runs_the_same_commands_and_raytide_knows_them(ci: str) -> None:
    same = [re.sub(r"\$\w+", "$COMMIT", command) for command in commands(ci)[1:]]
    assert same == [re.sub(r"\$\w+", "$COMMIT", command) for command in commands("github")[1:]]
    assert commands(ci)[0] == 'pip install "$RAYTIDE_WHEEL"'
    for command in commands(ci)[1:]:
        _, *words = shlex.split(command.partition(" >")[0])
        shown = CliRunner().invoke(app, [*words[:2], "--help"])
        assert shown.exit_code == 0, command
        assert [word for word in words if word.startswith("--") and word not in shown.output] == []


@pytest.mark.parametrize("ci", TEMPLATES)
def test_a_template_keeps_its_secrets_out_of_the_file_and_releases_one_commit_at_a_time(ci: str) -> None:
    text, file = (EXAMPLES / "ci" / f"{ci}.yaml").read_text(), pipeline(ci)
    assert {"RAYTIDE_API", "RAYTIDE_TOKEN", "RAYTIDE_WHEEL"} <= set(re.findall(r"\w+", text))
    one_at_a_time = {
        "github": lambda: file["concurrency"]["group"],
        "gitlab": lambda: file["release-model"]["resource_group"],
        "argo": lambda: file["spec"]["synchronization"]["mutexes"][0]["name"],
    }
    assert one_at_a_time[ci]() == "release-model"


def test_the_flow_of_the_templates_is_valid_and_says_which_commit_it_released() -> None:
    flow = FlowSpec.model_validate(yaml.safe_load((EXAMPLES / "ci" / "flow.yaml").read_text()))
    assert "commit" in flow.params
    assert flow.stages["register"].spec["note"] == "commit ${params.commit}"
