from pathlib import Path

import pytest

from raytide.core.errors import DataError
from raytide.core.specs.cleaning import StageKind, UserStage
from raytide.pipelines.cleaning.stages import Place, load_stage

PLACES = [Place("corpus.jsonl", row) for row in range(3)]


def stage(folder: Path, body: str, kind: StageKind = "map", version: str = "") -> UserStage:
    (folder / "stage.py").write_text(f"def f(x):\n    {body}\n")
    return UserStage(function=f"{folder / 'stage.py'}:f", kind=kind, version=version)


def test_the_digest_follows_the_code(tmp_path: Path) -> None:
    first = load_stage(stage(tmp_path, "return x")).digest
    assert load_stage(stage(tmp_path, "return x")).digest == first
    others = [
        load_stage(stage(tmp_path, "return x + ''")).digest,
        load_stage(stage(tmp_path, "return x", version="2")).digest,
        load_stage(stage(tmp_path, "return x", kind="filter")).digest,
    ]
    assert len({first, *others}) == 4


@pytest.mark.parametrize("kind", ["map", "flat_map", "filter", "batch"])
def test_an_error_names_the_file_and_the_row(tmp_path: Path, kind: StageKind) -> None:
    argument = "x[0] if isinstance(x, list) else x"
    code = load_stage(
        stage(tmp_path, f"return 1 / 0 if ({argument}) == 'b' else [x] if '{kind}' == 'flat_map' else x", kind)
    )
    with pytest.raises(DataError, match=r"failed on corpus\.jsonl, row 1: ZeroDivisionError"):
        code.run(["a", "b", "c"] if kind != "batch" else ["b", "b", "b"], PLACES[1:2] * 3)


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("map", "return 1", "returned int for corpus.jsonl, row 0"),
        ("flat_map", "return 'text'", "returned str for"),
        ("flat_map", "return [None]", "returned list of 1 for"),
        ("batch", "return x[1:]", "returned list of 2 for 3 documents"),
        ("batch", "return [1] * len(x)", "returned int for"),
    ],
)
def test_a_wrong_result_is_an_error(tmp_path: Path, kind: StageKind, body: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        load_stage(stage(tmp_path, body, kind)).run(["a", "b", "c"], PLACES)


def test_missing_code_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    for function, said in (
        (f"{tmp_path}/none.py:f", "does not exist"),
        (f"{tmp_path}/broken.py:f", "ModuleNotFoundError"),
        ("nothing_of_that_name:f", "cannot import"),
        ("textwrap:nothing", "has no function nothing"),
    ):
        with pytest.raises(DataError, match=said):
            load_stage(UserStage(function=function))


def test_an_installed_function_is_a_stage() -> None:
    code = load_stage(UserStage(function="textwrap:dedent"))
    assert code.source is None
    assert code.run(["  a"], PLACES[:1]) == [["a"]]
