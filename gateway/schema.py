"""OpenAI bodies, checked: what may be asked, one rule per field. (What goes out is made in `answers`.)

`decode_object` checks the JSON itself, the `parse_…` functions each field of it. A field either works, or has no
effect here and is taken, or is refused by its name; null is the same as leaving it out.
"""

import difflib
import json
import math
import re
from functools import lru_cache
from typing import Annotated, Final, NoReturn

import msgspec

from gateway.chat_template import ROLES, ChatMessage
from streamkv.errors import InvalidField
from streamkv.sampling import MAX_CHOICES, MAX_STOP_TOKEN_IDS, SamplingParams

MAX_DEPTH: Final = 32
"""Objects and lists inside each other."""
MAX_CONTAINERS: Final = 50_000
"""Objects and lists in one body."""
MAX_MESSAGES: Final = 10_000
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 1024
MAX_LABEL_CHARS: Final = 1024
"""user, request_id, cache_salt."""
MAX_MAX_TOKENS: Final = 2**31 - 1
_INT32: Final = 2**31

# A JSON string with all its escapes
_JSON_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SURROGATE_ESCAPE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class RequestLimits(msgspec.Struct, frozen=True):
    """What the model allows."""

    vocab_size: int
    max_model_len: int = 0
    """Most tokens of prompt and answer together; 0: not known yet."""


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completion requests share: checked, and with the defaults filled in."""

    model: str = ""
    """Empty: the one that is served."""
    max_tokens: int | None = None
    """None: what is left of the model's length."""
    max_tokens_field: str = "max_tokens"
    """The name under which the client gave it."""
    prompt_field: str = "prompt"
    """Where the prompt stands: prompt or messages."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    best_of: int = 0
    """0: n."""
    beam_width: int = 0
    """0: no beam search."""
    length_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    stream: bool = False
    include_usage: bool = False
    """A stream ends with a chunk that has the usage and no choices."""
    continuous_usage_stats: bool = False
    """Every chunk has the usage so far; only with include_usage."""
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_salt: str = ""
    priority: int = 0
    user: str = ""
    request_id: str = ""
    """The client's own label for log lines."""

    def to_sampling(self, num_prompt_tokens: int, max_model_len: int, seed: int) -> SamplingParams:
        """The sampler's parameters for a prompt of this length; seed is used when the request has none.

        Without max_tokens the answer may take what the prompt leaves of max_model_len.
        Raises InvalidField when prompt and max_tokens together are over max_model_len, or the prompt alone fills it.
        """
        left = max_model_len - num_prompt_tokens
        if left < 1:
            raise InvalidField(
                self.prompt_field,
                f"has {num_prompt_tokens} tokens, which leaves no room for an answer within the model's limit of "
                f"{max_model_len}; shorten it",
            )
        max_tokens = left if self.max_tokens is None else self.max_tokens
        if max_tokens > left:
            raise InvalidField(
                self.max_tokens_field,
                f"prompt has {num_prompt_tokens} tokens and {self.max_tokens_field} is {max_tokens}, together over the "
                f"model's limit of {max_model_len}; lower {self.max_tokens_field} to {left} or shorten the prompt",
            )
        return self._sampling(max_tokens, seed)

    def _sampling(self, max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            seed=seed if self.seed is None else self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            n=self.n,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_token_ids=list(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            best_of=self.best_of,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
        )

    def check(self) -> None:
        """Apply the sampler's own rules now, before anything is spent. Raises InvalidField."""
        try:
            self._sampling(MAX_MAX_TOKENS if self.max_tokens is None else self.max_tokens, seed=0)
        except InvalidField as error:
            if error.field != "max_tokens":
                raise
            raise InvalidField(self.max_tokens_field, error.message) from error


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/chat/completions, or a `generate` with messages."""

    options: GenerationOptions
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = {}


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/completions, or a `generate` with a prompt."""

    options: GenerationOptions
    prompt: str | list[int]
    """Text, or token ids that have been checked against the vocabulary."""
    add_special_tokens: bool = True


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: exactly one of prompt and messages."""

    model: str = ""
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = {}


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str = ""
    tokens: list[int]


# The body itself


def decode_object(body: bytes) -> dict[str, object]:
    """A JSON body → its object. Raises InvalidField("body"): no UTF-8 or JSON (NaN, half a surrogate pair), no object,
    a key twice, nested deeper than MAX_DEPTH, more than MAX_CONTAINERS parts. A few ms per megabyte."""
    if not body.strip():
        raise InvalidField("body", "is empty; send a JSON object")
    num_brackets = _check_num_containers(body)
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidField("body", f"is nested deeper than {MAX_DEPTH} levels") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        hint = "; \\u escapes of surrogates must come in pairs" if _SURROGATE_ESCAPE.search(body) else ""
        raise InvalidField("body", f"is not valid JSON: {error}{hint}") from error
    fields = _check_object(value)
    # Each key has a colon: as many keys as colons means that none came twice. Colons in texts make it worth a look
    if body.count(b":") != _count_keys(fields, num_brackets) and (twice := _find_duplicate(body)) is not None:
        raise InvalidField("body", f"has the key {_short(twice)!r} twice in one object")
    return fields


def decode_msgpack_object(frame: bytes) -> dict[str, object]:
    """A msgpack frame → its object, with the rules of decode_object where msgpack has them. Raises InvalidField."""
    try:
        value = msgspec.msgpack.decode(frame)
    except RecursionError as error:
        raise InvalidField("body", f"is nested deeper than {MAX_DEPTH} levels") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise InvalidField("body", f"is not valid msgpack: {error}") from error
    fields = _check_object(value)
    _count_keys(fields, len(frame))
    return fields


def _check_num_containers(body: bytes) -> int:
    """Brackets outside texts, counted before anything is made of them. Returns how many there are at most."""
    num_brackets = body.count(b"{") + body.count(b"[")
    if num_brackets > MAX_CONTAINERS:
        skeleton = _JSON_STRING.sub(b"", body)
        num_brackets = skeleton.count(b"{") + skeleton.count(b"[")
        if num_brackets > MAX_CONTAINERS:
            raise InvalidField("body", f"has {num_brackets} objects and lists; at most {MAX_CONTAINERS} are taken")
    return num_brackets


def _check_object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidField("body", f"must be an object, got {_kind(value)}")
    for key in value:
        if not isinstance(key, str):
            raise InvalidField("body", f"must have texts as keys, got {_kind(key)}")
    return value


def _count_keys(fields: dict[str, object], max_containers: int) -> int:
    """All keys of an object and of those inside it. Raises InvalidField for the depth, and for keys that are no texts.

    max_containers: there are no more than these, so that the search may end when all have been seen.
    """
    num_keys = len(fields)
    num_seen = 1
    depth = 1
    level: list[object] = list(fields.values())
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidField("body", f"is nested deeper than {MAX_DEPTH} levels")
        num_seen += len(level)
        below: list[object] = []
        for container in level:
            if isinstance(container, dict):
                if set(map(type, container)) - {str}:
                    raise InvalidField("body", "must have texts as keys in every object")
                num_keys += len(container)
                below.extend(container.values())
            elif num_seen < max_containers and isinstance(container, list):
                below.extend(container)
        level = below
    return num_keys


def _find_duplicate(body: bytes) -> str | None:
    def look(pairs: list[tuple[str, object]]) -> dict[str, object]:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                found.append(key)
            seen.add(key)
        return dict(pairs)

    found: list[str] = []
    json.loads(body, object_pairs_hook=look)
    return found[0] if found else None


def _kind(value: object) -> str:
    """How JSON calls it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "an object", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)


