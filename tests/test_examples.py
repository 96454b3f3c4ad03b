"""The example notebooks as they are committed: without results, and valid. tests/live/test_notebooks.py runs them."""

from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.ipynb"))


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
