"""A flood of requests comes in a few at a time: between them the loop hands out what live streams have got."""

import asyncio
from collections import deque
from typing import Final

_PER_TURN: Final = 8
"""Of the loop; some 5 ms."""


class Turnstile:
    """Lets so many through in each turn of the loop, in the order in which they came. At once while there are fewer."""

    def __init__(self, per_turn: int = _PER_TURN) -> None:
        self._per_turn = per_turn
        self._num_through = 0
        """In this turn."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if self._num_through == 0:
            loop.call_soon(self._turn)
        if self._num_through < self._per_turn:
            self._num_through += 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place  # who is cancelled leaves it behind, and it is passed over

    def _turn(self) -> None:
        """Another turn has begun, in which the loop has looked for what came in."""
        self._num_through = 0
        while self._waiting and self._num_through < self._per_turn:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._num_through += 1
        if self._num_through:
            asyncio.get_running_loop().call_soon(self._turn)
