"""The specification of cleaning: rules that drop or change documents. The default thresholds are those of the papers
that introduced the rules.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from raytide.core.config import Config

PiiKind = Literal["email", "phone", "credit_card", "iban", "ssn", "ip"]
PII_KINDS: tuple[PiiKind, ...] = ("email", "phone", "credit_card", "iban", "ssn", "ip")
StageKind = Literal["map", "flat_map", "filter", "batch"]
MOST_STAGES = 32
MOST_SOURCES = 64


class GopherRules(Config):
    """Quality rules of Gopher (Rae et al. 2021, appendix A.1, arXiv 2112.11446)."""

    min_words: int = Field(default=50, ge=0)
    max_words: int = Field(default=100_000, ge=1)
    min_mean_word_chars: float = Field(default=3.0, ge=0)
    max_mean_word_chars: float = Field(default=10.0, gt=0)
    max_symbols_per_word: float = Field(default=0.1, ge=0)
    """The limit for `#`, and separately for ellipses, as a share of the number of words."""
    max_bullet_lines: float = Field(default=0.9, ge=0, le=1)
    max_ellipsis_lines: float = Field(default=0.3, ge=0, le=1)
    min_words_with_letter: float = Field(default=0.8, ge=0, le=1)
    min_stop_words: int = Field(default=2, ge=0)
    stop_words: tuple[str, ...] = Field(
        default=("the", "be", "to", "of", "and", "that", "have", "with"), min_length=1, max_length=1000
    )


class GopherRepetitionRules(Config):
    """Repetition rules of Gopher (table A1). Each rule limits the share of a document that repeated lines, paragraphs
    or n-grams may make up.

    In a pair (n, share), `share` is a share of the document's characters. A pair in `top_n_grams` limits the share
    of the most frequent n-gram of n words. A pair in `duplicate_n_grams` limits the share of all n-grams of n words
    that occurred before in the document.
    """

    max_duplicate_lines: float = Field(default=0.3, ge=0, le=1)
    max_duplicate_paragraphs: float = Field(default=0.3, ge=0, le=1)
    max_duplicate_line_chars: float = Field(default=0.2, ge=0, le=1)
    max_duplicate_paragraph_chars: float = Field(default=0.2, ge=0, le=1)
    top_n_grams: tuple[tuple[int, float], ...] = Field(default=((2, 0.2), (3, 0.18), (4, 0.16)), max_length=16)
    duplicate_n_grams: tuple[tuple[int, float], ...] = Field(
        default=((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)), max_length=16
    )

    @field_validator("top_n_grams", "duplicate_n_grams")
    @classmethod
    def _shares(cls, pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if any(not 1 <= n <= 100 or not 0 <= share <= 1 for n, share in pairs):
            raise ValueError("a pair is (words from 1 to 100, share from 0 to 1)")
        return pairs


class C4Rules(Config):
    """Rules of C4 (Raffel et al. 2020, arXiv 1910.10683). They remove lines first, and then pages with too few
    sentences."""

    remove_citations: bool = True
    """True to remove Wikipedia's `[1]`, `[edit]` and `[citation needed]`."""
    require_terminal_punctuation: bool = True
    """True to remove lines that do not end in `.`, `?`, `!` or a quotation mark, or that end in an ellipsis."""
    min_sentences: int = Field(default=5, ge=0)
    min_words_per_line: int = Field(default=3, ge=0)
    max_word_chars: int = Field(default=1000, ge=1)
    drop_lorem_ipsum: bool = True
    drop_curly_bracket: bool = True
    remove_javascript_lines: bool = True
    remove_policy_lines: bool = True


class FineWebRules(Config):
    """Rules of FineWeb (Penedo et al. 2024, arXiv 2406.17557, section 3.6)."""

    min_punctuated_lines: float = Field(default=0.12, ge=0, le=1)
    max_short_lines: float = Field(default=0.67, ge=0, le=1)
    short_line_chars: int = Field(default=30, ge=0)
    max_duplicate_line_chars: float = Field(default=0.01, ge=0, le=1)
    max_newlines_per_word: float = Field(default=0.3, ge=0)


class CodeRules(Config):
    """Rules for source code, from StarCoder (Li et al. 2023, arXiv 2305.06161, section 3.1)."""

    max_mean_line_chars: float = Field(default=100.0, gt=0)
    max_line_chars: int = Field(default=1000, ge=1)
    min_alphanumeric: float = Field(default=0.25, ge=0, le=1)
    drop_generated: bool = True
    """True to drop files whose first lines say that a program wrote them."""
    generated_lines: int = Field(default=5, ge=1, le=1000)


class LanguageRule(Config):
    """Keeps documents of the listed languages (ISO 639-1 codes), as py3langid detects them."""

    keep: tuple[str, ...] = Field(default=("en",), min_length=1, max_length=200)
    min_confidence: float = Field(default=0.5, ge=0, le=1)
    max_chars: int = Field(default=20_000, ge=100)
    """The number of characters, from the start of a document, in which its language is detected."""


class PiiRule(Config):
    """Replaces personal data by placeholders such as `<EMAIL>`. Each match is verified first (Luhn's check digit,
    IBAN's modulus, valid ranges)."""

    kinds: tuple[PiiKind, ...] = Field(default=PII_KINDS, min_length=1)
    max_matches: int | None = Field(default=None, ge=0)
    """The number of matches above which a document, such as a list of addresses, is dropped; None for no limit."""


