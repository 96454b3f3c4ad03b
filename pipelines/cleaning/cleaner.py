"""Cleans documents one by one, as a CleaningSpec says: users' own stages first, then scrubbing, then the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

from raytide.core.io.storage import read_bytes, sha256
from raytide.core.specs.cleaning import CleaningSpec, DocumentRules
from raytide.pipelines.cleaning.corpus.decontaminate import EvaluationSets
from raytide.pipelines.cleaning.rules.code import code_quality
from raytide.pipelines.cleaning.rules.gopher import gopher_quality, gopher_repetition
from raytide.pipelines.cleaning.rules.language import language_of, language_rule
from raytide.pipelines.cleaning.rules.perplexity import check_model, perplexity_rule
from raytide.pipelines.cleaning.rules.web import c4_quality, fineweb_quality
from raytide.pipelines.cleaning.scrub.licences import strip_licence_header
from raytide.pipelines.cleaning.scrub.personal import scrub_personal
from raytide.pipelines.cleaning.scrub.secrets import replace_secrets
from raytide.pipelines.cleaning.stages import Place, StageCode, load_stage


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A document after cleaning. If a rule dropped the document, `text` is the text to which the rule was applied."""

    text: str
    reason: str | None = None
    """The rule that dropped the document; None if it is kept."""
    changes: Counter[str] = field(default_factory=Counter)
    """Replaced matches and removed headers, by kind."""
    language: str | None = None

    @property
    def is_kept(self) -> bool:
        return self.reason is None


class Cleaner:
    """Applies the cleaning steps to each document. The result depends only on the document, its URL and the spec.

    A Cleaner can be pickled. Models are loaded in the process that uses them.
    """

    def __init__(self, spec: CleaningSpec) -> None:
        self.spec = spec
        self.stages: dict[str, StageCode] = {}
        self.evaluation = None if spec.decontaminate is None else EvaluationSets.read(spec.decontaminate)
        for rules in (spec.rules, *spec.sources.values()):
            for stage in rules.stages:
                self.stages[stage.model_dump_json()] = load_stage(stage)
            if rules.perplexity is not None:
                check_model(rules.perplexity.model)

    def clean_all(self, texts: Sequence[str], places: Sequence[Place]) -> list[list[Cleaned]]:
        """Returns a list of cleaned documents for each text. The list has one document, unless a flat_map stage returns
        several or none.
        """
        results: list[list[Cleaned]] = [[] for _ in texts]
        groups: dict[int, list[int]] = {}
        chosen = [self.rules_for(place.url) for place in places]
        for i, rules in enumerate(chosen):
            groups.setdefault(id(rules), []).append(i)
        for members in groups.values():
            rules = chosen[members[0]]
            staged = self._run_stages(rules, [texts[i] for i in members], [places[i] for i in members])
            for i, documents in zip(members, staged, strict=True):
                results[i] = [each if each.reason else self._apply(each.text, rules) for each in documents]
        return results

    def rules_for(self, url: str) -> DocumentRules:
        """Returns the rules of the first pattern that matches the URL, or the default rules if none matches."""
        return next((rules for pattern, rules in self.spec.sources.items() if fnmatch(url, pattern)), self.spec.rules)

    @property
    def makes_documents(self) -> bool:
        """True if a record can become several documents."""
        return any(stage.kind == "flat_map" for stage in self.spec.stages)

    def identity(self) -> list[tuple[str, int, str]]:
        """Returns (name, size in bytes, version) for each stage's code, each evaluation set and each model. Together
        with the spec, these entries cover everything that affects the result of cleaning.
        """
        found = [(f"stage {code.stage.function}", 0, code.digest) for code in self.stages.values()]
        if self.spec.decontaminate is not None:
            contents = [(url, read_bytes(url)) for url in self.spec.decontaminate.sets]
            found += [(url, len(content), sha256(content)) for url, content in contents]
        for rules in (self.spec.rules, *self.spec.sources.values()):
            if rules.perplexity is not None:
                found.append(_model_identity(rules.perplexity.model))
        return sorted(set(found))

    def _run_stages(self, rules: DocumentRules, texts: Sequence[str], places: Sequence[Place]) -> list[list[Cleaned]]:
        documents = [[Cleaned(text)] for text in texts]
        for stage in rules.stages:
            code = self.stages[stage.model_dump_json()]
            live = [(i, k) for i, row in enumerate(documents) for k, each in enumerate(row) if each.is_kept]
            made = code.run([documents[i][k].text for i, k in live], [places[i] for i, _ in live])
            for (i, k), becomes in sorted(zip(live, made, strict=True), reverse=True):  # from the end: indices stay
                kept = [Cleaned(text) for text in becomes]
                documents[i][k : k + 1] = kept or [Cleaned(documents[i][k].text, f"stage_{stage.name}")]
        return documents

    def _apply(self, text: str, rules: DocumentRules) -> Cleaned:
        text, reason, changes = _scrub(text, rules)
        language = None
        if reason is None and rules.language is not None:
            language, confidence = language_of(text, rules.language.max_chars)
            reason = language_rule(language, confidence, rules.language)
        if reason is None:
            text, reason = _judge(text, rules)
        if reason is None and self.evaluation is not None and self.evaluation.overlap(text):
            reason = "contaminated"
        if reason is None and rules.perplexity is not None:
            reason = perplexity_rule(text, rules.perplexity)
        if reason is None and not text:
            reason = "empty"
        return Cleaned(text, reason, changes, language)


def _scrub(text: str, rules: DocumentRules) -> tuple[str, str | None, Counter[str]]:
    changes: Counter[str] = Counter()
    if rules.strip_licence_headers:
        stripped = strip_licence_header(text)
        changes["licence_header"] = int(stripped != text)
        text = stripped
    if rules.secrets is not None:
        text, found = replace_secrets(text)
        changes.update({f"secret_{kind}": count for kind, count in found.items()})
        if found and rules.secrets.action == "drop":
            return text, "secrets", +changes
    if rules.pii is not None:
        text, found = scrub_personal(text, rules.pii.kinds)
        changes.update({f"pii_{kind}": count for kind, count in found.items()})
        if rules.pii.max_matches is not None and found.total() > rules.pii.max_matches:
            return text, "pii_too_many", +changes
    return text, None, +changes


def _judge(text: str, rules: DocumentRules) -> tuple[str, str | None]:
    """Returns the text and the first rule that it violates, in FineWeb's order."""
    reason = gopher_repetition(text, rules.gopher_repetition) if rules.gopher_repetition else None
    if reason is None and rules.gopher:
        reason = gopher_quality(text, rules.gopher)
    if reason is None and rules.c4:
        text, reason = c4_quality(text, rules.c4)
    if reason is None and rules.fineweb:
        reason = fineweb_quality(text, rules.fineweb)
    if reason is None and rules.code:
        reason = code_quality(text, rules.code)
    return text, reason


def _model_identity(model: str) -> tuple[str, int, str]:
    from raytide.actors.models.content import content_digest

    folder = check_model(model)
    tokenizer = (folder / "tokenizer.json").read_bytes()
    return f"model {model}", len(tokenizer), content_digest(folder) + sha256(tokenizer)
