"""Tokens served to each tenant, so that whoever has had least goes first."""

from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Final

from engine.sequence import Sequence

_MAX_IDLE: Final = 4096
"""Idle tenants that are remembered; beyond it those with the fewest tokens are forgotten."""


class _Tenant:
    """One that has sequences that run or wait."""

    __slots__ = ("num_sequences", "num_served")

    def __init__(self, num_served: int) -> None:
        self.num_served = num_served
        self.num_sequences = 0


class FairShare:
    """Virtual token counters (Y. Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

    A token counts when it is computed, of a prompt or generated; not when its KV was found, nor again after a
    preemption. A tenant is active while a sequence of it runs or waits. One that was idle is lifted to the least
    counter of the active ones: it cannot save up. An idle one is remembered only while its counter is over that.
    Everything is O(log tenants), amortised.
    """

    def __init__(self) -> None:
        self._active: dict[str, _Tenant] = {}
        self._idle: dict[str, int] = {}
        self._by_served: list[tuple[int, int, _Tenant]] = []
        """A heap of the active ones by counters that may be old, and so too low."""
        self._idle_by_served: list[tuple[int, str]] = []
        self._ticket = count()

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._active) + len(self._idle)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def is_active(self, name: str) -> bool:
        return name in self._active

    def served(self, name: str) -> int:
        """The counter of an active tenant: tokens, of which only differences mean something."""
        return self._active[name].num_served

    def join(self, sequence: Sequence) -> None:
        """A sequence waits from now on, or comes back. Charge what runs before, so that the least counter is right."""
        name = sequence.request.tenant
        tenant = self._active.get(name)
        if tenant is None:
            tenant = _Tenant(max(self._idle.pop(name, 0), self._least()))
            self._active[name] = tenant
            if len(self._by_served) > 2 * len(self._active) + 64:
                self._by_served = [(t.num_served, next(self._ticket), t) for t in self._active.values()]
                heapify(self._by_served)
            else:
                heappush(self._by_served, (tenant.num_served, next(self._ticket), tenant))
        tenant.num_sequences += 1

    def leave(self, sequence: Sequence) -> None:
        """A sequence neither runs nor waits any more. If it ran it has been charged."""
        name = sequence.request.tenant
        tenant = self._active[name]
        tenant.num_sequences -= 1
        if tenant.num_sequences:
            return
        del self._active[name]
        self._idle[name] = tenant.num_served
        if len(self._idle_by_served) > 2 * len(self._idle) + 64:
            self._idle_by_served = [(num_served, idle) for idle, num_served in self._idle.items()]
            heapify(self._idle_by_served)
        else:
            heappush(self._idle_by_served, (tenant.num_served, name))
        self._forget()

    def charge(self, sequence: Sequence) -> None:
        """Count what has been computed of an active tenant's running sequence since it began or the last call."""
        num_tokens = sequence.num_computed - sequence.num_charged
        if num_tokens > 0:
            sequence.num_charged += num_tokens
            self._active[sequence.request.tenant].num_served += num_tokens

    def _least(self) -> int:
        """Of the active tenants' counters; 0 if there is none."""
        heap = self._by_served
        while heap:
            num_served, ticket, tenant = heap[0]
            if not tenant.num_sequences:
                heappop(heap)
            elif num_served == tenant.num_served:
                return num_served
            else:
                heapreplace(heap, (tenant.num_served, ticket, tenant))
        return 0

    def _forget(self) -> None:
        """Drop the idle tenants whose counters would be lifted anyway, and, when nobody is active, all."""
        heap, idle = self._idle_by_served, self._idle
        least = self._least()
        while heap and (heap[0][0] <= least or not self._active or len(idle) > _MAX_IDLE):
            num_served, name = heappop(heap)
            if idle.get(name) == num_served:
                del idle[name]