class SecretsRule(Config):
    """Finds keys and passwords in documents. Replaces the keys and passwords, or drops the document."""

    action: Literal["replace", "drop"] = "replace"


class PerplexityRule(Config):
    """Drops documents whose perplexity under a small language model lies outside the bounds."""

    model: str = Field(min_length=1)
    """A model directory of raytide or Hugging Face, readable from every node."""
    min_perplexity: float = Field(default=0.0, ge=0)
    max_perplexity: float = Field(gt=0)
    max_tokens: int = Field(default=512, ge=2, le=1 << 15)
    """The number of tokens, from the start of a document, that are scored."""

    @model_validator(mode="after")
    def _order(self) -> PerplexityRule:
        if self.max_perplexity <= self.min_perplexity:
            raise ValueError(f"max_perplexity {self.max_perplexity} is not above min_perplexity {self.min_perplexity}")
        return self


class UserStage(Config):
    """A cleaning stage that is a user's own Python function. The content of the function's file is a part of the
    dataset's digest.

    - `map`: gets a text and returns a text, or None to drop it.
    - `flat_map`: gets a text and returns a list of texts.
    - `filter`: gets a text and returns whether to keep it.
    - `batch`: gets a list of texts and returns a list of the same length, with None for each text to drop.

    The result for a text must not depend on other documents, nor on how texts are batched.
    """

    function: str = Field(pattern=r"^.+:[A-Za-z_]\w*$", max_length=1000)
    """`module:function`, or `path/to/file.py:function`."""
    kind: StageKind = "map"
    version: str = Field(default="", max_length=100)
    """A text to change when something outside the function's file changes its results."""

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]

    @property
    def is_file(self) -> bool:
        return self.function.rpartition(":")[0].endswith(".py")


class DocumentRules(Config):
    """The cleaning steps for single documents, in this order: the users' own stages, licence headers, secrets, PII,
    then the rule sets.

    A rule set that is left out is off. The value `true` turns it on with its defaults.
    """

    stages: tuple[UserStage, ...] = Field(default=(), max_length=MOST_STAGES)
    strip_licence_headers: bool = False
    secrets: SecretsRule | None = None
    pii: PiiRule | None = None
    language: LanguageRule | None = None
    gopher_repetition: GopherRepetitionRules | None = None
    gopher: GopherRules | None = None
    c4: C4Rules | None = None
    fineweb: FineWebRules | None = None
    code: CodeRules | None = None
    perplexity: PerplexityRule | None = None

    @field_validator(
        "secrets", "pii", "language", "gopher_repetition", "gopher", "c4", "fineweb", "code", mode="before"
    )
    @classmethod
    def _true_is_default(cls, value: object) -> object:
        return {} if value is True else None if value is False else value


class NearDuplicates(Config):
    """Removes near-duplicates by MinHash-LSH. The first document of each cluster of near-duplicates, in dataset order,
    is kept.

    Two documents of Jaccard similarity J become candidates with probability `1 - (1 - J^rows)^bands`.
    """

    bands: int = Field(default=14, ge=1, le=256)
    rows: int = Field(default=8, ge=1, le=64)
    n_gram: int = Field(default=5, ge=1, le=64)
    min_similarity: float = Field(default=0.5, ge=0, le=1)
    """The similarity below which candidates are not duplicates."""
    against: tuple[str, ...] = Field(default=(), max_length=256)
    """Datasets built with the same bands, rows, n_gram and seed: documents near one of theirs are dropped."""
    seed: int = Field(default=0, ge=0, lt=1 << 32)


class Substrings(Config):
    """Cuts out passages of at least `min_words` words that occurred earlier in the corpus (Lee et al. 2021, arXiv
    2107.06499)."""

    min_words: int = Field(default=50, ge=8, le=10_000)


class Decontamination(Config):
    """Drops documents that share an n-gram of words with an evaluation set (GPT-3's 13-grams, arXiv 2005.14165)."""

    sets: tuple[str, ...] = Field(min_length=1, max_length=256)
    """Files of evaluation sets: text, or JSONL of which every text is taken."""
    n_gram: int = Field(default=13, ge=5, le=100)


class CleaningSpec(Config):
    """The cleaning of a corpus: rules for single documents, then near-duplicates, repeated substrings and
    decontamination."""

    rules: DocumentRules = DocumentRules()
    sources: dict[str, DocumentRules] = Field(default_factory=dict, max_length=MOST_SOURCES)
    """Rules by a pattern (with `*`) of the input's URL, in place of `rules`; the first matching pattern counts."""
    decontaminate: Decontamination | None = None
    near_duplicates: NearDuplicates | None = None
    substrings: Substrings | None = None

    @field_validator("near_duplicates", "substrings", mode="before")
    @classmethod
    def _true_is_default(cls, value: object) -> object:
        return {} if value is True else None if value is False else value

    @property
    def stages(self) -> tuple[UserStage, ...]:
        """All cleaning stages that users added: the stages in `rules`, and then the stages of each source."""
        return tuple(stage for rules in (self.rules, *self.sources.values()) for stage in rules.stages)

    @property
    def urls(self) -> tuple[str, ...]:
        """The files and folders that the cleaning steps read in addition to the corpus."""
        models = [each.perplexity.model for each in (self.rules, *self.sources.values()) if each.perplexity]
        files = [stage.function.rpartition(":")[0] for stage in self.stages if stage.is_file]
        against = self.near_duplicates.against if self.near_duplicates else ()
        return (*models, *files, *against, *(self.decontaminate.sets if self.decontaminate else ()))
