"""What chats and completions share, one rule per field. Ranges of sampling fields are those of SamplingParams."""

from typing import Final

import msgspec

from gateway.response_format import read_grammar
from gateway.schema.logits import read_logit_bias, read_logprobs
from gateway.schema.reader import MAX_LABEL_CHARS, FieldReader
from gateway.schema.wording import kind
from streamkv.errors import InvalidField
from streamkv.sampling import MAX_CHOICES, MAX_STOP_TOKEN_IDS, Grammar, SamplingParams

MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 1024
MAX_PROMPT_REPEATS: Final = 262_144
"""Tokens of the prompt, over all choices, that an answer gives back."""
MAX_PROMPT_LOGPROBS: Final = 65_536
"""Told of one prompt, over all choices."""
MAX_MAX_TOKENS: Final = 2**31 - 1
MAX_ATTACH_GRACE_S: Final = 3600.0
_INT32: Final = 2**31


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
    """None: what is left of the model's length. 0: only the prompt is told of."""
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
    attach_grace_s: float = 0.0
    """How long the stream goes on without its client, for somebody to attach to it."""
    user: str = ""
    request_id: str = ""
    """The client's own label for log lines."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int = -1
    """As in SamplingParams, and so the next."""
    prompt_logprobs: int = -1
    tokens_as_ids: bool = False
    """Log probabilities are told of `token_id:17` instead of a token's text."""
    echo: bool = False
    """The text of each choice begins with the prompt, its log probabilities with those of the prompt."""
    grammar: Grammar | None = None

    @property
    def is_prompt_only(self) -> bool:
        return self.max_tokens == 0

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
        self._check_told(num_prompt_tokens)
        return self._sampling(max_tokens, seed)

    def _check_told(self, num_prompt_tokens: int) -> None:
        """Other streams wait while a prompt's log probabilities are written."""
        num_repeated = num_prompt_tokens * self.n * (self.echo + self.return_token_ids)
        if self.n > 1 and num_repeated > MAX_PROMPT_REPEATS:
            raise InvalidField(
                "n",
                f"is {self.n}, and with echo or return_token_ids the prompt's {num_prompt_tokens} tokens come back "
                f"with each choice; at most {MAX_PROMPT_REPEATS} do: lower n or shorten the prompt",
            )
        in_echo = self.logprobs + 1 if self.echo else 0
        num_told = num_prompt_tokens * self.n * (in_echo + self.prompt_logprobs + 1)
        if num_told > MAX_PROMPT_LOGPROBS:
            raise InvalidField(
                "prompt_logprobs" if self.prompt_logprobs >= 0 else "logprobs",
                f"asks for {num_told} log probabilities of the prompt, whose {num_prompt_tokens} tokens are told of in "
                f"each choice; at most {MAX_PROMPT_LOGPROBS} are told: lower it or n, or shorten the prompt",
            )

    def _sampling(self, max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            seed=seed if self.seed is None else self.seed,
            max_tokens=max(1, max_tokens),
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
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            logprobs=self.logprobs,
            prompt_logprobs=max(self.prompt_logprobs, self.logprobs if self.echo else -1),
            grammar=self.grammar,
        )

    def check(self) -> None:
        """Apply the sampler's own rules now, before anything is spent. Raises InvalidField."""
        try:
            self._sampling(MAX_MAX_TOKENS if self.max_tokens is None else self.max_tokens, seed=0)
        except InvalidField as error:
            if error.field != "max_tokens":
                raise
            raise InvalidField(self.max_tokens_field, error.message) from error


def read_options(reader: FieldReader, limits: RequestLimits, is_chat: bool) -> GenerationOptions:
    """Every field that chats and completions share, with its rule. Ranges of sampling fields are SamplingParams'."""
    max_tokens = reader.integer("max_tokens", 1 if is_chat else 0, MAX_MAX_TOKENS)
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
    logprobs = read_logprobs(reader, is_chat)
    echo = False if is_chat else reader.boolean("echo", default=False)
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
        attach_grace_s=read_grace(reader, "attach_grace_s", stream),
        user=reader.text("user", MAX_LABEL_CHARS),
        request_id=reader.text("request_id", MAX_LABEL_CHARS),
        presence_penalty=reader.number("presence_penalty", default=0.0),
        frequency_penalty=reader.number("frequency_penalty", default=0.0),
        repetition_penalty=reader.number("repetition_penalty", default=1.0),
        logit_bias=read_logit_bias(reader, limits.vocab_size),
        logprobs=logprobs.logprobs,
        prompt_logprobs=logprobs.prompt_logprobs,
        tokens_as_ids=logprobs.tokens_as_ids,
        echo=echo,
        grammar=read_grammar(reader),
    )
    options.check()
    if options.is_prompt_only:
        if not options.echo and options.prompt_logprobs < 0:
            raise InvalidField("max_tokens", "can be 0 only with echo or prompt_logprobs; nothing else would be told")
        if options.min_tokens:
            raise InvalidField("min_tokens", f"must be between 0 and max_tokens (0), got {options.min_tokens}")
    if limits.max_model_len and max_tokens is not None and max_tokens >= limits.max_model_len:
        raise InvalidField(
            max_tokens_field, f"must be below the model's limit of {limits.max_model_len} tokens, got {max_tokens}"
        )
    reader.neutral("bad_words", [])
    reader.neutral("allowed_token_ids")
    reader.neutral("logits_processors", [])
    reader.neutral("truncate_prompt_tokens")
    reader.neutral("store", False)
    reader.neutral("service_tier", "auto", "default")
    # Labels and hints; spaces between special tokens are only put by tokenizers that this server does not use
    reader.ignored(
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "spaces_between_special_tokens",
    )
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


def read_grace(reader: FieldReader, name: str, stream: bool) -> float:
    """attach_grace_s: 0 to 3600, over 0 for streams only."""
    attach_grace_s = reader.number(name, default=0.0)
    if not 0 <= attach_grace_s <= MAX_ATTACH_GRACE_S:
        reader.refuse(name, f"must be between 0 and {MAX_ATTACH_GRACE_S:g} seconds, got {attach_grace_s:g}")
    if attach_grace_s and not stream:
        reader.refuse(name, "needs stream to be true: there is nothing else to attach to")
    return attach_grace_s


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
        raise InvalidField("stop", f"must be text or a list of texts, got {kind(value)}")
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidField("stop", f"takes at most {MAX_STOP_STRINGS} texts, got {len(stops)}")
    for index, stop in enumerate(stops):
        field = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not isinstance(stop, str):
            raise InvalidField(field, f"must be text, got {kind(stop)}")
        if not 1 <= len(stop) <= MAX_STOP_STRING_CHARS:
            raise InvalidField(field, f"must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(stop)}")
    return tuple(dict.fromkeys(stops))
