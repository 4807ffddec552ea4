"""The ledger of callers for several gateways: one process keeps it, the others ask over their links."""

import logging
from collections import Counter
from collections.abc import Collection
from typing import Final

import msgspec

from gateway.crew_link import Link, LinkLost, Told
from gateway.limits import Allowance, Ledger, OwnBooks, Standing, Verdict

logger = logging.getLogger(__name__)

ADMIT: Final = "admit"
LOOK: Final = "look"
JOIN: Final = "join"
CHARGE: Final = "charge"
RELEASE: Final = "release"
KEEP: Final = "keep"

_encode: Final = msgspec.msgpack.encode
_decode: Final = msgspec.msgpack.decode


class LedgerDesk:
    """Where one gateway's questions about the ledger are answered."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._live: Counter[str] = Counter()
        """Requests of each caller that live at this gateway."""

    def answer(self, what: str, body: bytes) -> bytes:
        """Raises ValueError, msgspec.MsgspecError for what is no question."""
        name, allowance = _decode(body, type=tuple[str, Allowance])
        if what == LOOK:
            return _encode(self._ledger.look(name, allowance))
        if what != ADMIT:
            raise ValueError(f"no such question: {what}")
        verdict = self._ledger.admit(name, allowance)
        if not verdict.refused_by:
            self._live[name] += 1
        return _encode(verdict)

    def take(self, what: str, body: bytes) -> None:
        """What needs no answer. Raises as `answer` does."""
        if what == JOIN:
            name, allowance = _decode(body, type=tuple[str, Allowance])
            self._ledger.join(name, allowance)
            self._live[name] += 1
        elif what == CHARGE:
            self._ledger.charge(*_decode(body, type=tuple[str, int]))
        elif what == RELEASE:
            name = _decode(body, type=str)
            self._ledger.release(name)
            self._live[name] -= 1
        elif what == KEEP:
            self._ledger.keep(_decode(body, type=list[str]))
        else:
            raise ValueError(f"nothing of this name: {what}")

    def close(self) -> None:
        """The gateway is gone, and with it the requests that it held."""
        for name, num_live in self._live.items():
            for _ in range(num_live):
                self._ledger.release(name)
        self._live.clear()


class LinkedBooks:
    """A gateway's side (limits.Books). Should the link break, which is the end of the server, a ledger of its own."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self._own = OwnBooks()

    async def admit(self, name: str, allowance: Allowance) -> Verdict:
        if self.link is not None:
            try:
                return _decode(await self.link.ask(ADMIT, _encode((name, allowance))), type=Verdict)
            except LinkLost:
                self.link = None
        return await self._own.admit(name, allowance)

    async def look(self, name: str, allowance: Allowance) -> Standing:
        if self.link is not None:
            try:
                return _decode(await self.link.ask(LOOK, _encode((name, allowance))), type=Standing)
            except LinkLost:
                self.link = None
        return await self._own.look(name, allowance)

    def join(self, name: str, allowance: Allowance) -> None:
        self._tell(JOIN, (name, allowance))

    def charge(self, name: str, num_tokens: int) -> None:
        self._tell(CHARGE, (name, num_tokens))

    def release(self, name: str) -> None:
        self._tell(RELEASE, name)

    def keep(self, names: Collection[str]) -> None:
        self._tell(KEEP, list(names))

    def _tell(self, what: str, body: object) -> None:
        if self.link is not None:
            self.link.tell(Told(what, _encode(body)))
