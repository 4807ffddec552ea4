"""Grammars of every kind, followed token by token: what is allowed always comes to a match, and nothing else ends."""

import gc
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from engine.execution import grammar as grammar_module
from engine.execution.grammar import MAX_CACHED, GrammarCompiler, read_tokenizer
from engine.execution.sampler import NO_TOKEN, SampledRow, sample_step
from engine.execution.sequence_grammars import SequenceGrammars
from engine.execution.token_masks import TokenMasks
from engine.plan import NewSequence, StepPlan
from streamkv.errors import InvalidField, ModelError
from streamkv.model_files import ModelFiles
from streamkv.protocol import unpack_floats
from streamkv.sampling import Grammar, SamplingParams
from tests.support.small_tokenizers import (
    train_byte_fallback,
    train_byte_level,
    train_metaspace,
    write_folder,
    write_gguf,
)

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "日本"]}, "maxItems": 3},
        "parent": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_byte_level("gpt-2")


@pytest.fixture(scope="module")
def vocab_size(tokenizer: Tokenizer) -> int:
    """Padded, as models do it, and no multiple of 32."""
    return tokenizer.get_vocab_size() + 51


@pytest.fixture(scope="module")
def files(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return write_folder(tmp_path_factory.mktemp("tokenizer"), tokenizer)


@pytest.fixture(scope="module")
def compiler(files: ModelFiles, vocab_size: int) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(partial(read_tokenizer, files, vocab_size, [EOS]))
    yield compiler
    compiler.close()


@pytest.fixture
def grammars(compiler: GrammarCompiler, vocab_size: int) -> Iterator[SequenceGrammars]:
    grammars = SequenceGrammars(compiler, vocab_size)
    yield grammars
    grammars.close()


class Follower:
    """One sequence, stepped by hand."""

    def __init__(
        self,
        grammars: SequenceGrammars,
        grammar: Grammar,
        prior: list[int] | None = None,
        sequence_id: int = 1,
        **more: int,
    ) -> None:
        prior = prior or []
        sampling = SamplingParams(seed=0, max_tokens=1000, grammar=grammar, **more)
        facts = NewSequence(sequence_id, 0, sampling, 3, (EOS,), [7, 8, 9, *prior])
        grammars.apply(StepPlan(0, [], [facts]))
        self._grammars = grammars
        self.row = SampledRow(facts, 3 + len(prior))

    def masks(self) -> TokenMasks:
        filling = self._grammars.begin_masks([self.row])
        assert filling is not None
        return filling.result(30.0)

    def allowed(self, vocab_size: int) -> list[int]:
        masks = self.masks()
        assert not masks.failed, masks.failed
        logits = torch.zeros(1, vocab_size)
        masks.apply(logits)
        return logits[0].isfinite().nonzero().view(-1).tolist()

    def take(self, token_id: int) -> None:
        self._grammars.remember([self.row], [token_id])
        self.row = SampledRow(self.row.sequence, self.row.position + 1)

    def forget(self) -> None:
        self._grammars.apply(StepPlan(0, [], finished_sequence_ids=[self.row.sequence.sequence_id]))


def wander(follower: Follower, vocab_size: int, seed: int, max_tokens: int = 400, ends_early: bool = True) -> list[int]:
    """A walk along allowed tokens to end-of-sequence, which is taken as soon as it may be, or only when it must."""
    dice = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        allowed = follower.allowed(vocab_size)
        assert allowed, "a text that can neither go on nor end"
        if EOS in allowed and (ends_early or allowed == [EOS]):
            return tokens
        tokens.append(dice.choice([token_id for token_id in allowed if token_id != EOS]))
        follower.take(tokens[-1])
    raise AssertionError(f"no end after {max_tokens} tokens")


def check_person(text: str) -> None:
    value = json.loads(text)
    assert set(value) <= {"name", "age", "tags", "parent"} and {"name", "age", "tags"} <= set(value)
    assert isinstance(value["name"], str) and len(value["name"]) <= 12
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "bé", "日本"}
    assert value.get("parent") in (None, True, False)