# Fields


class FieldReader:
    """Takes the fields of one object, each by its rule; `finish` refuses what no rule took."""

    def __init__(self, fields: dict[str, object], path: str = "") -> None:
        self._left = dict(fields)
        self._path = path
        self._known: list[str] = []

    def __contains__(self, name: str) -> bool:
        """Whether the field came with a value."""
        return self._left.get(name) is not None

    def take(self, name: str) -> object:
        self._known.append(name)
        return self._left.pop(name, None)

    def refuse(self, name: str, message: str) -> NoReturn:
        raise InvalidField(self._path + name, message)

    def path(self, name: str) -> str:
        return self._path + name

    def boolean(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, f"must be true or false, got {_kind(value)}")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number in [low, high]; true and 1.0 are none. None when left out."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self.refuse(name, f"must be a whole number, got {_kind(value)}")
        if not low <= value <= high:
            self.refuse(name, f"must be between {low} and {high}, got {_short(value)}")
        return value

    def number(self, name: str, default: float) -> float:
        """Any finite number; its range is the sampler's rule."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.refuse(name, f"must be a number, got {_kind(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self.refuse(name, f"must be a finite number, got {_short(value)}")
        return number

    def text(self, name: str, max_chars: int | None = None, default: str = "") -> str:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.refuse(name, f"must be text, got {_kind(value)}")
        if max_chars is not None and len(value) > max_chars:
            self.refuse(name, f"must have at most {max_chars} characters, got {len(value)}")
        return value

    def mapping(self, name: str) -> dict[str, object]:
        value = self.take(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            self.refuse(name, f"must be an object, got {_kind(value)}")
        return value

    def token_ids(self, name: str, vocab_size: int, max_ids: int | None = None) -> list[int]:
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.refuse(name, f"must be a list of token ids, got {_kind(value)}")
        if max_ids is not None and len(value) > max_ids:
            self.refuse(name, f"takes at most {max_ids} ids, got {len(value)}")
        return check_token_ids(value, vocab_size, self._path + name)

    def neutral(self, name: str, *accepted: object, instead: str = "") -> None:
        """A field that does not work here: only null and the values that would change nothing are taken."""
        value = self.take(name)
        if value is None or any(_is_same(value, neutral) for neutral in accepted):
            return
        allowed = ", ".join(json.dumps(neutral) for neutral in accepted)
        self.refuse(
            name,
            "is not supported"
            + (f"; leave it out or send {allowed}" if accepted else "; leave it out")
            + (f" ({instead})" if instead else ""),
        )

    def ignored(self, *names: str) -> None:
        """Fields that ask for nothing this server could do otherwise."""
        for name in names:
            self.take(name)

    def finish(self) -> None:
        for name in self._left:
            near = difflib.get_close_matches(name[:100], self._known, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            self.refuse(_short(name), f"is not a field of this request{hint}")


def _is_same(value: object, neutral: object) -> bool:
    """Equal as JSON has it: 0 and 0.0 are, 0 and false are not."""
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return value == neutral


def _short(value: object) -> str:
    try:
        text = str(value)
    except ValueError:  # an integer with too many digits to print
        return "a very large number"
    return text if len(text) <= 60 else text[:57] + "..."


@lru_cache(maxsize=8)
def _id_list_type(vocab_size: int) -> type[list[int]]:
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def check_token_ids(values: list[object], vocab_size: int, field: str) -> list[int]:
    """A list from outside, as token ids: whole numbers (no true, no 1.0), 0 .. vocab_size - 1. Raises InvalidField
    with the place of the first that is none. About 1 ms per 100,000 ids."""
    if not values:
        return []
    try:
        return msgspec.convert(values, _id_list_type(vocab_size))
    except msgspec.ValidationError:
        pass  # the loop below says which
    for index, value in enumerate(values):
        if type(value) is not int:
            raise InvalidField(f"{field}[{index}]", f"must be a token id (a whole number), got {_kind(value)}")
        if not 0 <= value < vocab_size:
            raise InvalidField(
                f"{field}[{index}]", f"must be a token id between 0 and {vocab_size - 1}, got {_short(value)}"
            )
    raise AssertionError("an id failed as one of many and passed alone")


def parse_chat(body: bytes, limits: RequestLimits) -> ChatRequest:
    """POST /v1/chat/completions. Raises InvalidField."""
    return chat_from_fields(decode_object(body), limits)


def parse_completion(body: bytes, limits: RequestLimits) -> CompletionRequest:
    """POST /v1/completions. Raises InvalidField."""
    return completion_from_fields(decode_object(body), limits)


def parse_tokenize(body: bytes, limits: RequestLimits) -> TokenizeRequest:
    """POST /tokenize. Raises InvalidField."""
    reader = FieldReader(decode_object(body))
    model = reader.text("model", MAX_LABEL_CHARS)
    prompt = reader.text("prompt") if "prompt" in reader else None
    messages = _read_messages(reader) if "messages" in reader else None
    if (prompt is None) == (messages is None):
        raise InvalidField("prompt", "send exactly one of prompt and messages")
    request = TokenizeRequest(
        model=model,
        prompt=prompt,
        messages=messages,
        add_special_tokens=reader.boolean("add_special_tokens", default=messages is None),
        return_token_strs=reader.boolean("return_token_strs", default=False),
        add_generation_prompt=reader.boolean("add_generation_prompt", default=True),
        continue_final_message=reader.boolean("continue_final_message", default=False),
        chat_template_kwargs=reader.mapping("chat_template_kwargs"),
    )
    if messages is not None and request.add_special_tokens:
        raise InvalidField(
            "add_special_tokens", "cannot be true for messages: the chat template puts the special tokens"
        )
    _check_continuation(request.add_generation_prompt, request.continue_final_message)
    reader.neutral("tools", [])
    reader.neutral("chat_template", instead="the server's own template is used")
    reader.finish()
    return request


def parse_detokenize(body: bytes, limits: RequestLimits) -> DetokenizeRequest:
    """POST /detokenize. Raises InvalidField."""
    reader = FieldReader(decode_object(body))
    if "tokens" not in reader:
        raise InvalidField("tokens", "is missing; send a list of token ids")
    request = DetokenizeRequest(
        model=reader.text("model", MAX_LABEL_CHARS), tokens=reader.token_ids("tokens", limits.vocab_size)
    )
    reader.finish()
    return request


def generate_from_fields(fields: dict[str, object], limits: RequestLimits) -> ChatRequest | CompletionRequest:
    """A WebSocket `generate` without its type and id: a chat when it has messages, else a completion. Always a
    stream. Raises InvalidField."""
    if fields.get("messages") is not None and fields.get("prompt") is not None:
        raise InvalidField("prompt", "send either prompt or messages")
    if fields.get("stream") is False:
        raise InvalidField("stream", "cannot be false on a WebSocket")
    streamed: dict[str, object] = {**fields, "stream": True}
    if fields.get("messages") is not None:
        streamed.pop("prompt", None)
        return chat_from_fields(streamed, limits)
    streamed.pop("messages", None)
    return completion_from_fields(streamed, limits)


def chat_from_fields(fields: dict[str, object], limits: RequestLimits) -> ChatRequest:
    """The fields of a chat request. Raises InvalidField."""
    reader = FieldReader(fields)
    if "messages" not in reader:
        raise InvalidField("messages", "is missing; send a list of messages")
    options = _read_options(reader, limits, is_chat=True)
    messages = _read_messages(reader)
    add_generation_prompt = reader.boolean("add_generation_prompt", default=True)
    continue_final_message = reader.boolean("continue_final_message", default=False)
    _check_continuation(add_generation_prompt, continue_final_message)
    kwargs = reader.mapping("chat_template_kwargs")
    reader.neutral("logprobs", False)
    reader.neutral("tools", [])
    reader.neutral("tool_choice", "none", "auto")
    reader.neutral("functions", [])
    reader.neutral("function_call", "none", "auto")
    reader.neutral("modalities", ["text"])
    reader.neutral("audio")
    reader.neutral("prediction")
    reader.neutral("reasoning_effort", "none")
    reader.neutral("reasoning")
    reader.neutral("verbosity", "medium")
    reader.neutral("web_search_options")
    reader.neutral("documents", [])
    reader.neutral("chat_template", instead="the server's own template is used")
    reader.neutral("mm_processor_kwargs", {})
    reader.neutral("add_special_tokens", False, instead="the chat template puts the special tokens")
    reader.neutral("echo", False)
    reader.ignored("parallel_tool_calls", "include_reasoning")
    reader.finish()
    return ChatRequest(
        options=options,
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template_kwargs=kwargs,
    )


def completion_from_fields(fields: dict[str, object], limits: RequestLimits) -> CompletionRequest:
    """The fields of a completion request. Raises InvalidField."""
    reader = FieldReader(fields)
    options = _read_options(reader, limits, is_chat=False)
    prompt = _read_prompt(reader, limits)
    add_special_tokens = reader.boolean("add_special_tokens", default=True)
    reader.neutral("suffix", "")
    reader.neutral("echo", False)
    reader.neutral("logprobs")
    reader.finish()
    return CompletionRequest(options=options, prompt=prompt, add_special_tokens=add_special_tokens)


def _check_continuation(add_generation_prompt: bool, continue_final_message: bool) -> None:
    if add_generation_prompt and continue_final_message:
        raise InvalidField(
            "continue_final_message", "cannot be true together with add_generation_prompt; set that to false"
        )


def _read_options(reader: FieldReader, limits: RequestLimits, is_chat: bool) -> GenerationOptions:
    """Every field that chats and completions share, with its rule. Ranges of sampling fields are SamplingParams'."""
    max_tokens = reader.integer("max_tokens", 1, MAX_MAX_TOKENS)
    max_tokens_field = "max_tokens"
    if is_chat:
        newer = reader.integer("max_completion_tokens", 1, MAX_MAX_TOKENS)
        if newer is not None:
            if max_tokens is not None and max_tokens != newer:
                raise InvalidField(
                    "max_tokens", f"is {max_tokens} but max_completion_tokens is {newer}; send one of them"
                )
            max_tokens, max_tokens_field = newer, "max_completion_tokens"
    stream = reader.boolean("stream", default=False)
    include_usage, continuous_usage_stats = _read_stream_options(reader, stream)
    n = _or_default(reader.integer("n", 1, MAX_CHOICES), 1)
    ranking = _read_ranking(reader, n, stream)
    stop = _read_stop(reader)
    if stop and (ranking.best_of or ranking.beam_width):
        raise InvalidField(
            "stop",
            f"cannot be used with {ranking.cause}: its choices are compared as tokens, before there is a text to stop; "
            "leave it out or send stop_token_ids",
        )
    options = GenerationOptions(
        model=reader.text("model", MAX_LABEL_CHARS),
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        prompt_field="messages" if is_chat else "prompt",
        temperature=reader.number("temperature", default=0.0 if ranking.beam_width else 1.0),
        top_p=reader.number("top_p", default=1.0),
        top_k=reader.integer("top_k", -1, _INT32 - 1) or 0,
        min_p=reader.number("min_p", default=0.0),
        seed=reader.integer("seed", 0, 2**64 - 1),
        n=n,
        best_of=ranking.best_of,
        beam_width=ranking.beam_width,
        length_penalty=ranking.length_penalty,
        stop=stop,
        stop_token_ids=tuple(reader.token_ids("stop_token_ids", limits.vocab_size, MAX_STOP_TOKEN_IDS)),
        ignore_eos=reader.boolean("ignore_eos", default=False),
        min_tokens=reader.integer("min_tokens", 0, MAX_MAX_TOKENS) or 0,
        stream=stream,
        include_usage=include_usage,
        continuous_usage_stats=continuous_usage_stats,
        return_token_ids=reader.boolean("return_token_ids", default=False),
        skip_special_tokens=reader.boolean("skip_special_tokens", default=True),
        include_stop_str_in_output=reader.boolean("include_stop_str_in_output", default=False),
        cache_salt=reader.text("cache_salt", MAX_LABEL_CHARS),
        priority=_or_default(reader.integer("priority", -_INT32, _INT32 - 1), 0),
        user=reader.text("user", MAX_LABEL_CHARS),
        request_id=reader.text("request_id", MAX_LABEL_CHARS),
    )
    options.check()
    if limits.max_model_len and max_tokens is not None and max_tokens >= limits.max_model_len:
        raise InvalidField(
            max_tokens_field, f"must be below the model's limit of {limits.max_model_len} tokens, got {max_tokens}"
        )
    reader.neutral("top_logprobs", 0)
    reader.neutral("prompt_logprobs")
    reader.neutral("logit_bias", {})
    reader.neutral("presence_penalty", 0)
    reader.neutral("frequency_penalty", 0)
    reader.neutral("repetition_penalty", 1)
    reader.neutral("response_format", {"type": "text"})
    for constraint in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"):
        reader.neutral(constraint)
    reader.neutral("bad_words", [])
    reader.neutral("allowed_token_ids")
    reader.neutral("logits_processors", [])
    reader.neutral("truncate_prompt_tokens")
    reader.neutral("return_tokens_as_token_ids", False)
    reader.neutral("store", False)
    reader.neutral("service_tier", "auto", "default")
    # Labels and hints; spaces between special tokens are only put by tokenizers that this server does not use
    reader.ignored("metadata", "prompt_cache_key", "safety_identifier", "spaces_between_special_tokens")
    return options


