"""What comes in is taken in for so long in one go, and no longer, whatever it is."""

import contextlib
from collections.abc import Callable

import pytest

from engine.inbox import MAX_MESSAGES_PER_TURN, Inbox
from engine.stats import EngineStats
from streamkv.protocol import WIRE_VERSION, GatewayMessage, Heartbeat, Hello, encode
from streamkv.transport import EngineSocket
from tests.support.scripted_engine import free_endpoint

GATEWAY = b"g" * 16
FRAMES: dict[str, Callable[[], bytes]] = {
    "good": lambda: encode(Heartbeat(0)),
    "undecodable": lambda: b"\xc1" * 40,
    "of another version": lambda: encode(Hello(WIRE_VERSION + 1, GATEWAY)),
    "of a stranger": lambda: encode(Heartbeat(0)),
}


class Flooded(EngineSocket):
    """A socket at which there is always one more frame, and on which each takes its time."""

    def __init__(self, endpoint: str, make_frame: Callable[[], bytes], gateway_id: bytes, frame_s: float) -> None:
        super().__init__(endpoint)
        self.now_s = 100.0
        self.num_received = 0
        self._make_frame, self._gateway_id, self._frame_s = make_frame, gateway_id, frame_s

    def receive(self) -> tuple[bytes, bytes] | None:
        self.num_received += 1
        self.now_s += self._frame_s
        return self._gateway_id, self._make_frame()


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize(("frame_s", "num_frames"), [(0.0, MAX_MESSAGES_PER_TURN), (0.0007, 5), (1.0, 1)])
def test_a_flood_of_frames_holds_up_a_step_by_three_milliseconds_be_they_good_or_bad(
    kind: str, frame_s: float, num_frames: int
) -> None:
    gateway_id = b"s" * 16 if kind == "of a stranger" else GATEWAY
    with (
        free_endpoint() as endpoint,
        contextlib.closing(Flooded(endpoint, FRAMES[kind], gateway_id, frame_s)) as socket,
    ):
        inbox = Inbox(socket, EngineStats(), lambda: socket.now_s)
        inbox.last_heard_s[GATEWAY] = 0.0
        received: list[tuple[bytes, GatewayMessage]] = list(inbox.receive())
        assert socket.num_received == num_frames and inbox.has_more
        assert len(received) == (socket.num_received if kind == "good" else 0)