@pytest.mark.parametrize("seed", range(6))
def test_a_schema_is_followed_whatever_is_drawn(
    grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int, seed: int
) -> None:
    follower = Follower(grammars, Grammar("json_schema", json.dumps(PERSON)))
    check_person(tokenizer.decode(wander(follower, vocab_size, seed, max_tokens=2000)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("pattern", "ends_early"),
    [
        (r"[0-9]{3}-[a-f]{2,5}", False),
        (r"\d{2}", False),
        (r"(?:ä|ö|ü|中文|😀){3}", False),
        (r"[^\s]{1,8}( the| then)*", True),
        (r"a/b\\c\"'", False),
        ("the( quick)? brown|them", False),
    ],
)
def test_a_pattern_matches_the_whole_text(
    grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int, pattern: str, ends_early: bool, seed: int
) -> None:
    follower = Follower(grammars, Grammar("regex", pattern))
    text = tokenizer.decode(wander(follower, vocab_size, seed, ends_early=ends_early))
    assert re.fullmatch(pattern, text, re.ASCII), text


@pytest.mark.parametrize("seed", range(6))
def test_a_choice_is_one_of_the_texts(
    grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int, seed: int
) -> None:
    choices = [
        "yes",
        "yesterday",
        "no",
        'né "quoted" \\ back',
        "two\nlines\ttab",
        "😀👩‍👩‍👧‍👦",
        "a/b",
        " space",
        "\u2028\x7f",
    ]
    follower = Follower(grammars, Grammar("choice", json.dumps(choices)))
    assert tokenizer.decode(wander(follower, vocab_size, seed, ends_early=seed % 2 == 0)) in choices


@pytest.mark.parametrize("seed", range(4))
def test_json_object_is_any_object_and_nothing_else(
    grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int, seed: int
) -> None:
    follower = Follower(grammars, Grammar("json_object"))
    (opening,) = {tokenizer.decode([token_id])[0] for token_id in follower.allowed(vocab_size)}
    assert opening == "{"
    dice = random.Random(seed)
    text = ""
    for _ in range(1000):  # strings have no limit, so the walk is nudged to their ends and to those of the containers
        allowed = follower.allowed(vocab_size)
        if EOS in allowed:
            break
        nearer = [token_id for token_id in allowed if set(tokenizer.decode([token_id])) & set('"}]')]
        token_id = dice.choice(nearer if nearer and dice.random() < 0.7 else allowed)
        follower.take(token_id)
        text += tokenizer.decode([token_id])
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "source", ['start: "x" y{2}\ny: /[0-9]/ | "(" y ")"\n', 'root ::= "x" y y\ny ::= [0-9] | "(" y ")"\n']
)
def test_a_grammar_may_recurse_and_be_written_in_either_notation(
    grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int, source: str
) -> None:
    for seed in range(4):
        follower = Follower(grammars, Grammar("lark", source), sequence_id=seed)
        text = tokenizer.decode(wander(follower, vocab_size, seed, max_tokens=2000))
        assert text.startswith("x") and text.count("(") == text.count(")") and len(re.findall(r"\d", text)) == 2


def test_a_token_may_span_two_symbols(grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int) -> None:
    whole = tokenizer.token_to_id("the")
    assert whole is not None
    follower = Follower(grammars, Grammar("lark", 'start: a b\na: "t" | "th"\nb: "he" | "e"\n'))
    texts = {tokenizer.decode([token_id]) for token_id in follower.allowed(vocab_size)}
    assert texts == {"t", "th", "the"}
    follower.take(whole)
    assert follower.allowed(vocab_size) == [EOS]


def test_end_of_sequence_is_allowed_only_where_the_text_is_a_match(
    grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int
) -> None:
    follower = Follower(grammars, Grammar("regex", "ab?"))
    assert EOS not in follower.allowed(vocab_size)
    follower.take(tokenizer.token_to_id("a"))
    assert {EOS, tokenizer.token_to_id("b")} == set(follower.allowed(vocab_size))
    assert not follower.masks().ending
    follower.take(tokenizer.token_to_id("b"))
    masks = follower.masks()
    assert masks.ending == {0}
    assert follower.allowed(vocab_size) == [EOS]


def test_special_and_padding_ids_are_never_text(
    grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int
) -> None:
    allowed = Follower(grammars, Grammar("regex", r"(?s:.{1,40})")).allowed(vocab_size)
    assert allowed and min(allowed) > 2 and max(allowed) < tokenizer.get_vocab_size()


