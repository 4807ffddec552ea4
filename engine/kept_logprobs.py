"""Log probabilities that grow with a choice, or with what is known of a prompt, packed as the wire has them."""

from streamkv.protocol import TokenLogprobs


class KeptLogprobs:
    """Those of all tokens so far. Appending is O(1) per token."""

    def __init__(self, values: TokenLogprobs | None = None) -> None:
        self._chosen, self._top_ids, self._top_logprobs = bytearray(), bytearray(), bytearray()
        if values is not None:
            self.append(values)

    def __len__(self) -> int:
        """Tokens."""
        return len(self._chosen) // 4

    @property
    def num_bytes(self) -> int:
        return len(self._chosen) + len(self._top_ids) + len(self._top_logprobs)

    def append(self, values: TokenLogprobs) -> None:
        self._chosen += values.chosen
        self._top_ids += values.top_ids
        self._top_logprobs += values.top_logprobs

    def values_from(self, start: int) -> TokenLogprobs:
        """Those of token number `start` and all behind it."""
        first = start * (len(self._top_ids) // len(self._chosen) if self._chosen else 0) * 4
        return TokenLogprobs(
            bytes(self._chosen[4 * start :]), bytes(self._top_ids[first:]), bytes(self._top_logprobs[first:])
        )
