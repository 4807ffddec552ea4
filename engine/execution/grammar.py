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

import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Final

import llguidance

from engine.execution.grammar_source import to_source
from streamkv.errors import InvalidField, ModelError
from streamkv.gguf_vocabulary import read_gguf_vocabulary
from streamkv.model_files import ModelFiles
from streamkv.sampling import Grammar

MAX_CACHED: Final = 32
"""Compiled grammars kept beyond those of live requests."""

_NUM_COMPILERS: Final = 2
_STACK_BYTES: Final = 256 * 1024 * 1024
"""Of a compiling thread: rules, and references of a schema, that stand in each other are looked into by recursion. Only
what is used of it takes memory."""
_EXCERPT: Final = re.compile(r"\n *\d+ \| ")
"""Where an error of llguidance begins to quote the grammar."""
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
    source = to_source(grammar)
    limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        # What the first mask finds out is then known to all that begin; and some grammars show only there that they
        # are too large, or match nothing.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidField(grammar.field, f"cannot be compiled: {reason_of(matcher)}")
    return matcher


def reason_of(matcher: llguidance.LLMatcher) -> str:
    """What is wrong with a matcher in error, in a line."""
    text = matcher.get_error().partition("<non-verbose/>")[0].strip()
    if text.startswith("NoExtension"):
        return "nothing matches it"
    for line in text.splitlines():
        if line.startswith("error: "):  # of the regex crate, below a drawing of where it is
            return line
    text = " ".join(_EXCERPT.split(text)[0].split())
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."
