"""Log probabilities on their way from the wire to clients: kept packed, and told in the forms of OpenAI and vLLM."""

from collections.abc import Sequence
from typing import Final

from gateway.deltas import TokenLogprob
from gateway.tokenizer import Tokenizer
from streamkv.protocol import TokenLogprobs, unpack_floats, unpack_ids

_LEAST: Final = -9999.0
"""Stands for minus infinity, which JSON has not: as in OpenAI's answers."""


class LogprobStore:
    """Those of consecutive tokens of one choice or prompt, as they came: 4 bytes a token and 8 for each likeliest one
    beside it, so that a long answer stays small and goes to another engine without being packed again."""

    __slots__ = ("_chosen", "_num_top", "_top_ids", "_top_logprobs")

    def __init__(self) -> None:
        self._chosen = bytearray()
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()
        self._num_top = 0

    def __len__(self) -> int:
        return len(self._chosen) // 4

    def extend(self, values: TokenLogprobs) -> None:
        """Those of the next tokens. Raises ValueError where they do not belong to the ones before."""
        if not values.chosen:
            return
        if len(values.top_ids) != len(values.top_logprobs) or (self._chosen and values.num_top != self._num_top):
            raise ValueError(
                f"log probabilities of {values.num_top} places a token came after those of {self._num_top}"
            )
        self._num_top = values.num_top
        self._chosen += values.chosen
        self._top_ids += values.top_ids
        self._top_logprobs += values.top_logprobs

    def cut(self, num_tokens: int) -> None:
        """Forget those behind the first num_tokens."""
        del self._chosen[4 * num_tokens :]
        del self._top_ids[4 * num_tokens * self._num_top :]
        del self._top_logprobs[4 * num_tokens * self._num_top :]

    def pack(self) -> TokenLogprobs:
        """All of them."""
        return TokenLogprobs(bytes(self._chosen), bytes(self._top_ids), bytes(self._top_logprobs))

    def of(self, token_ids: Sequence[int], start: int, num_top: int, offsets: Sequence[int] = ()) -> list[TokenLogprob]:
        """Those of token_ids, of which the first is number `start`, with the num_top likeliest beside each. offsets:
        characters before each; none given: 0. Raises ValueError where one is missing."""
        end = start + len(token_ids)
        if end > len(self):
            raise ValueError(f"{len(self)} log probabilities came for {end} tokens")
        width = self._num_top
        chosen = unpack_floats(bytes(self._chosen[4 * start : 4 * end]))
        top_ids = unpack_ids(bytes(self._top_ids[4 * start * width : 4 * end * width]))
        top_logprobs = unpack_floats(bytes(self._top_logprobs[4 * start * width : 4 * end * width]))
        shown = min(num_top, width)
        return [
            TokenLogprob(
                token_id,
                chosen[index],
                tuple(
                    zip(
                        top_ids[index * width : index * width + shown],
                        top_logprobs[index * width : index * width + shown],
                        strict=True,
                    )
                )
                if shown > 0
                else (),
                offsets[index] if offsets else 0,
            )
            for index, token_id in enumerate(token_ids)
        ]


class LogprobForms:
    """Entries → what a client reads, as plain objects that JSON and msgpack can write.

    A token's text is its own, alone: half a character is U+FFFD, and the bytes say which half. The texts of a choice's
    tokens joined are its text where each is whole characters and none is special.
    """

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool) -> None:
        """as_token_ids: write `token_id:17` for a token's text."""
        self._tokenizer = tokenizer
        self._pieces = tokenizer.vocabulary.pieces
        self._is_window = tokenizer.vocabulary.style == "window"
        self._as_token_ids = as_token_ids
        self._known: dict[int, tuple[str, str, list[int]]] = {}
        """Name, text and bytes of tokens that were told of: the likeliest ones come again and again."""

    def chat(self, entries: Sequence[TokenLogprob]) -> list[dict[str, object]]:
        """OpenAI's choices[].logprobs.content."""
        found: list[dict[str, object]] = []
        for entry in entries:
            top: list[dict[str, object]] = []
            for token_id, logprob in entry.top:
                name, _, piece = self._told(token_id)
                top.append({"token": name, "logprob": _finite(logprob), "bytes": piece})
            name, _, piece = self._told(entry.token_id)
            found.append({"token": name, "logprob": _finite(entry.logprob), "bytes": piece, "top_logprobs": top})
        return found

    def completion(self, entries: Sequence[TokenLogprob]) -> dict[str, list[object]]:
        """OpenAI's choices[].logprobs of a completion. top_logprobs has the token itself, too, so that it may have one
        more than was asked for."""
        tokens: list[object] = []
        token_logprobs: list[object] = []
        top_logprobs: list[object] = []
        text_offset: list[object] = []
        for entry in entries:
            tokens.append(self._told(entry.token_id)[0])
            text_offset.append(entry.text_offset)
            token_logprobs.append(_finite(entry.logprob))
            if entry.logprob is None:
                top_logprobs.append(None)
                continue
            top: dict[str, float | None] = {}
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                top.setdefault(self._told(token_id)[0], _finite(logprob))  # two tokens may have the same text
            top_logprobs.append(top)
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }

    def prompt(self, entries: Sequence[TokenLogprob]) -> list[dict[str, dict[str, object]] | None]:
        """vLLM's prompt_logprobs: null for the first token, then id → logprob, rank, decoded_token. The rank of a
        token that is not among the likeliest is not known: null."""
        found: list[dict[str, dict[str, object]] | None] = []
        for entry in entries:
            if entry.logprob is None:
                found.append(None)
                continue
            own: dict[str, object] = {
                "logprob": _finite(entry.logprob),
                "rank": None,
                "decoded_token": self._told(entry.token_id)[1],
            }
            told = {str(entry.token_id): own}
            for rank, (token_id, logprob) in enumerate(entry.top, start=1):
                if token_id == entry.token_id:
                    own["rank"] = rank
                else:
                    text = self._told(token_id)[1]
                    told[str(token_id)] = {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}
            found.append(told)
        return found

    def _told(self, token_id: int) -> tuple[str, str, list[int]]:
        known = self._known.get(token_id)
        if known is None:
            if self._is_window:
                piece = self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
            else:
                piece = self._pieces[token_id]
            text = piece.decode("utf-8", "replace")
            known = (f"token_id:{token_id}" if self._as_token_ids else text, text, list(piece))
            self._known[token_id] = known
        return known


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or logprob > _LEAST else _LEAST
