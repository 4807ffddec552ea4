"""Who speaks to the engine, and what they say: Hello first, versions, bad frames, silence.

What reaches the loop is a decoded message of a gateway that has said Hello. Everything else is answered with a
WireError and dropped here: no bytes from outside stop the engine.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Final

from engine.stats import EngineStats
from streamkv.errors import InvalidField, WireDecodeError
from streamkv.log import fields
from streamkv.protocol import (
    WIRE_VERSION,
    Abort,
    Attach,
    EngineMessage,
    GatewayMessage,
    Hello,
    Pause,
    Rejected,
    Resume,
    Submit,
    WireError,
    decode_from_gateway,
    encode,
    peek_request_id,
)
from streamkv.transport import EngineSocket

logger = logging.getLogger(__name__)

MAX_MESSAGES_PER_TURN: Final = 512
_MAX_TURN_S: Final = 0.003
"""A flood of messages holds up a step by so many, and so long, at most: a long prompt takes a quarter of a
millisecond."""

_LOG_EVERY_S: Final = 1.0


class Inbox:
    """Reads the socket for the loop and knows the gateways that are there."""

    def __init__(self, socket: EngineSocket, stats: EngineStats, clock: Callable[[], float]) -> None:
        self._socket = socket
        self._stats = stats
        self._clock = clock
        self.last_heard_s: dict[bytes, float] = {}
        """Every gateway that has said Hello and is not gone, and when it last spoke."""
        self.has_more = False
        """`receive` stopped at its bound: do not sleep before the next call."""
        self._log_again_at_s = 0.0

    def receive(self) -> Iterator[tuple[bytes, GatewayMessage]]:
        """(gateway id, message) of what has come in, at most MAX_MESSAGES_PER_TURN frames, and none after a few
        milliseconds. Does not wait."""
        now_s = self._clock()
        until_s = now_s + _MAX_TURN_S
        for _ in range(MAX_MESSAGES_PER_TURN):
            received = self._socket.receive()
            if received is None:
                self.has_more = False
                return
            gateway_id, frame = received
            message = self._decode(gateway_id, frame)
            if message is not None and self._admit(gateway_id, message):
                self.last_heard_s[gateway_id] = now_s
                yield gateway_id, message
            now_s = self._clock()  # after every frame: those that are refused take their time, too
            if now_s > until_s:
                break
        self.has_more = True

    def send(self, gateway_id: bytes, message: EngineMessage) -> None:
        """Send to a gateway, or to nobody if it is not connected."""
        self._socket.send(gateway_id, encode(message))

    def send_all(self, message: EngineMessage) -> None:
        """Send to every gateway that has said Hello."""
        frame = encode(message)
        for gateway_id in self.last_heard_s:
            self._socket.send(gateway_id, frame)

    def refuse(self, gateway_id: bytes, code: str, text: str, request_id: int = -1) -> None:
        """Answer a dropped message with a WireError, count it, and log it unless there were many just now."""
        self._stats.counters[f'wire_errors_total{{code="{code}"}}'] += 1
        now_s = self._clock()
        if now_s >= self._log_again_at_s:
            self._log_again_at_s = now_s + _LOG_EVERY_S
            logger.warning("dropped a message", extra=fields(code=code, reason=text, gateway_id=gateway_id))
        self.send(gateway_id, WireError(code, text, request_id))

    def listen_anew(self) -> None:
        """Nobody could be heard for a while: what gateways have not said in it does not count."""
        self.last_heard_s = dict.fromkeys(self.last_heard_s, self._clock())

    def take_silent(self, timeout_s: float) -> list[bytes]:
        """Forget the gateways that said nothing for this long, and return them. They must say Hello again."""
        limit_s = self._clock() - timeout_s
        silent = [gateway_id for gateway_id, heard_s in self.last_heard_s.items() if heard_s <= limit_s]
        for gateway_id in silent:
            del self.last_heard_s[gateway_id]
        return silent

    def _decode(self, gateway_id: bytes, frame: bytes) -> GatewayMessage | None:
        try:
            return decode_from_gateway(frame)
        except WireDecodeError as error:
            request_id = peek_request_id(frame)
            rule = error.__cause__.__cause__ if error.__cause__ is not None else None
            if isinstance(rule, InvalidField) and request_id >= 0 and gateway_id in self.last_heard_s:
                self._stats.counters['requests_rejected_total{code="invalid"}'] += 1
                self.send(gateway_id, Rejected(request_id, "invalid", rule.message, rule.field))
            else:
                self.refuse(gateway_id, "undecodable", str(error), request_id)
            return None

    def _admit(self, gateway_id: bytes, message: GatewayMessage) -> bool:
        if isinstance(message, Hello):
            if message.wire_version != WIRE_VERSION:
                self.refuse(
                    gateway_id,
                    "wire_version",
                    f"this engine speaks wire version {WIRE_VERSION} and the gateway version {message.wire_version}; "
                    "install the same release of StreamKV on both sides",
                )
                return False
            if message.gateway_id != gateway_id:
                self.refuse(gateway_id, "undecodable", "Hello.gateway_id must be the routing id of its socket")
                return False
            return True
        if gateway_id not in self.last_heard_s:
            about = message.request_id if isinstance(message, Submit | Abort | Pause | Resume | Attach) else -1
            self.refuse(gateway_id, "hello_first", "say Hello first, and again after every silence", about)
            return False
        return True
