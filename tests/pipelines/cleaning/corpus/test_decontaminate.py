import json
from pathlib import Path

import pytest

from raytide.core.errors import DataError
from raytide.core.specs.cleaning import Decontamination
from raytide.pipelines.cleaning.corpus.decontaminate import EvaluationSets

WORDS = [f"w{i}" for i in range(20)]


@pytest.fixture
def sets(tmp_path: Path) -> EvaluationSets:
    (tmp_path / "set.txt").write_text(" ".join(WORDS))
    return EvaluationSets.read(Decontamination(sets=(str(tmp_path / "set.txt"),)))


def test_thirteen_shared_words_are_found_and_twelve_are_not(sets: EvaluationSets) -> None:
    assert len(sets.n_grams) == 8
    assert sets.overlap("a b " + ", ".join(WORDS[3:16]).upper() + " c") == 1
    assert sets.overlap("a b " + " ".join(WORDS[3:15]) + " c") == 0
    assert sets.overlap(" ".join(WORDS[3:15])) == 0
    assert sets.overlap("") == 0
    assert sets.overlap("x " * 100 + " ".join(WORDS)) == 8


def test_a_set_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "set.txt").write_bytes("größe".encode("latin-1") * 20)
    with pytest.raises(DataError, match=r"set\.txt is not UTF-8"):
        EvaluationSets.read(Decontamination(sets=(str(tmp_path / "set.txt"),)))


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\x85", "\ufeff"])
def test_a_row_ends_only_with_a_line_feed(tmp_path: Path, odd: str) -> None:
    """JSON allows other separators of lines inside of a text, and some tools begin a file with a byte order mark."""
    begin = odd if odd == "\ufeff" else ""
    rows = [{"text": f"{word} {odd} " + " ".join(WORDS)} for word in ("first", "second")]
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "set.jsonl").write_text(begin + lines, newline="")
    found = EvaluationSets.read(Decontamination(sets=(str(tmp_path / "set.jsonl"),)))
    assert found.overlap(" ".join(WORDS)) == 8
