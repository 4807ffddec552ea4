"""Structured output: a Grammar → which tokens may come next. The grammars are llguidance's.

    json_object, json_schema    JSON; between its parts one space, or a line break and an indentation
    regex                       of Rust's regex crate, without look-around; it matches the whole text
    choice                      one of the texts
    lark                        Lark's notation as llguidance has it, or GBNF, which is translated to it

Compiling has threads of its own, and so has the filling of masks, which goes on beside the forward of the same step:
a mask takes some 0.1 ms per sequence. A sequence's tokens are taken in one by one; each mask has the tokens with which
the text can still come to a match, and end-of-sequence only where it is one. Where nothing can follow, end-of-sequence
is all that is left, so it is forced.

Text from outside costs little whatever it is: its size, and what is known to explode, is bounded here, the rest by
llguidance's limits. Who passes one of these while generating ends with `error`. What the masks of all sequences have
found out of one grammar is kept in one place, which can be full though none of them has passed a limit: then they go
on with the grammar compiled anew.
"""

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import llguidance
import msgspec
import torch
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from engine.execution.sampler import SampledRow
from engine.execution.token_masks import WORD_BITS, TokenMasks
from engine.plan import NewSequence, StepPlan
from streamkv.errors import InvalidField, ModelError
from streamkv.gguf_vocabulary import read_gguf_vocabulary
from streamkv.model_files import ModelFiles
from streamkv.sampling import Grammar

MAX_SCHEMA_DEPTH: Final = 64
"""Objects and lists inside each other."""
MAX_SCHEMA_PARTS: Final = 8192
"""Objects, lists and keys of a schema: some seconds, if all are optional properties of one object."""
MAX_MULTIPLE_OF: Final = 10_000
"""Digits of multipleOf without the point: the grammar has a state for each remainder."""
MAX_PATTERN_CHARS: Final = 32 * 1024
"""Of a regular expression, and of all patterns of a schema. The time grows with its square."""
MAX_LARK_CHARS: Final = 64 * 1024
MAX_RULES: Final = 1000
MAX_TERMINALS: Final = 256
"""They are put into each other, and one out of a thousand others may take seconds for each mask."""
MAX_GBNF_CHARS: Final = 16 * 1024
"""The translation takes time with its square."""
MAX_INLINE_SCHEMAS: Final = 512
"""In one grammar."""
MAX_CACHED: Final = 32
"""Compiled grammars kept beyond those of live requests."""

_NUM_COMPILERS: Final = 2
_STACK_BYTES: Final = 256 * 1024 * 1024
"""Of a compiling thread: rules, and references of a schema, that stand in each other are looked into by recursion. Only
what is used of it takes memory."""
_BLANKS: Final = r" |\r?\n[ \t]{0,48}"
"""Between the parts of JSON, if anything: a model that may write blanks for ever sometimes does."""
_EXCERPT: Final = re.compile(r"\n *\d+ \| ")
"""Where an error of llguidance begins to quote the grammar."""
_TERMINAL: Final = re.compile(r"^[ \t]*_?[A-Z][A-Z0-9_]*\b[^:\n]*:", re.MULTILINE)
_LARK_TOKEN: Final = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?|(?P<json>%json)\s*')
"""Texts, comments and patterns, in which %json means nothing; and %json."""
_MAX_MESSAGE_CHARS: Final = 500
_MAX_LEXER_STATES: Final = 20_000
"""A kilobyte or two each."""
_RENEW_LIMIT_S: Final = 2.0
"""The step waits for it."""

NO_END: Final = "this model names no end-of-sequence token, without which no grammar can end"


