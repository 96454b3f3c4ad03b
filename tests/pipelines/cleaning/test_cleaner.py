import pickle
from pathlib import Path

import pytest

from raytide.core.errors import ConfigError, DataError
from raytide.core.specs.cleaning import (
    C4Rules,
    CleaningSpec,
    CodeRules,
    Decontamination,
    DocumentRules,
    GopherRules,
    LanguageRule,
    PiiRule,
    SecretsRule,
    UserStage,
)
from raytide.pipelines.cleaning.cleaner import Cleaned, Cleaner
from raytide.pipelines.cleaning.stages import Place

PROSE = (
    "The old bridge crosses the river near the mill. Farmers bring their grain to that mill each autumn. "
    "They talk with the miller and have a drink of cider. Some of them stay until the evening. "
    "In winter the road is closed because of snow. Then nobody comes, and the mill stands still. "
    "The miller repairs the wheel and reads his books by the fire."
)
CODE = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(20))


def clean(cleaner: Cleaner, text: str, url: str = "") -> Cleaned:
    ((found,),) = cleaner.clean_all([text], [Place(url)])
    return found


def test_each_source_has_its_own_rules() -> None:
    spec = CleaningSpec(rules=DocumentRules(gopher=GopherRules()), sources={"*.py": DocumentRules(code=CodeRules())})
    cleaner = Cleaner(spec)
    assert clean(cleaner, PROSE, "a.txt").is_kept
    assert clean(cleaner, CODE, "a.py").is_kept
    assert clean(cleaner, CODE, "a.txt").reason is not None
    assert clean(cleaner, "x" * 2000, "a.py").reason == "code_long_line"


def test_true_stands_for_the_published_thresholds() -> None:
    spec = CleaningSpec.parse({"rules": {"gopher": True, "c4": {"min_sentences": 3}, "fineweb": False}}, where="x")
    assert spec.rules.gopher == GopherRules()
    assert spec.rules.c4 == C4Rules(min_sentences=3)
    assert spec.rules.fineweb is None
    with pytest.raises(ConfigError, match="gopher"):
        CleaningSpec.parse({"rules": {"gofer": True}}, where="x")


def test_scrubbing_is_counted_and_comes_before_the_rules() -> None:
    rules = DocumentRules(pii=PiiRule(max_matches=2), secrets=SecretsRule(), strip_licence_headers=True)
    cleaner = Cleaner(CleaningSpec(rules=rules))
    text = "# Copyright 2024 A\nmail = 'a@b.org'\nkey = 'AKIA" + "ABCDEFGHIJKLMNOP'\n"
    cleaned = clean(cleaner, text)
    assert cleaned.text == "mail = '<EMAIL>'\nkey = '<SECRET>'\n"
    assert cleaned.changes == {"licence_header": 1, "pii_email": 1, "secret_aws_key_id": 1}
    assert clean(cleaner, "a@b.org c@d.org e@f.org").reason == "pii_too_many"
    assert "@" not in clean(cleaner, "a@b.org c@d.org e@f.org").text


def test_secrets_can_drop_the_document() -> None:
    cleaner = Cleaner(CleaningSpec(rules=DocumentRules(secrets=SecretsRule(action="drop"))))
    assert clean(cleaner, "AKIA" + "ABCDEFGHIJKLMNOP").reason == "secrets"
    assert clean(cleaner, "nothing").is_kept


def test_language_is_told_and_kept() -> None:
    cleaner = Cleaner(CleaningSpec(rules=DocumentRules(language=LanguageRule())))
    assert (clean(cleaner, PROSE).language, clean(cleaner, PROSE).reason) == ("en", None)
    assert clean(cleaner, "Der Müller repariert das Rad und liest am Feuer seine Bücher.").reason == "language_other"


def test_documents_of_evaluation_sets_are_dropped(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"q": ["Farmers bring their GRAIN, to that mill each autumn! They talk with the miller"]}\n')
    cleaner = Cleaner(CleaningSpec(decontaminate=Decontamination(sets=(str(questions),))))
    assert clean(cleaner, PROSE).reason == "contaminated"
    assert clean(cleaner, PROSE.replace("grain", "rye")).is_kept
    assert cleaner.identity()[0][0] == str(questions)


def test_an_evaluation_set_that_protects_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too few words")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    for name, said in (("short.txt", "no text of 13 words"), ("bad.jsonl", "row 1 is not JSON")):
        with pytest.raises(DataError, match=said):
            Cleaner(CleaningSpec(decontaminate=Decontamination(sets=(str(tmp_path / name),))))


def test_a_cleaner_is_pure_and_can_be_pickled(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("def up(text):\n    return text.upper()\n")
    rules = DocumentRules(stages=(UserStage(function=f"{tmp_path / 's.py'}:up"),), pii=PiiRule(), gopher=GopherRules())
    cleaner = Cleaner(CleaningSpec(rules=rules))
    (tmp_path / "s.py").unlink()  # its source goes along
    copy: Cleaner = pickle.loads(pickle.dumps(cleaner))
    assert clean(copy, PROSE) == clean(cleaner, PROSE) == clean(cleaner, PROSE)
    assert copy.identity() == cleaner.identity()


def test_stages_make_and_drop_documents(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "def parts(text):\n    return text.split('|')\n"
        "def long(text):\n    return len(text) > 1\n"
        "def shout(texts):\n    return [None if t == 'no' else t + '!' for t in texts]\n"
    )
    kinds = (("parts", "flat_map"), ("long", "filter"), ("shout", "batch"))
    stages = tuple(UserStage(function=f"{tmp_path / 's.py'}:{name}", kind=kind) for name, kind in kinds)  # type: ignore[arg-type]
    cleaner = Cleaner(CleaningSpec(rules=DocumentRules(stages=stages)))
    found = cleaner.clean_all(["ab|c|no|de", "fg"], [Place("x", 0), Place("x", 1)])
    assert [[(each.text, each.reason) for each in row] for row in found] == [
        [("ab!", None), ("c", "stage_long"), ("no", "stage_shout"), ("de!", None)],
        [("fg!", None)],
    ]
