"""A stream's prompt, and what its client is told of it before the first token of each choice."""

from collections.abc import Sequence

from gateway.deltas import Delta, TokenLogprob
from gateway.detokenizer import Detokenizer
from gateway.logprobs import LogprobStore
from gateway.stream_state import StreamState
from gateway.tokenizer import Tokenizer, json_inside
from streamkv.protocol import TokenLogprobs, pack_ids, unpack_ids


class Prompt:
    def __init__(
        self, token_ids: Sequence[int], state: StreamState, tokenizer: Tokenizer, echo_text: str | None = None
    ) -> None:
        """echo_text: as its client wrote it; None: as its tokens are read. Of use for an echo alone."""
        self.packed = pack_ids(token_ids)
        self.num_tokens = len(token_ids)
        self.echo_text = ""
        """What the text of each choice begins with."""
        self._tokenizer = tokenizer
        self._state = state
        self._logprobs = LogprobStore()
        """From its second token on."""
        if state.echo:
            self.echo_text = tokenizer.decode(token_ids, state.skip_special_tokens) if echo_text is None else echo_text

    @property
    def token_ids(self) -> list[int]:
        return unpack_ids(self.packed)

    @property
    def is_told(self) -> bool:
        """A choice has something to open with."""
        return self._state.echo or self._state.num_prompt_logprobs >= 0

    def add_logprobs(self, start: int, values: TokenLogprobs) -> None:
        """values: of the tokens from number `start` on. After an engine's end they come again."""
        num_known = len(self._logprobs) - (start - 1)
        if 0 <= num_known < values.num_tokens:
            self._logprobs.extend(values.between(num_known, values.num_tokens))

    def packed_logprobs(self) -> TokenLogprobs | None:
        """None where there are none."""
        return self._logprobs.pack() if len(self._logprobs) else None

    def opening(self) -> Delta:
        """What was asked for of it. Raises ValueError where log probabilities are missing."""
        state = self._state
        num_top, asked = state.sampling.logprobs, state.num_prompt_logprobs
        return Delta(
            json_inside(self.echo_text) if state.echo else b"",
            logprobs=self._told(num_top) if state.echo and num_top >= 0 else [],
            prompt_logprobs=self._told(asked) if asked >= 0 else None,
        )

    def _told(self, num_top: int) -> list[TokenLogprob]:
        """Its log probabilities, with where its tokens stand in an echo."""
        token_ids = self.token_ids
        offsets: list[int] = []
        if self._state.echo:
            detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=self._state.skip_special_tokens)
            num_chars, most = 0, len(self.echo_text)
            for token_id in token_ids:
                offsets.append(min(num_chars, most))
                num_chars += len(detokenizer.push(token_id))
        return [TokenLogprob(token_ids[0], None), *self._logprobs.of(token_ids[1:], 0, num_top, offsets[1:])]