def read_tokenizer(files: ModelFiles, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """The model's vocabulary, padded to vocab_size with ids that are never allowed. Takes a second.

    Raises ModelError where the tokenizer is missing, damaged, or of a kind that llguidance does not know.
    """
    if not eos_token_ids:
        raise ModelError(NO_END)
    if files.kind == "gguf":
        text = read_gguf_vocabulary(files.tokenizer_path).tokenizer.to_str()
    else:
        path = files.tokenizer_path / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    try:
        return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as error:  # the library raises bare Exception, too
        raise ModelError(f"the model's tokenizer cannot be used for grammars: {error}") from error


class CompiledGrammar:
    """What is the same for every sequence that follows one grammar. Whoever needs it holds it."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def begin(self) -> llguidance.LLMatcher:
        """A matcher before its first token."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles on threads of its own, and keeps the MAX_CACHED grammars that were used last. For any thread."""

    def __init__(self, load_tokenizer: Callable[[], llguidance.LLTokenizer]) -> None:
        """load_tokenizer: slow, called once, when the first grammar comes. May raise ModelError."""
        self._load_tokenizer = load_tokenizer
        self._tokenizer: llguidance.LLTokenizer | ModelError | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._recent: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._known: weakref.WeakValueDictionary[tuple[str, str], CompiledGrammar] = weakref.WeakValueDictionary()
        """Those of live requests, too."""
        self._threads = _with_large_stacks(ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="grammar"))

    def compile(self, grammar: Grammar) -> Future[object]:
        """A CompiledGrammar, at once for one that is known. The exception is InvalidField, with the grammar's field."""
        known = self._find(grammar)
        if known is None:
            return self._threads.submit(self._find_or_make, grammar)
        done: Future[object] = Future()
        done.set_result(known)
        return done

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """The same, with a wait for it if it is not known. Raises InvalidField."""
        known = self._find(grammar)
        return known if known is not None else self._threads.submit(self._make, grammar).result()

    def renew(self, grammar: Grammar, full: CompiledGrammar) -> CompiledGrammar:
        """One in place of `full`, with a wait for it. Raises InvalidField, also if that takes too long."""
        key = grammar.kind, grammar.text
        with self._lock:
            if self._known.get(key) is full:
                del self._known[key]
                self._recent.pop(key, None)
        known = self._find(grammar)
        if known is not None:
            return known
        try:
            return self._threads.submit(self._find_or_make, grammar).result(_RENEW_LIMIT_S)
        except (TimeoutError, CancelledError) as error:
            raise InvalidField(grammar.field, "is too much here: it takes too long to compile anew") from error

    def _find_or_make(self, grammar: Grammar) -> CompiledGrammar:
        known = self._find(grammar)  # it may have been made while this was waiting
        return known if known is not None else self._make(grammar)

    def _make(self, grammar: Grammar) -> CompiledGrammar:
        """On one of the compiling threads, whose stack is large enough. Raises InvalidField."""
        try:
            compiled = CompiledGrammar(_compile(grammar, self.tokenizer(grammar.field)))
        except InvalidField:
            raise
        except BaseException as error:  # the libraries raise what they like; a panic of theirs is no Exception
            raise InvalidField(grammar.field, f"cannot be compiled: {error}"[:_MAX_MESSAGE_CHARS]) from error
        with self._lock:
            self._known[grammar.kind, grammar.text] = compiled
            self._recent[grammar.kind, grammar.text] = compiled
            if len(self._recent) > MAX_CACHED:
                self._recent.popitem(last=False)
        return compiled

    def tokenizer(self, field_name: str) -> llguidance.LLTokenizer:
        """Loaded if it is not yet. Raises InvalidField, with this field, if it cannot be."""
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._load_tokenizer()
                except ModelError as error:
                    self._tokenizer = error
            if isinstance(self._tokenizer, ModelError):
                raise InvalidField(field_name, f"cannot be followed: {self._tokenizer}")
            return self._tokenizer

    def close(self) -> None:
        """What waits is cancelled; what is being compiled comes to its end by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _find(self, grammar: Grammar) -> CompiledGrammar | None:
        key = grammar.kind, grammar.text
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._recent[key] = known
                self._recent.move_to_end(key)
                if len(self._recent) > MAX_CACHED:
                    self._recent.popitem(last=False)
            return known


def _with_large_stacks(pool: ThreadPoolExecutor) -> ThreadPoolExecutor:
    """The pool, with its threads started."""
    are_there = threading.Barrier(_NUM_COMPILERS + 1)
    usual_bytes = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(_NUM_COMPILERS):
            pool.submit(are_there.wait)
    finally:
        threading.stack_size(usual_bytes)
    are_there.wait()
    return pool


def _compile(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """Raises InvalidField. Seconds at worst."""
    source = _to_source(grammar)
    limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        # What the first mask finds out is then known to all that begin; and some grammars show only there that they
        # are too large, or match nothing.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidField(grammar.field, f"cannot be compiled: {_reason(matcher)}")
    return matcher


def _reason(matcher: llguidance.LLMatcher) -> str:
    text = matcher.get_error().partition("<non-verbose/>")[0].strip()
    if text.startswith("NoExtension"):
        return "nothing matches it"
    for line in text.splitlines():
        if line.startswith("error: "):  # of the regex crate, below a drawing of where it is
            return line
    text = " ".join(_EXCERPT.split(text)[0].split())
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."


def _to_source(grammar: Grammar) -> str:
    """As llguidance has it. Raises InvalidField."""
    match grammar.kind:
        case "json_object":
            return _json_source('{"type":"object"}')
        case "json_schema":
            schema = _decode(grammar, "a JSON schema")
            if not isinstance(schema, dict):
                raise InvalidField(grammar.field, "must be a JSON schema, an object")
            _check_schema(schema, grammar.field)
            return _json_source(grammar.text)
        case "regex":
            _check_pattern(grammar.text, grammar.field)
            # \d is a digit from 0 to 9, as in JSON schemas, and not one of any script.
            return llguidance.LLMatcher.grammar_from_regex(llguidance.regex_to_lark(grammar.text, "d"))
        case "choice":
            return llguidance.LLMatcher.grammar_from_regex(_choice_pattern(grammar))
        case _:
            source = grammar.text
            if not is_lark_syntax(source):
                if len(source) > MAX_GBNF_CHARS:
                    text = f"must have the rule `start` of Lark's notation; GBNF may have {MAX_GBNF_CHARS} characters"
                    raise InvalidField(grammar.field, text)
                source = gbnf_to_lark(source)
            return llguidance.LLMatcher.grammar_from_lark(_with_blanks(source, grammar.field))


def _json_source(schema: str) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _BLANKS})


def _decode(grammar: Grammar, what: str) -> object:
    try:
        return msgspec.json.decode(grammar.text)
    except RecursionError as error:
        raise InvalidField(grammar.field, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels") from error
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise InvalidField(grammar.field, f"must be {what}, as JSON: {error}") from error


def _choice_pattern(grammar: Grammar) -> str:
    choices = _decode(grammar, "a list of texts")
    if not isinstance(choices, list) or not choices:
        raise InvalidField(grammar.field, "must be a list of at least one text")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidField(grammar.field, "must be a list of texts of at least one character")
    return "|".join(map(_pattern_of, choices))


def _pattern_of(text: str) -> str:
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


def _with_blanks(source: str, field_name: str) -> str:
    """A grammar, checked, whose schemas behind %json have the same blanks as others. Raises InvalidField."""
    decoder = json.JSONDecoder()
    parts: list[str] = []
    done = at = num_schemas = 0
    while found := _LARK_TOKEN.search(source, at):
        at = found.end()
        if found["json"] is None:
            continue
        num_schemas += 1
        if num_schemas > MAX_INLINE_SCHEMAS:
            raise InvalidField(field_name, f"has more than {MAX_INLINE_SCHEMAS} schemas")
        try:
            schema, end = decoder.raw_decode(source, at)
        except RecursionError as error:
            raise InvalidField(field_name, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels") from error
        except ValueError as error:
            raise InvalidField(field_name, f"must have JSON behind each %json: {error}") from error
        _check_schema(schema, field_name)
        if isinstance(schema, dict):
            schema.setdefault("x-guidance", {"whitespace_pattern": _BLANKS})
        parts += (source[done:at], json.dumps(schema))
        done = at = end
    parts.append(source[done:])
    _check_rules("".join(parts[::2]), field_name)
    return "".join(parts)


def _check_rules(source: str, field_name: str) -> None:
    """source: without its schemas. Raises InvalidField for what would take too long."""
    for what, count, most in (
        ("characters beside its schemas", len(source), MAX_LARK_CHARS),
        ("colons, so rules", source.count(":"), MAX_RULES),
        ("terminals", len(_TERMINAL.findall(source)), MAX_TERMINALS),
    ):
        if count > most:
            raise InvalidField(field_name, f"has {count} {what}; at most {most} are taken")


def _check_schema(schema: object, field_name: str) -> None:
    """Raises InvalidField for one that is too deep, too large, or would take too long."""
    num_parts = depth = num_pattern_chars = 0
    level = [schema]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidField(field_name, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        num_parts += len(level)
        below: list[object] = []
        for part in level:
            if isinstance(part, dict):
                num_parts += len(part)
                _check_multiple(part.get("multipleOf"), field_name)
                num_pattern_chars += _num_pattern_chars(part)
                below += part.values()
            elif isinstance(part, list):
                below += part
        if num_parts > MAX_SCHEMA_PARTS:
            raise InvalidField(field_name, f"has more than {MAX_SCHEMA_PARTS} objects, lists and keys")
        level = below
    if num_pattern_chars > MAX_PATTERN_CHARS:
        raise InvalidField(field_name, f"has patterns of {num_pattern_chars} characters; at most {MAX_PATTERN_CHARS}")


def _num_pattern_chars(schema: dict[str, object]) -> int:
    """Characters of the patterns that stand in this object itself, those of the library's own options included."""
    by_pattern = schema.get("patternProperties")
    found = [schema.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ()), schema.get("x-guidance")]
    return sum(len(part if isinstance(part, str) else json.dumps(part)) for part in found if part)