def test_min_tokens_holds_an_end_back_only_while_there_is_more_to_say(
    grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int
) -> None:
    a = tokenizer.token_to_id("a")
    for pattern, num_expected in (("a*", 5), ("a{1,2}", 2)):
        follower = Follower(grammars, Grammar("regex", pattern), sequence_id=num_expected, min_tokens=5)
        tokens = []
        while not tokens or tokens[-1] != EOS:
            logits = torch.zeros(1, vocab_size)
            logits[0, a], logits[0, EOS] = 1.0, 2.0
            tokens += sample_step(logits, [greedy(follower.row)], follower.masks()).token_ids
            follower.take(tokens[-1])
        assert tokens == [a] * num_expected + [EOS]


def greedy(row: SampledRow) -> SampledRow:
    facts = row.sequence
    sampling = SamplingParams(
        seed=0, max_tokens=1000, temperature=0.0, min_tokens=facts.sampling.min_tokens, logprobs=0
    )
    return SampledRow(NewSequence(facts.sequence_id, 0, sampling, facts.num_prompt, facts.eos_token_ids), row.position)


def test_a_mask_holds_for_its_rows_alone_and_log_probabilities_are_the_models(
    grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int
) -> None:
    follower = Follower(grammars, Grammar("choice", '["yes"]'), sequence_id=4)
    plain = SampledRow(
        NewSequence(9, 0, SamplingParams(seed=0, max_tokens=9, temperature=0.0, logprobs=0), 1, (EOS,)), 5
    )
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(3))
    rows = [plain, greedy(follower.row), plain]
    filling = grammars.begin_masks(rows)
    assert filling is not None
    tokens = sample_step(logits.clone(), rows, filling.result())
    assert tokens.token_ids[0] == logits[0].argmax() and tokens.token_ids[2] == logits[2].argmax()
    chosen = tokens.token_ids[1]
    assert "yes".startswith(tokenizer.decode([chosen])) and chosen != logits[1].argmax()
    told = unpack_floats(tokens.logprobs[4].chosen)[0]
    assert told == pytest.approx(logits[1].log_softmax(-1)[chosen].item(), abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_a_continuation_is_where_the_whole_text_was(
    grammars: SequenceGrammars, vocab_size: int, tokenizer: Tokenizer, seed: int
) -> None:
    wanted = Grammar("json_schema", json.dumps(PERSON))
    follower = Follower(grammars, wanted, sequence_id=100)
    dice = random.Random(seed)
    tokens: list[int] = []
    seen = [follower.allowed(vocab_size)]
    while EOS not in seen[-1]:
        tokens.append(dice.choice(seen[-1]))
        follower.take(tokens[-1])
        seen.append(follower.allowed(vocab_size))
    for cut in range(0, len(tokens) + 1, 1 + len(tokens) // 20):
        again = Follower(grammars, wanted, prior=tokens[:cut], sequence_id=cut)
        assert again.allowed(vocab_size) == seen[cut]
        again.forget()
    follower.forget()
    assert not len(grammars)


def test_tokens_that_do_not_follow_the_grammar_end_with_a_reason(
    grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int
) -> None:
    wrong = Follower(grammars, Grammar("regex", "a+", "guided_regex"), prior=tokenizer.encode("xyz").ids)
    right = Follower(grammars, Grammar("regex", "a+"), sequence_id=2)
    filling = grammars.begin_masks([wrong.row, right.row])
    assert filling is not None
    masks = filling.result()
    assert "guided_regex" in masks.failed[0] and list(masks.failed) == [0]
    tokens = sample_step(torch.zeros(2, vocab_size), [wrong.row, right.row], masks)
    assert tokens.token_ids[0] == NO_TOKEN and tokens.failed == {1: masks.failed[0]}
    assert set(tokenizer.decode(tokens.token_ids[1:])) == {"a"}


def test_a_position_that_the_grammar_does_not_know_is_a_fault(grammars: SequenceGrammars) -> None:
    follower = Follower(grammars, Grammar("regex", "a+"))
    with pytest.raises(ValueError, match="samples position 4"):
        grammars.begin_masks([SampledRow(follower.row.sequence, 4)])


# What cannot be followed


def nested(depth: int, wrap: Callable[[object], object]) -> object:
    schema: object = {"type": "string"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


BAD = [
    ("json_schema", "{", "JSON"),
    ("json_schema", "[1]", "object"),
    ("json_schema", '{"type":"objekt"}', "objekt"),
    ("json_schema", '{"type":"object","properties":{"a":{"$ref":"#/nowhere"}}}', "nowhere"),
    ("json_schema", '{"$ref":"http://localhost:1/x"}', "localhost"),
    ("json_schema", '{"not":{"type":"string"}}', "not"),
    ("json_schema", '{"allOf":[{"$ref":"#"}]}', "nothing matches"),
    ("json_schema", '{"type":"string","pattern":"("}', "unclosed"),
    ("json_schema", json.dumps(nested(40, lambda inner: {"type": "array", "items": {"anyOf": [inner]}})), "nested"),
    ("json_schema", '{"anyOf":[' * 9000 + "{}" + "]}" * 9000, "nested"),
    ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(9000)}}), "8192"),
    ("json_schema", '{"type":"integer","multipleOf":999983}', "multipleOf"),
    ("json_schema", '{"type":"number","multipleOf":1.00001}', "multipleOf"),
    ("regex", "(", "unclosed"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", "(" * 50_000 + "a" + ")" * 50_000, ""),
    ("choice", "{}", "list"),
    ("choice", "[]", "list"),
    ("choice", "[1]", "texts"),
    ("choice", '[""]', "character"),
    ("choice", "nonsense", "JSON"),
    ("lark", "start: foo", "foo"),
    ("lark", 'begin: "a"', ""),
    ("lark", "start: a\na: a", "nothing matches"),
    ("lark", 'start: %json {"type":"integer","multipleOf":999983}', "multipleOf"),
    ("lark", "start: %json " + '{"anyOf":[' * 500 + "{}" + "]}" * 500, ""),
    ("lark", "start: X\nX: " + " & ".join(f"/(.*{chr(97 + i % 26)}){{{i + 2}}}.*/" for i in range(30)), "fuel"),
    ("lark", "start: " + "%json " * 40_000, "behind each %json"),
    ("lark", "start: " + "%json {} " * 20_000, "512 schemas"),
    ("lark", 'start: %json {"a": ' + "1" * 5000 + "}", "behind each %json"),
    ("lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(12_000)), "at most"),
    ("lark", "start: X0\n" + "\n".join(f"X{i}: X{i + 1}" for i in range(600)), "256"),
    ("regex", "(a|b)*" * 30_000, "32768"),
    ("json_schema", json.dumps({"properties": {f"p{i}": {"pattern": "a?" * 5000} for i in range(20)}}), "32768"),
    ("lark", "start: " + "/" + "\\/" * 100_000, ""),
    ("lark", "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(5000)), "16384"),
    ("lark", "root ::= " + "(" * 2000 + '"a"' + ")" * 2000, ""),
    ("lark", "\x00", ""),
]


@pytest.mark.parametrize(("kind", "text", "complaint"), BAD, ids=[f"{k}-{t[:24]!r}" for k, t, _ in BAD])
def test_what_cannot_be_followed_is_refused_by_its_field(
    compiler: GrammarCompiler, kind: str, text: str, complaint: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        compiler.compile(Grammar(kind, text, "where.it.stood")).result(60.0)
    assert caught.value.field == "where.it.stood"
    assert complaint in caught.value.message and len(caught.value.message) < 600


def test_a_recursive_schema_can_be_followed(grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int) -> None:
    node = {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1}}}
    schema = {"$defs": {"n": {**node, "additionalProperties": False}}, "$ref": "#/$defs/n"}
    text = tokenizer.decode(wander(Follower(grammars, Grammar("json_schema", json.dumps(schema))), vocab_size, 5, 4000))
    assert set(json.loads(text)) <= {"c"}


def test_references_may_stand_in_each_other_as_deep_as_a_schema_can_be(compiler: GrammarCompiler) -> None:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2700)} | {"d2700": {"const": "x"}}
    schema = json.dumps({"$defs": links, "$ref": "#/$defs/d0"})
    assert compiler.compile(Grammar("json_schema", schema)).result(60.0)


