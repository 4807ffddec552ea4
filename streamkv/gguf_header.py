"""The head of a GGUF file, read without trusting a byte of it: what the engine and the gateway both need.

Layout, little-endian: magic, version, number of tensors, number of metadata entries; the entries; the tensors' names,
shapes, types and offsets. Strings and arrays begin with their length. Every length is checked against the file. A
vocabulary of 100,000 tokens costs a tenth of a second to keep and milliseconds to step over. (The gguf package's
reader makes an array view for each of its strings, which takes seconds.)
"""

import mmap
import struct
from typing import Final

from streamkv.errors import ModelError

MetadataValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's number of a type → its struct code."""
_FLOAT32: Final = 6
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_SHORTENED: Final = 4096
"""Longer lists of float32 stay as they are: they are scores of a vocabulary, of which only the order counts."""


class GgufHeader:
    """A cursor over a mapped GGUF file that cannot leave it: the metadata first, then the tensors' table."""

    def __init__(self, data: mmap.mmap, source: str) -> None:
        """source: the file, for messages. Raises ModelError, as every method does."""
        self._data = data
        self._source = source
        self.at = 0
        """Bytes read so far."""
        if self._take(4) != _MAGIC:
            raise self.damaged("does not begin with GGUF")
        version = self.whole_number("I")
        if version not in _VERSIONS:
            raise self.damaged(f"is of version {version}; {_VERSIONS} are supported, little-endian")
        self.num_tensors = self.whole_number("Q")
        self._num_entries = self.whole_number("Q")

    def metadata(self, max_listed: int | None = None) -> dict[str, MetadataValue]:
        """The entries by their keys; lists of more than max_listed items are stepped over and left out."""
        values: dict[str, MetadataValue | None] = {}
        for _ in range(self._num_entries):
            key = self.text()
            if key in values:
                raise self.damaged(f"has the key {key!r:.80} twice")
            values[key] = self._value(self.whole_number("I"), key, max_listed)
        return {key: value for key, value in values.items() if value is not None}

    def text(self) -> str:
        # A few files hold pieces that are no UTF-8; such a piece can be printed, but no text gives it.
        return self._take(self.whole_number("Q")).decode("utf-8", errors="replace")

    def whole_number(self, code: str) -> int:
        """The number of this struct code that comes next."""
        value: int = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]
        return value

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._source} {what}; fetch or convert it again")

    def _value(self, type_number: int, key: str, max_listed: int | None) -> MetadataValue | None:
        if type_number == _STRING:
            return self.text()
        if type_number != _ARRAY:
            if type_number not in _SCALARS:
                raise self.damaged(f"has the key {key!r:.80} of an unknown type, {type_number}")
            return self._numbers(type_number, 1)[0]
        item_type, length = self.whole_number("I"), self.whole_number("Q")
        is_kept = max_listed is None or length <= max_listed
        if item_type == _STRING:
            return self._texts(length, is_kept)
        if item_type not in _SCALARS:
            raise self.damaged(f"has the key {key!r:.80} with a list of an unsupported type, {item_type}")
        if is_kept:
            return self._numbers(item_type, length)
        self._step_over(length * struct.calcsize("<" + _SCALARS[item_type]))
        return None

    def _numbers(self, type_number: int, count: int) -> list[int] | list[float] | list[bool]:
        code = _SCALARS[type_number]
        # The bytes come first: no format is made for a count that the file cannot hold.
        taken = self._take(count * struct.calcsize("<" + code))
        numbers = list(struct.unpack(f"<{count}{code}", taken))
        return (
            [_shortest(number) for number in numbers]
            if type_number == _FLOAT32 and count <= _MAX_SHORTENED
            else numbers
        )

    def _texts(self, count: int, is_kept: bool) -> list[str] | None:
        data, at, end = self._data, self.at, len(self._data)
        unpack = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(count):
            if at + 8 > end:
                raise self.damaged("ends inside its metadata")
            start = at + 8
            at = start + unpack(data, at)[0]
            if is_kept:
                if at > end:
                    raise self.damaged("ends inside its metadata")
                texts.append(data[start:at].decode("utf-8", "replace"))
        self._step_over(at - self.at)
        return texts if is_kept else None

    def _step_over(self, num_bytes: int) -> int:
        """Returns where they began."""
        start = self.at
        if start + num_bytes > len(self._data):
            raise self.damaged("ends inside its header")
        self.at = start + num_bytes
        return start

    def _take(self, num_bytes: int) -> bytes:
        start = self._step_over(num_bytes)
        return self._data[start : self.at]


def _shortest(value: float) -> float:
    """1e-05 written as float32 reads back as 9.999999747378752e-06: the shortest number for it is what was meant."""
    stored = struct.pack("<f", value)
    for num_digits in range(1, 10):
        near = float(f"{value:.{num_digits}g}")
        try:
            if struct.pack("<f", near) == stored:
                return near
        except OverflowError:  # rounded up past the largest float32
            continue
    return value
