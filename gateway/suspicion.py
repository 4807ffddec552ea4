"""Whether a request is what ends the engine: what is known of that after each end at which it was being computed.

What ends an engine deterministically ends it at the same place every time. A place is a number of generated tokens. Of
most requests each token is handed out and clears them. Ranked choices (best_of over n, beam search) hand out none
before their end and begin anew in each engine, so one that outlasts several engines is in flight at nearly every end,
and what counts is where: at the furthest place that they were ever found at, or not.
"""

from typing import Final

import msgspec

MAX_ENGINE_DEATHS: Final = 3
"""A request that the engine was computing at so many of its ends, and that came no further between them, is failed: it
is what ends it. Before the last of them it is run alone."""
MAX_FURTHER_DEATHS: Final = 3
"""Ends at other places had another cause, so those at this place may have had it, too: the more ends at random there
are, the more of them fall together. For each there must be one more at this place, up to so many."""
MAX_OTHER_DEATHS: Final = 64
"""With so many ends at other places every further one counts, wherever it is: else a request that ends engines now
here, now there would do so for ever. Twenty ends at random are far from that, and who meets 64 has next to no hope of
an end of its own."""
_STEPS_IN_FLIGHT: Final = 2
"""The record of an end may be of any of them, so a place is known to within one token."""


class Suspicion(msgspec.Struct, array_like=True, frozen=True):
    """Of one request. Part of its gateway_state, so it may only grow at its end, with defaults."""

    num_deaths: int = 0
    """Ends of the engine at its furthest place."""
    furthest: int = -1
    """The most tokens that it had at any end."""
    num_other_deaths: int = 0
    """Ends at other places."""
    lets_others_run: bool = False
    """The last end was another's, while it ran alone: in the next life it doesn't, so that the others get one."""

    @property
    def is_guilty(self) -> bool:
        return self.num_deaths >= self._max_deaths

    @property
    def runs_alone(self) -> bool:
        """In the next life of the engine, until it has a token or, of ranked choices, more than `cleared_past`."""
        return self.num_deaths == self._max_deaths - 1 and not self.lets_others_run

    @property
    def cleared_past(self) -> int:
        """Tokens. The last record may have been one step behind, and in company that step would be everybody's."""
        return self.furthest + _STEPS_IN_FLIGHT - 1

    @property
    def _max_deaths(self) -> int:
        return MAX_ENGINE_DEATHS + min(self.num_other_deaths, MAX_FURTHER_DEATHS)

    def after_death(self, num_tokens: int) -> "Suspicion":
        """The engine has ended while it computed the token after this many; it ran alone if it was to."""
        if num_tokens > self.furthest:  # what was at the old place did not hold it up
            is_other = num_tokens >= self.furthest + _STEPS_IN_FLIGHT
            return Suspicion(1, num_tokens, self.num_other_deaths + (self.num_deaths if is_other else 0))
        # Between no token and one lies the whole prompt, and not a step or two.
        nearest = max(self.furthest - _STEPS_IN_FLIGHT + 1, min(self.furthest, 1))
        if num_tokens < nearest and self.num_other_deaths < MAX_OTHER_DEATHS:
            return msgspec.structs.replace(
                self, num_other_deaths=self.num_other_deaths + 1, lets_others_run=self.runs_alone
            )
        # Whoever went along with it has been at the same places. Only alone is it known who it was.
        is_last = self.num_deaths == self._max_deaths - 1
        num_deaths = self.num_deaths + (self.runs_alone or not is_last)
        return Suspicion(num_deaths, self.furthest, self.num_other_deaths)


UNSUSPECTED: Final = Suspicion()