class _Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Which of more choices than are asked for are returned. Without any such wish all is as by default."""

    best_of: int = 0
    beam_width: int = 0
    length_penalty: float = 1.0
    cause: str = ""
    """The field that makes choices wait for each other."""


def _read_ranking(reader: FieldReader, n: int, stream: bool) -> _Ranking:
    """best_of: n to 128. use_beam_search: as many beams as beam_width says, or best_of, or n; length_penalty is for
    them. What ranks its choices is not streamed."""
    best_of = reader.integer("best_of", 1, MAX_CHOICES)
    beam_width = reader.integer("beam_width", 1, MAX_CHOICES)
    length_penalty = reader.number("length_penalty", default=1.0)
    reader.neutral("early_stopping", False)
    if best_of is not None and best_of < n:
        raise InvalidField("best_of", f"must be at least n ({n}), got {best_of}")
    if reader.boolean("use_beam_search", default=False):
        if beam_width is not None and best_of is not None and best_of != beam_width:
            raise InvalidField("best_of", f"is {best_of} but beam_width is {beam_width}; send one of them")
        ranking = _Ranking(
            beam_width=beam_width or best_of or n, length_penalty=length_penalty, cause="use_beam_search"
        )
    else:
        if beam_width is not None:
            raise InvalidField("beam_width", "needs use_beam_search to be true")
        if length_penalty != 1.0:
            raise InvalidField("length_penalty", "is for beams: it needs use_beam_search to be true, or must be 1")
        if best_of is None or best_of == n:
            return _Ranking()
        ranking = _Ranking(best_of=best_of, cause="best_of")
    if stream:
        over = f" over n ({n})" if ranking.cause == "best_of" else ""
        raise InvalidField(
            ranking.cause,
            f"cannot be streamed{over}: its choices are known only when all have ended; ask for them over HTTP, with "
            "stream false",
        )
    return ranking


def _or_default(value: int | None, default: int) -> int:
    return default if value is None else value


def _read_stream_options(reader: FieldReader, stream: bool) -> tuple[bool, bool]:
    """stream_options: include_usage, continuous_usage_stats (which needs it); only for streams."""
    fields = reader.mapping("stream_options")
    if fields and not stream:
        raise InvalidField("stream_options", "needs stream to be true")
    inner = FieldReader(fields, "stream_options.")
    include_usage = inner.boolean("include_usage", default=False)
    continuous = inner.boolean("continuous_usage_stats", default=False)
    inner.neutral("include_obfuscation", False)
    inner.finish()
    if continuous and not include_usage:
        raise InvalidField("stream_options.continuous_usage_stats", "needs stream_options.include_usage to be true")
    return include_usage, continuous


def _read_stop(reader: FieldReader) -> tuple[str, ...]:
    """stop: one text or a list of up to 16, none empty, each up to 1,024 characters."""
    value = reader.take("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise InvalidField("stop", f"must be text or a list of texts, got {_kind(value)}")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidField("stop", f"takes at most {MAX_STOP_STRINGS} texts, got {len(stops)}")
    for index, stop in enumerate(stops):
        field = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not isinstance(stop, str):
            raise InvalidField(field, f"must be text, got {_kind(stop)}")
        if not 1 <= len(stop) <= MAX_STOP_STRING_CHARS:
            raise InvalidField(field, f"must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(stop)}")
    return tuple(dict.fromkeys(stops))


def _read_prompt(reader: FieldReader, limits: RequestLimits) -> str | list[int]:
    """prompt: one text or one list of token ids, not empty. A list with one such entry is that prompt."""
    value = reader.take("prompt")
    field = "prompt"
    if value is None:
        raise InvalidField(field, "is missing; send text or a list of token ids")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise InvalidField(field, f"takes one prompt, got {len(value)}; send a request for each")
        value, field = value[0], "prompt[0]"
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidField(field, f"must be text or a list of token ids, got {_kind(value)}")
    if not value:
        raise InvalidField(field, "is empty; send text or at least one token id")
    if limits.max_model_len and len(value) >= limits.max_model_len:
        raise InvalidField(
            field,
            f"has {len(value)} tokens, which leaves no room for an answer within the model's limit of "
            f"{limits.max_model_len}; shorten it",
        )
    return check_token_ids(value, limits.vocab_size, field)


def _read_messages(reader: FieldReader) -> tuple[ChatMessage, ...]:
    """messages: 1 to 10,000 objects with role and content."""
    value = reader.take("messages")
    if not isinstance(value, list):
        raise InvalidField("messages", f"must be a list of messages, got {_kind(value)}")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidField("messages", f"must hold 1 to {MAX_MESSAGES} messages, got {len(value)}")
    return tuple(_read_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _read_message(value: object, path: str) -> ChatMessage:
    """role: system (or developer, the same), user, assistant, tool. content: text, or text parts, joined by line
    breaks as in vLLM; an assistant's null is empty text. name: 1 to 64 letters, digits, dots, dashes, underscores."""
    if not isinstance(value, dict):
        raise InvalidField(path, f"must be an object with role and content, got {_kind(value)}")
    reader = FieldReader(value, path + ".")
    role = reader.take("role")
    if role == "developer":
        role = "system"
    if not isinstance(role, str) or role not in ROLES:
        got = _short(repr(role)) if isinstance(role, str) else _kind(role)
        reader.refuse("role", f"must be one of {', '.join(ROLES)}, developer; got {got}")
    content = _read_content(reader, role)
    name = reader.text("name")
    if name and not _NAME.fullmatch(name):
        reader.refuse("name", "must have 1 to 64 letters, digits, dots, dashes or underscores")
    if role == "tool":
        reader.text("tool_call_id", MAX_LABEL_CHARS)
    reader.neutral("tool_calls", [])
    reader.neutral("function_call")
    for extra in ("refusal", "reasoning", "reasoning_content", "audio"):
        reader.neutral(extra)
    reader.neutral("annotations", [])
    reader.finish()
    return ChatMessage(role, content, name)


def _read_content(reader: FieldReader, role: str) -> str:
    if "content" not in reader and role != "assistant":
        reader.refuse("content", "is missing; send text")
    content = reader.take("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        reader.refuse("content", f"must be text or a list of text parts, got {_kind(content)}")
    texts: list[str] = []
    for index, part in enumerate(content):
        path = reader.path(f"content[{index}]")
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise InvalidField(path, f'must be {{"type": "text", "text": …}}, got {_kind(part)}')
        inner = FieldReader(part, path + ".")
        kind = inner.take("type")
        if kind != "text":
            inner.refuse("type", f"must be 'text'; this model takes no other parts, got {_short(repr(kind))}")
        text = inner.take("text")
        if not isinstance(text, str):
            inner.refuse("text", f"must be text, got {_kind(text)}")
        inner.finish()
        texts.append(text)
    return "\n".join(texts)
