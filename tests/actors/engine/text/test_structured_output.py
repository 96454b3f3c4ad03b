import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tests.actors.engine.sampling_cases import sequence
from tests.actors.engine.tiny import EOS, VOCAB, save_tokenizer

from raytide.actors.engine.sampling.grammar_mask import apply_mask
from raytide.actors.engine.sampling.sampler import Sampler
from raytide.actors.engine.sampling_params import SamplingParams, Structured
from raytide.actors.engine.sequence import Sequence
from raytide.actors.engine.text.bad_words import BadWords
from raytide.actors.engine.text.structured_output import Grammar, GrammarCompiler, GrammarState
from raytide.actors.engine.text.tokenizer import Tokenizer
from raytide.core.errors import ConfigError, OverloadedError, UsageError

pytest.importorskip("llguidance", reason="a dependency; an environment from before it has none")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["tide", "ray", "日本"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"(north|south) [0-9]{1,3}[ab]?"
GRAMMAR = 'root ::= term ("+" term)?\nterm ::= [0-9] | "(" [x-z] ")"'
STRUCTURES = {
    "schema": Structured("json_schema", json.dumps(SCHEMA)),
    "regex": Structured("regex", REGEX),
    "choice": Structured("choice", ("yes", "no", 'may"be', "yes, but")),
    "grammar": Structured("grammar", GRAMMAR),
}


def matches(name: str, text: str) -> bool:
    if name == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if name == "choice":
        return text in STRUCTURES["choice"].spec
    return bool(re.fullmatch(REGEX if name == "regex" else r"([0-9]|\([x-z]\))(\+([0-9]|\([x-z]\)))?", text))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return Tokenizer(path)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.rust.to_str, VOCAB + 3, [EOS])  # the model's vocabulary is padded


def structured(grammars: GrammarCompiler, name: str, params: SamplingParams, label: str = "s") -> Sequence:
    seq = sequence(label, [5, 6], 2, params, ends=frozenset({EOS}))
    seq.grammar = grammars.compile(STRUCTURES[name])
    return seq


def rows(count: int, seed: int, step: int) -> torch.Tensor:
    generator = np.random.default_rng((seed, step))
    return torch.from_numpy(generator.normal(size=(count, VOCAB + 3)).astype(np.float32))


def finish(sampler: Sampler, seqs: list[Sequence], seed: int = 0, limit: int = 400) -> list[str | None]:
    """Step together until each has ended, by a random model; the finish reasons, None at the limit."""
    open_seqs, reasons = list(seqs), dict.fromkeys(seq.seq_id for seq in seqs)
    for step in range(limit):
        for seq, sampled in zip(open_seqs, sampler.sample(rows(len(open_seqs), seed, step), open_seqs), strict=True):
            assert sampled.error is None
            seq.tokens.append(sampled.token)
            if sampled.ends or sampled.token in seq.stop_token_ids:
                reasons[seq.seq_id] = "ends" if sampled.ends else "end token"
                sampler.forget(seq)
        open_seqs = [seq for seq in open_seqs if reasons[seq.seq_id] is None]
        if not open_seqs:
            break
    return list(reasons.values())


def test_32_mixed_requests_all_match_what_they_asked_for(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    names = [list(STRUCTURES)[place % 4] for place in range(32)]
    seqs = [
        structured(
            grammars, name, SamplingParams(temperature=float(place % 3), seed=place, top_k=place % 5), str(place)
        )
        for place, name in enumerate(names)
    ]
    free = sequence("free", [1], 1, SamplingParams(temperature=0), ends=frozenset({1}))
    assert None not in finish(Sampler(), [*seqs, free])[:32]
    for name, seq in zip(names, seqs, strict=True):
        assert matches(name, tokenizer.decode(seq.tokens[2:])), name


LOOSE = {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}}