def test_what_grows_too_large_while_it_is_followed_ends_alone(
    grammars: SequenceGrammars, tokenizer: Tokenizer, vocab_size: int
) -> None:
    hostile = Follower(grammars, Grammar("regex", "x|a{1000000}|b", "guided_regex"), sequence_id=1)
    other = Follower(grammars, Grammar("regex", "a{1,50}"), sequence_id=2)
    for _ in range(10):
        filling = grammars.begin_masks([hostile.row, other.row])
        assert filling is not None
        masks = filling.result(60.0)
        assert 1 not in masks.failed
        if masks.failed:
            break
        hostile.take(tokenizer.token_to_id("a"))
        other.take(tokenizer.token_to_id("a"))
    assert "guided_regex" in masks.failed[0]


def test_what_others_have_found_out_of_a_grammar_fails_nobody(
    files: ModelFiles, tokenizer: Tokenizer, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_LEXER_STATES", 1500)
    compiler = GrammarCompiler(lambda: read_tokenizer(files, vocab_size, [EOS]))
    grammars = SequenceGrammars(compiler, vocab_size)
    rich = Grammar("regex", "(.*a.{14}b.*)|(.*c.{11}d.*)")
    first = compiler.get(rich)
    early = Follower(grammars, rich, sequence_id=1000)
    texts = [tokenizer.token_to_id(letter) for letter in "cabdxaac"]
    for number in range(30):
        follower = Follower(grammars, rich, sequence_id=number)
        dice = random.Random(number)
        for _ in range(20):
            assert not follower.masks().failed
            follower.take(dice.choice(texts))
        follower.forget()
    assert compiler.get(rich) is not first, "it was full once at least"
    for token_id in texts:
        assert not early.masks().failed, "whoever began with the old one goes on"
        early.take(token_id)
    grammars.close()
    compiler.close()


# Compiling


def test_the_same_grammar_is_compiled_once_and_the_least_used_are_let_go(files: ModelFiles, vocab_size: int) -> None:
    num_loads = 0

    def load() -> object:
        nonlocal num_loads
        num_loads += 1
        return read_tokenizer(files, vocab_size, [EOS])

    compiler = GrammarCompiler(load)
    held = compiler.get(Grammar("regex", "held"))
    recent = compiler.compile(Grammar("regex", "recent", "one")).result(30.0)
    for number in range(MAX_CACHED - 1):
        compiler.get(Grammar("choice", f'["{number}"]'))
        assert compiler.compile(Grammar("regex", "recent", "another")).done()
    compiler.get(Grammar("choice", '["one more"]'))
    gc.collect()
    assert len(compiler._recent) == MAX_CACHED
    assert compiler.compile(Grammar("regex", "recent")).result(0) is recent
    assert compiler.compile(Grammar("regex", "held")).result(0) is held, "whoever holds it need not compile it again"
    assert not compiler.compile(Grammar("choice", '["0"]')).done(), "nobody holds this one"
    assert num_loads == 1
    compiler.close()


def test_compiling_goes_on_beside_its_caller(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()
    real = grammar_module._compile

    def slow(grammar: Grammar, tokenizer: object) -> object:
        if grammar.text == "slow":
            entered.set()
            assert leave.wait(30.0)
        return real(grammar, tokenizer)

    monkeypatch.setattr(grammar_module, "_compile", slow)
    compiling = compiler.compile(Grammar("regex", "slow"))
    assert entered.wait(30.0)
    assert compiler.compile(Grammar("regex", "quick")).result(30.0)
    assert not compiling.done()
    leave.set()
    assert compiling.result(30.0)


class Panic(BaseException):
    """As those of libraries in Rust."""


@pytest.mark.parametrize("error", [Panic("index out of bounds"), OSError("no such device")])
def test_whatever_a_library_raises_refuses_the_grammar_alone(
    error: BaseException, files: ModelFiles, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> object:
        raise error

    compiler = GrammarCompiler(fail)
    with pytest.raises(InvalidField, match=f"cannot be compiled: {error}"):
        compiler.compile(Grammar("regex", "a", "guided_regex")).result(30.0)
    compiler.close()
    compiler = GrammarCompiler(lambda: read_tokenizer(files, vocab_size, [EOS]))
    with monkeypatch.context() as patched:
        patched.setattr(grammar_module, "_compile", fail)
        with pytest.raises(InvalidField, match=f"cannot be compiled: {error}"):
            compiler.compile(Grammar("regex", "a", "guided_regex")).result(30.0)
    assert compiler.compile(Grammar("regex", "a")).result(30.0), "its threads live on"
    compiler.close()


def test_a_large_schema_is_compiled_in_bounded_time(compiler: GrammarCompiler) -> None:
    properties = {f"property number {i}": {"type": "string", "enum": ["a", "b"]} for i in range(1000)}
    began_s = time.monotonic()
    compiler.compile(Grammar("json_schema", json.dumps({"properties": properties}))).result(60.0)
    assert time.monotonic() - began_s < 60.0


# The vocabulary


def test_a_gguf_gives_the_same_masks_as_the_folder(
    compiler: GrammarCompiler, tokenizer: Tokenizer, vocab_size: int, tmp_path: Path
) -> None:
    files = write_gguf(tmp_path / "model.gguf", tokenizer, "gpt2", "gpt-2", special_names={"eos": EOS})
    other = GrammarCompiler(partial(read_tokenizer, files, vocab_size, [EOS]))
    for wanted in (Grammar("json_schema", json.dumps(PERSON)), Grammar("regex", "日本|né|[^a-z]{2}")):
        assert other.get(wanted).begin().compute_bitmask() == compiler.get(wanted).begin().compute_bitmask()
    other.close()


def test_a_tokenizer_that_falls_back_to_bytes_follows_too(tmp_path: Path) -> None:
    tokenizer = train_byte_fallback()
    size = tokenizer.get_vocab_size()
    eos = tokenizer.token_to_id("</s>")
    compiler = GrammarCompiler(partial(read_tokenizer, write_folder(tmp_path, tokenizer), size, [eos]))
    grammars = SequenceGrammars(compiler, size)
    choices = ["the dog", "lazy", "né😀"]
    for seed in range(4):
        follower = Follower(grammars, Grammar("choice", json.dumps(choices)), sequence_id=seed)
        dice = random.Random(seed)
        tokens: list[int] = []
        while (allowed := follower.allowed(size)) != [eos]:
            tokens.append(dice.choice(allowed))
            follower.take(tokens[-1])
        assert tokenizer.decode(tokens).strip() in choices
    grammars.close()
    compiler.close()


def test_a_model_without_an_end_or_a_tokenizer_refuses_grammars_by_name(
    files: ModelFiles, vocab_size: int, tmp_path: Path
) -> None:
    nothing = ModelFiles("folder", tmp_path, "nothing", tmp_path, ())
    unknown = write_folder(tmp_path / "unknown", train_metaspace())
    broken = write_folder(tmp_path / "broken", train_metaspace())
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    for wrong, eos, complaint in (
        (files, [], "end-of-sequence"),
        (nothing, [EOS], "cannot be read"),
        (unknown, [EOS], "decoder"),
        (broken, [EOS], "cannot be used"),
    ):
        with pytest.raises(ModelError, match=complaint):
            read_tokenizer(wrong, vocab_size, eos)
        compiler = GrammarCompiler(partial(read_tokenizer, wrong, vocab_size, eos))
        with pytest.raises(InvalidField) as caught:
            compiler.compile(Grammar("json_object", field="response_format")).result(30.0)
        assert caught.value.field == "response_format" and "cannot be followed" in caught.value.message
        compiler.close()


def test_an_added_token_that_is_no_special_one_is_text(tmp_path: Path) -> None:
    tokenizer = train_byte_level("gpt-2")
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    size = tokenizer.get_vocab_size()
    compiler = GrammarCompiler(partial(read_tokenizer, write_folder(tmp_path, tokenizer), size, [EOS]))
    grammars = SequenceGrammars(compiler, size)
    follower = Follower(grammars, Grammar("choice", '["<tool_call>"]'))
    assert tokenizer.token_to_id("<tool_call>") in follower.allowed(size)
    grammars.close()
    compiler.close()
