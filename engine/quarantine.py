"""Requests that may be what ends the engine: each runs alone until it has its first token.

Whoever computes beside a request that ends the engine is as suspect as that one. So after two such ends a gateway asks
for its suspects to run alone: what else lives stands aside, and what comes waits, until the suspect has a token, which
clears it, or has ended. If the engine ends once more, it is known who it was.

Where choices are ranked nobody gets a token before the end, and a new engine begins with none: such a suspect runs
alone until it has come further than at any of those ends.
"""

from collections import deque

from engine.sequence import Request


class Quarantine:
    """Who runs alone now, who comes next, and who came meanwhile and waits for the end of it."""

    def __init__(self) -> None:
        self._suspects: deque[Request] = deque()
        """The first has its turn."""
        self._waiting: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def excludes(self, request: Request) -> bool:
        """Whether it must stand aside for another now."""
        return bool(self._suspects) and request is not self._suspects[0]

    def take(self, request: Request, runs_alone: bool) -> bool:
        """A new request → whether it is a suspect whose turn has come."""
        if runs_alone:
            request.is_suspect = True
            self._suspects.append(request)
            return len(self._suspects) == 1
        if self._suspects:
            self._waiting.append(request)
        return False

    def take_back(self, request: Request) -> bool:
        """Its reader reads again → whether its turn ended before it was cleared: then it comes last, and has its turn
        once more."""
        if not request.is_suspect or request.is_finished or request in self._suspects:
            return False
        self._suspects.append(request)
        return True

    def turn(self) -> list[Request] | None:
        """The suspect that has its turn has a token, has ended, or stands aside for its reader → who may run now: the
        next one, or all that have waited. None while its turn goes on."""
        first = self._suspects[0]
        if not (_is_cleared(first) or first.is_finished or first.is_paused):
            return None
        self._suspects.popleft()
        first.is_suspect = not _is_cleared(first)
        while self._suspects and self._suspects[0].is_finished:
            self._suspects.popleft()
        if self._suspects:
            return [self._suspects[0]]
        waiting, self._waiting = self._waiting, []
        return waiting


def _is_cleared(request: Request) -> bool:
    if request.sampling.ranks_choices:
        return request.num_ranked_tokens > request.cleared_past
    return request.first_token_s > 0
