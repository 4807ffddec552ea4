"""Which streams the steps in flight compute, kept where the end of this process does not reach it.

A request can be what ends the engine. Who it was shows only in what was in flight at that moment, so the streams of
each launched step stand in a small file beside the socket, mapped into memory: a write is a copy, and what was written
is there for the next engine however this one ended. That one names them to the gateways, in Ready. Of ranked choices,
whose tokens nobody gets before the end, it also tells how far they were: coming further is what clears them. Only those
count that these steps compute. One that has ended, or lost its blocks, may be far ahead of them, and would seem to
stand at one place until they have caught up.

    the file:   number of streams 4 | per stream: its id 16, tokens of its ranked choices 4     numbers little-endian
"""

import logging
import mmap
import os
import stat
from collections import deque
from typing import Final

from engine.sequence import Request, Sequence
from streamkv.log import fields
from streamkv.protocol import STREAM_ID_BYTES

logger = logging.getLogger(__name__)

MAX_STREAMS: Final = 16 * 1024
_COUNT_BYTES: Final = 4
_NO_TOKENS: Final = bytes(4)
_ENTRY_BYTES: Final = STREAM_ID_BYTES + 4
_SIZE: Final = _COUNT_BYTES + MAX_STREAMS * _ENTRY_BYTES


class FlightRecord:
    """The record of one engine life, and what the life before has left. Costs a comparison per step while the same
    sequences run, and a write per request whose choices are ranked."""

    def __init__(self, path: str) -> None:
        """path: empty for none. One that cannot be used is logged: then there are never any suspects."""
        self.suspects: dict[bytes, int] = {}
        """Streams that the engine before computed when it ended, and the tokens of those whose choices are ranked; none
        after one that was asked to end."""
        self.is_successor = False
        """An engine has run here before."""
        self._in_flight: deque[list[Sequence]] = deque()
        self._written: list[Sequence] = []
        """Whose streams stand in the file, whether or not they count."""
        self._num_written = 0
        self._ranked: list[tuple[int, list[Sequence]]] = []
        """Where the number of a request's ranked tokens stands, and its sequences in flight."""
        self._map: mmap.mmap | None = None
        if path:
            try:
                self._open(path)
            except OSError as error:
                logger.warning("no record of the steps in flight", extra=fields(path=path, reason=error.strerror))

    def _open(self, path: str) -> None:
        """Raises OSError; also for a file that others could have written."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            facts = os.fstat(file)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
                raise PermissionError(1, "it is not a file that this user alone can write")
            self.is_successor = facts.st_size > 0
            self.suspects = _streams_of(os.pread(file, _SIZE, 0))
            os.ftruncate(file, _SIZE)
            os.posix_fallocate(file, 0, _SIZE)  # to write where the disk has no room would end the process
            self._map = mmap.mmap(file, _SIZE)
            self._map[:_COUNT_BYTES] = bytes(_COUNT_BYTES)
        finally:
            os.close(file)

    def launched(self, sequences: list[Sequence]) -> None:
        """A step with these was launched. The list is compared and kept, never changed."""
        others = [step for step in self._in_flight if step != sequences]
        self._in_flight.append(sequences)
        if others:
            newest = set(sequences)
            sequences = [each for step in others for each in step if each not in newest] + sequences
        self._write(sequences)

    def collected(self) -> None:
        """The oldest step is over."""
        self._in_flight.popleft()
        if not self._in_flight:
            self._write([])

    def close(self) -> None:
        """The end was asked for: nobody is suspected."""
        if self._map is not None:
            self._map[:_COUNT_BYTES] = bytes(_COUNT_BYTES)
            self._map.close()
            self._map = None

    def _write(self, sequences: list[Sequence]) -> None:
        if self._map is None:
            return
        if sequences and sequences != self._written:
            requests = list(dict.fromkeys([each.request for each in sequences]))[:MAX_STREAMS]
            entries = _NO_TOKENS.join([request.stream_id for request in requests]) + _NO_TOKENS
            self._map[:_COUNT_BYTES] = bytes(_COUNT_BYTES)  # an end between the two writes suspects nobody
            self._map[_COUNT_BYTES : _COUNT_BYTES + len(entries)] = entries
            self._written, self._num_written = sequences, len(requests)
            self._ranked = _ranked_of(requests, sequences)
        if sequences:
            for start, ranked in self._ranked:
                num_tokens = max([each.num_output for each in ranked])
                self._map[start : start + 4] = num_tokens.to_bytes(4, "little")
        self._map[:_COUNT_BYTES] = (self._num_written if sequences else 0).to_bytes(_COUNT_BYTES, "little")


def _ranked_of(requests: list[Request], sequences: list[Sequence]) -> list[tuple[int, list[Sequence]]]:
    by_request: dict[Request, tuple[int, list[Sequence]]] = {
        request: (_COUNT_BYTES + place * _ENTRY_BYTES + STREAM_ID_BYTES, [])
        for place, request in enumerate(requests)
        if (sampling := request.sampling).best_of or sampling.beam_width
    }
    if by_request:
        for each in sequences:
            if (entry := by_request.get(each.request)) is not None:
                entry[1].append(each)
    return list(by_request.values())


def _streams_of(data: bytes) -> dict[bytes, int]:
    count = int.from_bytes(data[:_COUNT_BYTES], "little")
    if count > MAX_STREAMS or len(data) < _COUNT_BYTES + count * _ENTRY_BYTES:
        return {}
    entries = [data[start : start + _ENTRY_BYTES] for start in range(_COUNT_BYTES, len(data), _ENTRY_BYTES)][:count]
    return {entry[:STREAM_ID_BYTES]: int.from_bytes(entry[STREAM_ID_BYTES:], "little") for entry in entries}
