"""`raytide data inspect`, on a dataset that was built here."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.core.errors import DataError
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.pipelines.build import build
from raytide.pipelines.runners.inline import InlineRunner

ENGLISH = "The old bridge crosses the river near the mill, and farmers bring their grain to it each autumn."


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("inspect")
    rows = [ENGLISH, ENGLISH, "Der Müller repariert das Rad und liest am Feuer <script>alert(1)</script> seine Bücher."]
    rows.append(ENGLISH + " Write to jane@example.org.")
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    spec = DataSpec.model_validate(
        {
            "inputs": (str(folder / "in.jsonl"),),
            "out": str(folder / "out"),
            "tokenizer": TokenizerSpec(train=TrainTokenizer(vocab_size=300)),
            "cleaning": {"rules": {"language": {"min_confidence": 0}, "pii": True}},
        }
    )
    build(spec, runner=InlineRunner())
    return spec.out


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["data", "inspect", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_counts_and_samples_are_printed(dataset: str) -> None:
    printed = run(dataset)
    assert printed.startswith("2 of 4 documents kept (50.00 %)\n")
    for line in ("duplicate\t1\t25.00 %", "language_other\t1\t25.00 %", "pii_email\t1\t100.00 %", "en\t3\t75.00 %"):
        assert f"\n{line}\n" in printed
    assert "row 2: Der Müller" in printed


def test_one_reason_can_be_chosen(dataset: str) -> None:
    body = json.loads(run(dataset, "--json", "--reason", "language_other"))
    assert (body["read"], body["kept"], body["dropped"]) == (4, 2, {"duplicate": 1, "language_other": 1})
    assert [each["row"] for each in body["samples"]] == [2]
    with pytest.raises(DataError, match="no document was dropped for 'nothing'"):
        run(dataset, "--reason", "nothing")


def test_the_page_escapes_what_it_shows(dataset: str, tmp_path: Path) -> None:
    run(dataset, "--html", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>") and page.endswith("</html>\n")
    assert "<script>" not in page and "&lt;script&gt;alert(1)" in page
    for part in ("language_other", "pii_email", "64 to 127", ">en<"):
        assert part in page


def test_a_damaged_file_of_samples_is_an_error(dataset: str) -> None:
    samples = Path(dataset) / "dropped.jsonl"
    whole = samples.read_bytes()
    samples.write_bytes(whole + b"{")
    with pytest.raises(DataError, match=r"dropped\.jsonl, row 2 is not JSON"):
        run(dataset)
    samples.write_bytes(whole)
