"""Whether the engine makes progress: what its supervisor listens to, on a connection of its own.

The engine's loop says by heartbeat whether there is work and how long ago a step finished. It counts as hung when it
says nothing for too long, or when work waits and no step has finished within max(10 s, 5 x the predicted step). While
it loads, its heartbeats alone count. A step that is slow, but not beyond what was predicted, is never a hang. Nor is
time in which this side could not listen: a container that was frozen has both sides stand still.
"""

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Final

from streamkv.errors import WireDecodeError
from streamkv.protocol import WIRE_VERSION, Heartbeat, Hello, Ready, WireError, decode_from_engine, encode
from streamkv.transport import CurveKeys, GatewaySocket, new_gateway_id

SHORTEST_HANG_S: Final = 10.0
SLOWER_THAN_PREDICTED: Final = 5.0
UNPREDICTED_HANG_S: Final = 60.0
"""For a step whose time could not be predicted: the first of its kind, which may compile a kernel."""
FIRST_WORD_S: Final = 180.0
"""From the start of the process to its first word: it has to import PyTorch, perhaps from a slow disk."""
_LOOK_EVERY_S: Final = 0.5
_FEWEST_BEATS: Final = 3
_OVERSLEPT_S: Final = 3.0
"""So late is a look only if this process, too, could not run."""


class Progress:
    """What is known of one life of the engine."""

    def __init__(self, started_s: float, silence_s: float) -> None:
        """started_s: when its process started. silence_s: how long it may say nothing, once it has spoken."""
        self._heard_s = started_s
        self._watched_s = -inf
        """Since when this side has been listening without a gap."""
        self._silence_s = silence_s
        self._has_spoken = False
        self._beat: Heartbeat | None = None

    def hear(self, now_s: float, beat: Heartbeat | None = None) -> None:
        """It said something; `beat`: by this heartbeat."""
        self._heard_s = now_s
        self._has_spoken = True
        if beat is not None:
            self._beat = beat

    def overslept(self, now_s: float) -> None:
        """This side could not listen until now: silence, and the age of a step, count from here."""
        self._heard_s = self._watched_s = now_s

    def why_hung(self, now_s: float) -> str:
        """Empty while it makes progress, or may do so."""
        silent_s = now_s - self._heard_s
        if silent_s > (self._silence_s if self._has_spoken else FIRST_WORD_S):
            return f"it has said nothing for {silent_s:.0f} s"
        beat = self._beat
        if beat is None or not beat.has_work:
            return ""
        limit_s = UNPREDICTED_HANG_S
        if beat.expected_step_s > 0:
            limit_s = max(SHORTEST_HANG_S, SLOWER_THAN_PREDICTED * beat.expected_step_s)
        age_s = min(beat.step_age_s, now_s - self._watched_s)
        if age_s <= limit_s:
            return ""
        return f"work waits and no step has finished for {age_s:.0f} s; predicted were {beat.expected_step_s:.2g} s"


class EngineWatch:
    """Listens to the engine at one endpoint."""

    def __init__(
        self,
        endpoint: str,
        keys: CurveKeys | None,
        *,
        heartbeat_s: float = 1.0,
        silence_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """heartbeat_s: how often each side says that it lives. silence_s: as in Progress; three heartbeats at least."""
        self._endpoint = endpoint
        self._keys = keys
        self._heartbeat_s = heartbeat_s
        self._silence_s = max(silence_s, _FEWEST_BEATS * heartbeat_s)
        self._clock = clock

    async def until_hung(self, on_ready: Callable[[], None]) -> str:
        """Watch one life of the engine, from the start of its process: returns why it counts as hung, if it does.

        on_ready: called when it takes work. Ends by cancellation when the process has ended.
        """
        gateway_id = new_gateway_id()
        progress = Progress(self._clock(), self._silence_s)

        def take(frame: bytes) -> None:
            try:
                message = decode_from_engine(frame)
            except WireDecodeError:
                return  # another version: the gateways say so
            progress.hear(self._clock(), message if isinstance(message, Heartbeat) else None)
            if isinstance(message, Ready):
                on_ready()
            elif isinstance(message, WireError) and message.code == "hello_first":
                greet()  # it took this side for dead, and would send no more heartbeats

        def greet() -> None:
            socket.send(encode(Hello(WIRE_VERSION, gateway_id)))

        socket = GatewaySocket(
            self._endpoint,
            gateway_id,
            on_frame=take,
            on_connected=greet,
            on_disconnected=lambda: None,
            keys=self._keys,
        )
        try:
            socket.connect()
            speak_again_s = 0.0
            while not (reason := progress.why_hung(self._clock())):
                if self._clock() >= speak_again_s:
                    speak_again_s = self._clock() + self._heartbeat_s
                    socket.send(encode(Heartbeat(0)))
                late_s = self._clock() + min(_LOOK_EVERY_S, self._heartbeat_s) + _OVERSLEPT_S
                await asyncio.sleep(min(_LOOK_EVERY_S, self._heartbeat_s))
                if self._clock() > late_s:
                    progress.overslept(self._clock())
            return reason
        finally:
            socket.close()
