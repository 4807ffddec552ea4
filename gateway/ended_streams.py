"""Streams that have ended and may still be taken up again, as far as this gateway had them.

The engine keeps them as well, and is asked first. But an engine can end between the end of a stream and the moment when
its client comes back for the rest, and then what lies here is all that there is. The next engine is given it (Keep), so
that the client may come back at another gateway, too.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

import msgspec

from streamkv.protocol import KEPT_CHOICE_BYTES, KEPT_STREAM_BYTES, Attached, Keep

MAX_BYTES: Final = 64 * 1024 * 1024


@dataclass(slots=True, eq=False)
class _Ended:
    tenant: str
    remains: Attached
    num_bytes: int
    until_s: float
    """On the loop's clock."""
    timer: asyncio.TimerHandle | None = None


class EndedStreams:
    """Keeps each for its grace period, and at most max_bytes of them: beyond that the first to end goes first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._streams: dict[bytes, _Ended] = {}

    def keep(self, remains: Attached, tenant: str, grace_s: float) -> None:
        """remains: all of it, as the engine would tell it. Replaces what was kept of the same stream, but not for
        longer: a stream ends once, however often it is read again."""
        old = self._streams.get(remains.stream_id)
        self._forget(old)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + grace_s
        if old is not None:
            until_s = min(until_s, old.until_s)
        ended = _Ended(tenant, remains, _num_bytes(remains) + len(tenant), until_s)
        self._streams[remains.stream_id] = ended
        self._num_bytes += ended.num_bytes
        ended.timer = loop.call_at(ended.until_s, self._forget, ended)
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._streams.values())))

    def find(self, stream_id: bytes, tenant: str) -> Attached | None:
        """What is kept of its owner's stream, and for how long still."""
        ended = self._streams.get(stream_id)
        if ended is None or ended.tenant != tenant:
            return None
        return msgspec.structs.replace(ended.remains, kept_s=_rest_s(ended))

    def drop(self, stream_id: bytes, tenant: str) -> None:
        """Its owner wants nothing of it to be left."""
        ended = self._streams.get(stream_id)
        if ended is not None and ended.tenant == tenant:
            self._forget(ended)

    @property
    def stream_ids(self) -> list[bytes]:
        return list(self._streams)

    def for_next_engine(self, stream_id: bytes) -> Keep | None:
        """What is kept of a stream, for as long as it is kept here. From the running loop."""
        ended = self._streams.get(stream_id)
        return Keep(ended.remains, ended.tenant, _rest_s(ended)) if ended is not None else None

    def _forget(self, ended: _Ended | None) -> None:
        """Harmless for one that is gone, or that another has taken the place of."""
        if ended is not None and self._streams.get(ended.remains.stream_id) is ended:
            del self._streams[ended.remains.stream_id]
            self._num_bytes -= ended.num_bytes
            if ended.timer is not None:
                ended.timer.cancel()  # which would hold its bytes until it is due


def _rest_s(ended: _Ended) -> float:
    return max(0.0, ended.until_s - asyncio.get_running_loop().time())


def _num_bytes(remains: Attached) -> int:
    """What keeping it takes; as the engine counts it, too."""
    of_prompt = [remains.prompt_logprobs] if remains.prompt_logprobs is not None else []
    num_bytes = KEPT_STREAM_BYTES + len(remains.gateway_state) + len(remains.prompt_token_ids)
    num_bytes += sum([KEPT_CHOICE_BYTES + len(tokens) for tokens in remains.token_ids])
    num_bytes += sum([len(end.cause) for end in remains.finished])
    return num_bytes + sum([values.num_bytes for values in [*remains.logprobs, *of_prompt]])
