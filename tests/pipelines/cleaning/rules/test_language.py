import pytest

from raytide.core.specs.cleaning import LanguageRule
from raytide.pipelines.cleaning.rules.language import language_of, language_rule

SENTENCES = {
    "en": "The committee will decide next week whether the old bridge can be repaired before winter.",
    "de": "Der Ausschuss wird nächste Woche entscheiden, ob die alte Brücke vor dem Winter repariert werden kann.",
    "fr": "Le comité décidera la semaine prochaine si le vieux pont peut être réparé avant l'hiver.",
    "ru": "Комитет решит на следующей неделе, можно ли отремонтировать старый мост до зимы.",
    "ja": "委員会は来週、冬の前に古い橋を修理できるかどうかを決定します。",
}


@pytest.mark.parametrize("code", list(SENTENCES))
def test_a_sentence_s_language_is_told(code: str) -> None:
    language, confidence = language_of(SENTENCES[code], 1000)
    assert language == code
    assert 0.5 < confidence <= 1


def test_only_the_start_decides() -> None:
    assert language_of(SENTENCES["en"] + SENTENCES["ru"] * 20, len(SENTENCES["en"]))[0] == "en"


def test_reasons() -> None:
    rule = LanguageRule(keep=("en", "de"), min_confidence=0.8)
    assert language_rule("en", 0.8, rule) is None
    assert language_rule("en", 0.79, rule) == "language_unsure"
    assert language_rule("fr", 1.0, rule) == "language_other"
