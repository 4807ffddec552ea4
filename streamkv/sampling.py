"""How the next token is chosen, and the one rule for each of its fields."""

import math

import msgspec

from streamkv.errors import InvalidField

MAX_SEED = 2**64 - 1
MAX_STOP_TOKEN_IDS = 128
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_GRAMMAR_CHARS = 256 * 1024
GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "choice", "lark")


def _check_range(field: str, value: float, low: float, high: float, hint: str = "") -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidField(field, f"must be between {low:g} and {high:g}, got {value!r}{hint}")


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """What the generated text must look like. Compiled by the engine; one that cannot be is refused as `invalid` with
    the field that `field` names. Raises InvalidField on construction."""

    kind: str
    """One of GRAMMAR_KINDS."""
    text: str = ""
    """json_object: empty. json_schema: the schema as JSON. regex: the pattern, which the whole text matches. choice: a
    JSON list of texts. lark: a grammar in Lark's notation, with the rule `start`."""
    field: str = "response_format"
    """Where the client wrote it."""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise InvalidField(self.field, f"must be one of {', '.join(GRAMMAR_KINDS)}, got {self.kind!r}"[:200])
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidField(self.field, f"may have {MAX_GRAMMAR_CHARS} characters, got {len(self.text)}")


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """What a request asks of the sampler; part of the wire's Submit, so fields may only be added at the end.

    Every draw depends on (seed, choice index, position) alone, so a request with a seed gives the same
    tokens in any batch, after a preemption and after a restart.
    Raises InvalidField on construction (msgspec turns that into its ValidationError when decoding).
    """

    seed: int
    """0 .. 2**64 - 1; a request without one gets a random one when it is submitted."""
    max_tokens: int
    """At least 1: how many tokens each choice may generate."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are not sampled before this many tokens."""
    n: int = 1
    """Choices per prompt, 1 .. 128."""
    temperature: float = 1.0
    """0 .. 2; 0 is greedy: the token with the highest logit, the lowest id on a tie."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches p, 0 < p <= 1."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest, 0 .. 1."""
    stop_token_ids: list[int] = []
    """Ids that end a choice with reason `stop`, as end-of-sequence does; at most 128."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids and feed them back like any token."""

    best_of: int = 0
    """Generate so many choices and return the n with the highest mean log probability; 0: n. At least n, at most 128.
    More than n are only returned when all have ended."""
    beam_width: int = 0
    """Beam search with so many beams, at least n, of which the best n are returned; 0: none. Takes no randomness and
    no filter: temperature and best_of must be 0, top_k, top_p and min_p off."""
    length_penalty: float = 1.0
    """Finished beams are compared by the sum of their log probabilities over their length to this power, -10 .. 10.
    The search ends as that of transformers with early_stopping=False (engine/scheduling/beam_search.py)."""

    presence_penalty: float = 0.0
    """-2 .. 2, taken from the logit of every token that this choice has generated."""
    frequency_penalty: float = 0.0
    """-2 .. 2, taken from a token's logit as many times as this choice has generated it."""
    repetition_penalty: float = 1.0
    """0.01 .. 10. Positive logits of tokens in the prompt or the output are divided by it, others multiplied
    (Keskar et al., CTRL, 2019). Before the two above."""
    logit_bias: dict[int, float] = {}
    """token id → what is added to its logit, -100 .. 100; at most 1024 ids. Before the penalties."""
    logprobs: int = -1
    """Log probabilities of each generated token, and of so many likeliest tokens beside it, 0 .. 20; -1: none. They
    are the model's own: before bans, biases, penalties, temperature and filters."""
    prompt_logprobs: int = -1
    """The same for the prompt's tokens but the first. The whole prompt is computed for that, whatever is cached."""
    grammar: Grammar | None = None
    """What the text of each choice must match. End-of-sequence is only sampled where it does."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise InvalidField("seed", f"must be between 0 and 2**64 - 1, got {self.seed}")
        if self.max_tokens < 1:
            raise InvalidField("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidField(
                "min_tokens", f"must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidField("n", f"must be between 1 and {MAX_CHOICES}, got {self.n}")
        _check_range("temperature", self.temperature, 0.0, 2.0)
        if self.top_k < -1:
            raise InvalidField("top_k", f"must be -1 or 0 (both keep all) or at least 1, got {self.top_k}")
        if not (0.0 < self.top_p <= 1.0):
            raise InvalidField("top_p", f"must be over 0 and at most 1, got {self.top_p!r}")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidField(
                "stop_token_ids", f"takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}"
            )
        if any(token_id < 0 for token_id in self.stop_token_ids):
            raise InvalidField("stop_token_ids", f"ids must not be negative, got {min(self.stop_token_ids)}")

        if self.best_of and not self.n <= self.best_of <= MAX_CHOICES:
            raise InvalidField("best_of", f"must be between n ({self.n}) and {MAX_CHOICES}, got {self.best_of}")
        if self.beam_width:
            if not self.n <= self.beam_width <= MAX_CHOICES:
                raise InvalidField(
                    "beam_width", f"must be between n ({self.n}) and {MAX_CHOICES}, got {self.beam_width}"
                )
            if self.best_of:
                raise InvalidField(
                    "best_of", f"is not for beam search, which returns the best of its beams, got {self.best_of}"
                )
            if self.temperature:
                raise InvalidField("temperature", f"must be 0 for beam search, got {self.temperature:g}")
            for field, value, off in (
                ("top_k", max(self.top_k, 0), 0),
                ("top_p", self.top_p, 1),
                ("min_p", self.min_p, 0),
            ):
                if value != off:
                    raise InvalidField(
                        field, f"must be {off} for beam search, which looks at all tokens, got {value:g}"
                    )
        _check_range("length_penalty", self.length_penalty, -10.0, 10.0)
        self._check_logits()

    def _check_logits(self) -> None:
        """What changes logits or tells of them."""
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidField("logit_bias", f"takes at most {MAX_LOGIT_BIASES} ids, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0:
                raise InvalidField("logit_bias", f"ids must not be negative, got {token_id}")
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        for field, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if not -1 <= value <= MAX_LOGPROBS:
                raise InvalidField(field, f"must be between 0 and {MAX_LOGPROBS}, or -1 for none, got {value}")
        if self.beam_width:
            for field, is_off in (
                ("presence_penalty", self.presence_penalty == 0),
                ("frequency_penalty", self.frequency_penalty == 0),
                ("repetition_penalty", self.repetition_penalty == 1),
                ("logit_bias", not self.logit_bias),
                ("logprobs", self.logprobs < 0),
                (self.grammar.field if self.grammar else "grammar", self.grammar is None),
            ):
                if not is_off:
                    raise InvalidField(field, "cannot be used with beam search; leave it out")

    @property
    def has_penalties(self) -> bool:
        """Whether the draw depends on which tokens came before, and not only on what the model makes of them."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether a penalty or a bias stands between the model's logits and the draw."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated at once."""
        return self.beam_width or self.best_of or self.n

    @property
    def ranks_choices(self) -> bool:
        """Whether choices are returned only when all have ended, best first."""
        return self.num_sequences > self.n or bool(self.beam_width)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