def _check_pattern(pattern: str, field_name: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidField(field_name, f"has {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are taken")


def _check_multiple(value: object, field_name: str) -> None:
    if isinstance(value, int | float):
        digits = re.sub(r"e.*|\D", "", repr(value)).strip("0")
        if len(digits) > 5 or int(digits or 0) > MAX_MULTIPLE_OF:
            raise InvalidField(
                field_name, f"multipleOf may have no more than {MAX_MULTIPLE_OF} as its digits, got {value!r:.40}"
            )


@dataclass(slots=True)
class _Following:
    """A sequence on its way through its grammar."""

    facts: NewSequence
    pending: list[int]
    """Tokens that its matcher has not taken in."""
    num_output: int
    """Tokens generated, the pending ones included."""
    matcher: llguidance.LLMatcher | None = None
    compiled: CompiledGrammar | None = None
    """What its matcher came from."""
    taken: list[int] = field(default_factory=list)
    """Tokens that its matcher has taken in."""
    is_renewed: bool = False
    """It went on with the grammar compiled anew. Once only: so that who needs too much by itself comes to an end."""


class SequenceGrammars:
    """The matchers of all sequences with a grammar that a plan has named and none has named finished.

    Belongs to the thread that computes the steps. Per step: apply, begin_masks, the masks' result, remember.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int, num_threads: int = 1) -> None:
        """num_threads: for the masks of one step, beside the thread that waits for them."""
        self._compiler = compiler
        self._num_words = -(-vocab_size // WORD_BITS)
        self._following: dict[int, _Following] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._filling = llguidance.LLExecutor(num_threads=num_threads)

    def __len__(self) -> int:
        return len(self._following)

    def apply(self, plan: StepPlan) -> None:
        """Forget and learn what the plan says. A preempted sequence stays where it is in its grammar."""
        for sequence_id in plan.finished_sequence_ids if self._following else ():
            self._following.pop(sequence_id, None)
        for facts in plan.new_sequences:
            if facts.sampling.grammar is not None:
                prior = facts.token_ids[facts.num_prompt :]
                self._following[facts.sequence_id] = _Following(facts, prior, len(prior))

    def begin_masks(self, rows: list[SampledRow]) -> "Future[TokenMasks] | None":
        """The masks of a step's sampled rows, filled on a thread; None if none of them has a grammar."""
        if not self._following:
            return None
        following = {i: one for i, row in enumerate(rows) if (one := self._following.get(row.sequence.sequence_id))}
        for i, one in following.items():
            if rows[i].position != one.facts.num_prompt + one.num_output:
                raise ValueError(
                    f"sequence {one.facts.sequence_id} samples position {rows[i].position}, but its grammar knows "
                    f"{one.num_output} tokens behind {one.facts.num_prompt}"
                )
        return self._thread.submit(self._fill, following) if following else None

    def remember(self, rows: list[SampledRow], token_ids: list[int]) -> None:
        """What the rows of begin_masks have sampled; negative: nothing."""
        if not self._following:
            return
        for row, token_id in zip(rows, token_ids, strict=True):
            one = self._following.get(row.sequence.sequence_id)
            if one is not None and token_id >= 0:
                one.pending.append(token_id)
                one.num_output += 1

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fill(self, following: dict[int, _Following]) -> TokenMasks:
        """following: by row."""
        masks = TokenMasks(list(following), torch.zeros(len(following), self._num_words, dtype=torch.int32))
        filled: list[tuple[llguidance.LLMatcher, int]] = []
        for place, (row, one) in enumerate(following.items()):
            try:
                filled.append((self._advance(one), place))
            except InvalidField as error:
                masks.failed[row] = str(error)
        self._compute(filled, masks.bits)
        renewed: list[tuple[llguidance.LLMatcher, int]] = []
        for matcher, place in filled:
            row = masks.rows[place]
            if matcher.is_error():
                try:
                    renewed.append((self._renew(following[row]), place))
                except InvalidField as error:
                    masks.failed[row] = str(error)
        self._compute(renewed, masks.bits)
        for matcher, place in renewed:
            if matcher.is_error():
                row = masks.rows[place]
                masks.failed[row] = f"{_field(following[row])}: the grammar is too much here: {_reason(matcher)}"
        for place, row in enumerate(masks.rows):
            if row not in masks.failed and not _allows_more(following[row].facts, masks.bits[place]):
                masks.ending.add(row)
        return masks

    def _compute(self, matchers: list[tuple[llguidance.LLMatcher, int]], bits: torch.Tensor) -> None:
        """matchers: each with its place in `bits`."""
        if matchers:
            self._filling.unsafe_compute_mask_ptr(
                matchers, bits.data_ptr(), self._num_words * bits.element_size(), len(bits)
            )

    def _advance(self, one: _Following) -> llguidance.LLMatcher:
        """Take in the pending tokens. Raises InvalidField where that cannot be."""
        if one.matcher is None:
            grammar = one.facts.sampling.grammar
            assert grammar is not None
            one.compiled = self._compiler.get(grammar)
            one.matcher = one.compiled.begin()
        pending, one.pending = one.pending, []
        one.taken += pending
        if pending and not one.matcher.consume_tokens(pending):
            return self._renew(one)
        return one.matcher

    def _renew(self, one: _Following) -> llguidance.LLMatcher:
        """Go on with the grammar compiled anew, if it can be that others have filled the old one. Raises InvalidField
        where it is its own tokens that cannot be followed."""
        grammar = one.facts.sampling.grammar
        assert grammar is not None and one.matcher is not None and one.compiled is not None
        if one.is_renewed:
            raise InvalidField(grammar.field, f"the grammar is too much here: {_reason(one.matcher)}")
        one.is_renewed = True
        one.compiled = self._compiler.renew(grammar, one.compiled)
        one.matcher = one.compiled.begin()
        if one.taken and not one.matcher.consume_tokens(one.taken):
            raise InvalidField(grammar.field, f"cannot be followed behind the tokens so far: {_reason(one.matcher)}")
        return one.matcher


def _field(one: _Following) -> str:
    assert one.facts.sampling.grammar is not None
    return one.facts.sampling.grammar.field


def _allows_more(facts: NewSequence, bits: torch.Tensor) -> bool:
    """Whether a token is allowed that does not end the sequence."""
    rest = bits.clone()
    for token_id in {*facts.eos_token_ids, *facts.sampling.stop_token_ids}:
        word, bit = divmod(token_id, WORD_BITS)
        if word < len(rest):
            rest[word] &= ~(1 << bit) if bit < WORD_BITS - 1 else 0x7FFFFFFF
    return bool(rest.any())