@pytest.mark.parametrize("spec", [json.dumps(LOOSE), '{"type": "object"}', "", "true"])
def test_json_has_no_white_space_outside_of_strings(spec: str, grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """A model that prefers white space to all else can put none: it used to write nothing else to the end."""
    state = grammars.compile(Structured("json_schema", spec)).state()
    spacious = GrammarCompiler(tokenizer.rust.to_str, VOCAB + 3, [EOS], any_whitespace=True)
    free = spacious.compile(Structured("json_schema", spec)).state()
    for text in ('{"a":[1,', '{"a":', '{"a":[1,2],'):
        for each, takes in ((state, ""), (free, " \n")):
            each.follow(tokenizer.encode(text))
            mask = np.zeros(-(-(VOCAB + 3) // 32), np.int32)
            each.fill(mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            spaces = [char for char in " \n\t\r" if allowed[tokenizer.encode(char)[0]]]
            assert set(takes) <= set(spaces) if takes else spaces == []
            each.follow([])


def test_a_schema_may_say_itself_what_white_space_it_has(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    spec = json.dumps(LOOSE | {"x-guidance": {"item_separator": ", ", "key_separator": ": "}})
    state = grammars.compile(Structured("json_schema", spec)).state()
    state.follow(tokenizer.encode('{"a": [1, 2]}'))
    with pytest.raises(UsageError):
        state.follow(tokenizer.encode('{"a":[1'))


def test_a_grammars_tokens_do_not_depend_on_what_else_is_in_the_batch(grammars: GrammarCompiler) -> None:
    def run(*others: str) -> list[int]:
        seq = structured(grammars, "schema", SamplingParams(seed=4))
        sampler = Sampler()
        more = [structured(grammars, name, SamplingParams(seed=9), f"other {name}") for name in others]
        for step in range(12):
            logits = torch.cat([rows(1, 7, step)] * (1 + len(more)))
            for each, sampled in zip([seq, *more], sampler.sample(logits, [seq, *more]), strict=True):
                each.tokens.append(sampled.token)
            more = []
        return seq.tokens

    assert run() == run("regex", "choice", "grammar")


def test_the_output_ends_at_once_when_nothing_else_can_follow(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Without a further step for an end token, which a request may ignore and a model may lack."""
    seq = structured(grammars, "choice", SamplingParams(seed=1, ignore_eos=True))
    (reason,) = finish(Sampler(), [seq])
    assert reason == "ends" or tokenizer.decode(seq.tokens[2:]) == "yes"
    nameless = GrammarCompiler(tokenizer.rust.to_str, VOCAB, [])
    free = sequence("free", [5], 1, SamplingParams(seed=3))
    free.grammar = nameless.compile(Structured("regex", "a{3}"))
    assert finish(Sampler(), [free]) == ["ends"]
    assert tokenizer.decode(free.tokens[1:]) == "aaa"


def test_an_end_token_comes_only_where_the_grammar_is_satisfied(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    for seed in range(20):
        seq, sampler = structured(grammars, "regex", SamplingParams(seed=seed)), Sampler()
        while seq.tokens[-1] != EOS:
            logits = rows(1, seed, len(seq.tokens))
            logits[0, EOS] = 30.0  # the model wants to stop all the time
            (sampled,) = sampler.sample(logits, [seq])
            seq.tokens.append(sampled.token)
            if sampled.ends:
                break
        assert matches("regex", tokenizer.decode(seq.tokens[2:]))


def test_min_tokens_delays_an_end_that_can_wait_and_yields_to_one_that_cannot(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    growing = sequence("a", [5], 1, SamplingParams(temperature=0, min_tokens=6), ends=frozenset({EOS}))
    growing.grammar = grammars.compile(Structured("regex", "a+"))
    fixed = sequence("b", [5], 1, SamplingParams(temperature=0, min_tokens=6), ends=frozenset({EOS}))
    fixed.grammar = grammars.compile(Structured("regex", "(ab)?"))
    fixed.bad_words = BadWords([(tokenizer.encode("b")[0],)])
    sampler = Sampler()
    for seq in (growing, fixed):
        ended = False
        while not ended:
            logits = torch.zeros(1, VOCAB + 3)
            logits[:, EOS] = 9.0  # wanted all the time
            (sampled,) = sampler.sample(logits, [seq])
            seq.tokens.append(sampled.token)
            ended = sampled.ends or sampled.token == EOS
    assert (len(growing.tokens[1:-1]), growing.tokens[-1]) == (6, EOS)
    assert tokenizer.decode(fixed.tokens[1:]) == "ab"


def test_a_state_that_was_dropped_or_ran_ahead_is_made_again_from_the_tokens(grammars: GrammarCompiler) -> None:
    steady, forgetful, retried = Sampler(), Sampler(), Sampler()
    seq = structured(grammars, "schema", SamplingParams(seed=11))
    for step in range(12):
        (expected,) = steady.sample(rows(1, 5, step), [seq])
        forgetful.forget(seq)
        retried.sample(rows(1, 6, step), [seq])  # a step that drew another token, and then failed
        assert forgetful.sample(rows(1, 5, step), [seq]) == retried.sample(rows(1, 5, step), [seq]) == [expected]
        if expected.ends:
            break
        seq.tokens.append(expected.token)


class CountedList(list[int]):
    """Counts the tokens that slices of it copy."""

    copied = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.copied += len(found) if isinstance(place, slice) else 0
        return found


def test_a_token_of_a_long_output_costs_no_more_than_one_of_a_short(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    seq, sampler = structured(grammars, "schema", SamplingParams(seed=3)), Sampler()
    seq.grammar = grammars.compile(Structured("regex", "a+"))
    seq.tokens = tokens = CountedList([*seq.tokens, *tokenizer.encode("a") * 3000])
    sampler.sample(rows(1, 5, 0), [seq])
    tokens.copied = 0
    tokens.append(tokenizer.encode("a")[0])
    assert sampler.sample(rows(1, 5, 1), [seq])[0].error is None
    assert tokens.copied < 300


@pytest.mark.parametrize(
    "poison",
    [
        Structured("regex", "(a{1000}"),
        Structured("regex", "a(?=b)"),
        Structured("regex", r"[^\s\S]"),
        Structured("json_schema", "{"),
        Structured("json_schema", '{"type": "nope"}'),
        Structured("json_schema", '{"type": "string", "not": {"const": "x"}}'),
        Structured("json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(30_000)}})),
        Structured("grammar", "root ::= missing"),
        Structured("grammar", "no grammar at all"),
    ],
    ids=lambda each: f"{each.kind} {str(each.spec)[:16]}",
)
def test_a_grammar_that_cannot_be_used_is_refused_by_name(grammars: GrammarCompiler, poison: Structured) -> None:
    for _ in range(2):  # the second time from what is kept
        with pytest.raises(UsageError, match=poison.kind):
            grammars.compile(poison)


def chain(length: int) -> str:
    definitions: dict[str, Any] = {
        f"a{place}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{place + 1}"}}}
        for place in range(length)
    }
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{length}": {"type": "integer"}}})


LONG_CHAINS = [
    Structured("json_schema", chain(1500)),
    Structured("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000)) + 'r6000: "a"'),
    Structured("grammar", "start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(6000)) + 'T6000: "a"'),
]


@pytest.mark.parametrize("spec", LONG_CHAINS, ids=["references", "rules", "terminals"])
def test_a_long_chain_of_definitions_does_not_end_the_process(tmp_path: Path, spec: Structured) -> None:
    """llguidance recursed along it until the stack overflowed."""
    save_tokenizer(tmp_path)
    (tmp_path / "spec").write_text(str(spec.spec))
    code = f"""
from pathlib import Path
from tokenizers import Tokenizer
from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.text.structured_output import GrammarCompiler

tokenizer = Tokenizer.from_file("tokenizer.json")
grammars = GrammarCompiler(tokenizer.to_str, {VOCAB}, [{EOS}])
grammars.compile(Structured("{spec.kind}", Path("spec").read_text())).state()
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


SPECIAL = [
    Structured("choice", ("a<eos>b",)),
    Structured("regex", "a<eos>b"),
    Structured("json_schema", '{"enum": ["a<eos>b"]}'),
    Structured("json_schema", '{"type": "string", "pattern": "^a<eos>b$"}'),
    Structured("grammar", 'start: "a<eos>b"'),
]


@pytest.mark.parametrize("spec", SPECIAL, ids=lambda each: f"{each.kind} {each.spec}")
def test_a_special_tokens_name_in_a_grammar_is_text(
    grammars: GrammarCompiler, tokenizer: Tokenizer, spec: Structured
) -> None:
    seq = sequence("s", [5], 1, SamplingParams(seed=2), ends=frozenset({EOS}))
    seq.grammar = grammars.compile(spec)
    assert finish(Sampler(), [seq]) == ["ends"]
    assert tokenizer.decode(seq.tokens[1:]).strip('"') == "a<eos>b"


def test_a_special_token_can_be_asked_for_in_a_grammar(grammars: GrammarCompiler) -> None:
    seq = sequence("s", [5], 1, SamplingParams(seed=2))
    seq.grammar = grammars.compile(Structured("grammar", 'start: "x" <eos>'))
    assert finish(Sampler(), [seq]) == ["ends"]
    assert seq.tokens[-1] == EOS


@pytest.mark.parametrize("kind", ["choice", "json_schema"])
def test_a_long_text_without_alternatives_is_not_tokenized_for_each_token(grammars: GrammarCompiler, kind: str) -> None:
    """Then only its first token would be allowed; any that the text begins with is."""
    text = "def " * 20_000
    spec = (
        Structured("choice", (text,)) if kind == "choice" else Structured("json_schema", json.dumps({"enum": [text]}))
    )
    state, mask = grammars.compile(spec).state(), np.zeros(-(-(VOCAB + 3) // 32), np.int32)
    if kind == "json_schema":
        state.follow([2])
    state.fill(mask)
    assert np.unpackbits(mask.view(np.uint8)).sum() >= 2


def test_thousands_of_choices_are_one_terminal(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    choices = tuple(f"choice {place} of 7000" for place in range(5000))
    seq = sequence("s", [5], 1, SamplingParams(seed=2), ends=frozenset({EOS}))
    seq.grammar = grammars.compile(Structured("choice", choices))
    assert finish(Sampler(), [seq]) == ["ends"]
    assert tokenizer.decode(seq.tokens[1:]) in choices


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Regular expressions take for ever to compile."""
    release, compile_one = threading.Event(), GrammarCompiler._compile

    def slow(self: GrammarCompiler, structured: Structured) -> object:
        until_s = time.monotonic() + 60
        while structured.kind == "regex" and not release.is_set() and time.monotonic() < until_s:
            pass
        return compile_one(self, structured)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    yield
    release.set()


@pytest.mark.usefixtures("stuck")
async def test_a_slow_compilation_is_given_up_and_holds_up_no_other(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer.rust.to_str, VOCAB, [EOS], timeout_s=0.2)
    with pytest.raises(UsageError, match=r"regex.*not compiled within"):
        grammars.compile(STRUCTURES["regex"])
    with pytest.raises(UsageError, match=r"regex.*not compiled within"):
        await grammars.compile_async(STRUCTURES["regex"])  # the same one again takes no second thread
    grammars._timeout_s = 30.0
    assert await grammars.compile_async(STRUCTURES["choice"]) is grammars.compile(STRUCTURES["choice"])


async def test_a_compilation_that_waits_for_the_processor_is_not_given_up(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_one, released = GrammarCompiler._compile, threading.Event()

    def delayed(self: GrammarCompiler, structured: Structured) -> Grammar:
        released.wait(60.0 if structured is STRUCTURES["schema"] else 0.5)  # as long as others have the processor
        return compile_one(self, structured)

    monkeypatch.setattr(GrammarCompiler, "_compile", delayed)
    grammars = GrammarCompiler(tokenizer.rust.to_str, VOCAB, [EOS], timeout_s=0.3)
    assert await grammars.compile_async(STRUCTURES["regex"]) is grammars.compile(STRUCTURES["regex"])
    assert grammars.compile(STRUCTURES["choice"])
    monkeypatch.setattr("raytide.actors.engine.text.structured_output._MOST_WAIT_S", 0.2)
    with pytest.raises(OverloadedError):
        grammars.compile(STRUCTURES["schema"])
    with pytest.raises(OverloadedError):
        await grammars.compile_async(STRUCTURES["schema"])
    released.set()


def test_replaying_a_long_output_is_not_held_against_its_grammar(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples of a request that another replica takes over, or that was preempted, replay all their tokens."""
    seqs = [structured(grammars, "schema", SamplingParams(seed=place), f"one#{place}") for place in range(4)]
    for seq in seqs:
        seq.request_id = "one"
    sampler = Sampler()
    sampler._constraint._clock = lambda: clock_ms[0] / 1e3
    clock_ms = [0]
    follow = GrammarState.follow

    def slow(self: GrammarState, tokens: list[int], start: int) -> None:
        clock_ms[0] += 40
        follow(self, tokens, start)

    monkeypatch.setattr(GrammarState, "follow", slow)
    assert [each.error for each in sampler.sample(rows(4, 1, 0), seqs)] == [None] * 4


@pytest.mark.parametrize("method", ["fill", "follow"])
@pytest.mark.parametrize("crash", [RuntimeError("boom"), BaseException("panic")])
def test_a_grammar_that_crashes_fails_its_own_row_alone(
    grammars: GrammarCompiler, method: str, crash: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    seqs = [structured(grammars, "schema", SamplingParams(seed=place), str(place)) for place in range(3)]
    healthy = Sampler().sample(rows(3, 1, 0), seqs)
    broken = Sampler()
    broken.sample(rows(3, 1, 0), seqs)
    state, works = broken._constraint._states["1"], getattr(GrammarState, method)

    def crashing(self: GrammarState, *args: object) -> object:
        if self is state:
            raise crash
        return works(self, *args)

    monkeypatch.setattr(GrammarState, method, crashing)
    sampled = broken.sample(rows(3, 1, 0), seqs)
    assert [sampled[0], sampled[2]] == [healthy[0], healthy[2]]
    assert sampled[1].token == -1
    assert isinstance(sampled[1].error, UsageError)


def test_a_mask_keeps_exactly_the_tokens_whose_bits_are_set() -> None:
    allowed = np.random.default_rng(0).random((3, 70)) < 0.5
    bits = np.zeros((3, 96), np.uint8)
    bits[:, :70] = allowed
    mask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    logits = torch.zeros(5, 70)
    apply_mask(logits, [4, 0, 2], mask)
    assert np.array_equal(logits[[4, 0, 2]].isfinite().numpy(), allowed)
    assert logits[[1, 3]].isfinite().all()


def test_without_the_library_the_error_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="llguidance"):
        GrammarCompiler(tokenizer.rust.to_str, VOCAB, [EOS]).compile(STRUCTURES["choice"])
