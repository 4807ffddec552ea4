"""What continues a stream elsewhere: its state, its prompt, and its choices with every token, as far as they are known.

At a new engine it goes on from a Submit, and whoever takes the stream up from this gateway gets an Attached, as the
engine would send it.
"""

from collections.abc import Sequence

import msgspec

from gateway.choice import Choice
from gateway.detokenizer import Detokenizer
from gateway.logprobs import LogprobForms
from gateway.prompt import Prompt
from gateway.stream_state import StreamState
from gateway.suspicion import UNSUSPECTED, Suspicion
from gateway.tokenizer import Tokenizer
from streamkv.protocol import Attached, Submit, TokenLogprobs, pack_ids, unpack_ids


class StreamContent:
    def __init__(
        self, state: StreamState, prompt_token_ids: Sequence[int], tokenizer: Tokenizer, echo_text: str | None = None
    ) -> None:
        """echo_text: as in Prompt."""
        self.state = state
        self._tokenizer = tokenizer
        self.prompt = Prompt(prompt_token_ids, state, tokenizer, echo_text)
        self.suspicion: Suspicion = state.suspicion
        """Whether it is what ends engines."""
        self._wants_logprobs = state.sampling.logprobs >= 0
        self.choices = [
            Choice(
                index,
                state,
                Detokenizer(
                    tokenizer,
                    stop=state.stop,
                    include_stop_str_in_output=state.include_stop_str_in_output,
                    skip_special_tokens=state.skip_special_tokens,
                    min_tokens=state.sampling.min_tokens,
                    prompt_ids=prompt_token_ids,
                    shown_special_ids=state.parsing.shown_special_ids if state.parsing is not None else (),
                ),
                is_open=not self.prompt.is_told,
                num_chars=len(self.prompt.echo_text),
            )
            for index in range(state.sampling.n)
        ]

    @property
    def num_known_tokens(self) -> int:
        """Tokens that every choice has."""
        return min(len(choice.token_ids) for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Of all choices, also those that are not shown."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def num_shown(self) -> list[int]:
        """Tokens of each choice that count."""
        return [choice.num_shown for choice in self.choices]

    @property
    def logprob_forms(self) -> LogprobForms | None:
        """How its log probabilities are told, anew at each call; None: there are none."""
        if not self._wants_logprobs and self.state.num_prompt_logprobs < 0:
            return None
        return LogprobForms(self._tokenizer, self.state.tokens_as_ids)

    # Whether it is what ends engines

    def died(self, num_ranked_tokens: int) -> None:
        """The engine ended that computed it; num_ranked_tokens: as in Sink.suspected."""
        self.clear_by_tokens()
        self.suspicion = self.suspicion.after_death(max(self.num_tokens, num_ranked_tokens))

    def clear_by_tokens(self) -> None:
        """Of ranked choices none come before their end."""
        if self.num_tokens > self.suspicion.furthest:
            self.suspicion = UNSUSPECTED

    # To another engine, or another reader

    def submission(self, request_id: int, stream_id: bytes, tenant: str) -> Submit:
        """It goes on behind the tokens that are here."""
        state = self.state
        has_prior = any(choice.token_ids for choice in self.choices)
        return Submit(
            request_id=request_id,
            stream_id=stream_id,
            prompt_token_ids=self.prompt.packed,
            sampling=state.sampling,
            gateway_state=self._packed_state(),
            prior_token_ids=[pack_ids(choice.token_ids) for choice in self.choices] if has_prior else [],
            finished_choices=[choice.index for choice in self.choices if choice.ending is not None],
            priority=state.priority,
            attach_grace_s=state.attach_grace_s,
            tenant=tenant,
            cache_salt=state.cache_salt,
            label=state.label,
            shares_prefix=state.shares_prefix,
            prior_logprobs=self._packed_logprobs() if has_prior else [],
            runs_alone=self.suspicion.runs_alone,
            ranked_tokens=self.suspicion.cleared_past if state.sampling.ranks_choices else 0,
        )

    def remains(self, stream_id: bytes) -> Attached:
        """All of it, as the engine would tell it."""
        return Attached(
            request_id=0,
            stream_id=stream_id,
            gateway_state=self._packed_state(),
            prompt_token_ids=self.prompt.packed,
            from_token=0,
            token_ids=[pack_ids(choice.token_ids) for choice in self.choices],
            finished=[choice.finished for choice in self.choices if choice.finished is not None],
            logprobs=self._packed_logprobs(),
            prompt_logprobs=self.prompt.packed_logprobs(),
        )

    def _packed_state(self) -> bytes:
        ended = tuple(choice.finished for choice in self.choices if choice.finished is not None)
        return msgspec.msgpack.encode(msgspec.structs.replace(self.state, ended=ended, suspicion=self.suspicion))

    def _packed_logprobs(self) -> list[TokenLogprobs]:
        """Of each choice; empty where none are wanted."""
        return [choice.packed_logprobs() for choice in self.choices] if self._wants_logprobs else []

    # What comes of it

    def add_logprobs(self, choice: int, values: TokenLogprobs) -> None:
        """Of the tokens of a choice that come next."""
        if self._wants_logprobs and choice < len(self.choices):
            self.choices[choice].logprobs.extend(values)

    def take_in(self, attached: Attached, older: Attached | None) -> list[tuple[Choice, list[int]]]:
        """What the engine has of it and is missing here, or else what this gateway knew of it before. Tokens are
        returned with their choice and not added to it: they have to be told."""
        for known in (attached, older):
            if known is not None and known.prompt_logprobs is not None:
                self.prompt.add_logprobs(1, known.prompt_logprobs)
        missing: list[tuple[Choice, list[int]]] = []
        for choice, packed in zip(self.choices, attached.token_ids, strict=False):
            num_known = len(choice.token_ids) - attached.from_token
            if self._wants_logprobs and choice.index < len(attached.logprobs):
                values = attached.logprobs[choice.index]
                choice.logprobs.cut(len(choice.token_ids))
                choice.logprobs.extend(values.between(num_known, values.num_tokens))
            missing.append((choice, unpack_ids(packed)[num_known:]))
        return missing
