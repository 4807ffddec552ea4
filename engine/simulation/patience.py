"""Nobody starves: the bound that the waiting queue states, watched from outside."""

from collections.abc import Callable, Iterable
from typing import Final

from engine.sequence import Sequence, SequenceState

_TOLERANCE_S: Final = 1e-6


class Starvation(AssertionError):
    """Somebody waited while those that came too late to go first were served."""


class Patience:
    """Watches who begins to run while others of its tenant wait.

    The order of service, within a tenant: by priority, less one for every ageing_s in the queue, then by deadline, then
    by arrival. So only so many can go before a sequence: nothing that joins (priority - highest priority + 1) *
    ageing_s after it does.

    Who may be passed over all the same. A sequence waits for a block that is on its way up for another, and how long
    that takes is the disk's affair. It waits for another that computes the same prompt, for its own newest token, or
    for a place among the partial prefills. Each of these ends when somebody else's prefill does, and that takes at
    most as many steps as a sequence has tokens, for each time that it is preempted; and then it may be another
    tenant's turn. So the steps in which only such begin that came too late to go first, from the first of them to the
    last, are bounded by a number that grows with the tenants, not with the load: `max_steps`.

    Sequences that hold blocks are out of it, from the moment at which they are fetched: nobody else has any use of
    these before they have run.
    """

    def __init__(
        self, ageing_s: float, max_steps: int, awaits_transfer: Callable[[Sequence], bool] = lambda sequence: False
    ) -> None:
        self._ageing_s = ageing_s
        self._max_steps = max_steps
        self._awaits_transfer = awaits_transfer
        self._joined_s: dict[Sequence, float] = {}
        """Who waits, and since when it is in the queue."""
        self._num_preemptions: dict[Sequence, int] = {}
        """Of those who wait: whoever runs and is preempted within a turn has joined anew."""
        self._idle: set[Sequence] = set()
        """Those of them that hold nothing and whose tokens are all known."""
        self._passed_in_step: dict[Sequence, int] = {}
        """Who has been passed over against the order, and in which step for the first time."""
        self.longest_steps = 0
        """Over which somebody was passed over."""

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """They leave the queue, and may come back in the same turn."""
        for sequence in sequences:
            self._joined_s.pop(sequence, None)
            self._idle.discard(sequence)

    def look(self, sequences: Iterable[Sequence], step: int, now_s: float) -> None:
        """After each turn, with every sequence that lives. Raises Starvation."""
        joined_s = self._joined_s
        waiting: dict[Sequence, float] = {}
        idle: set[Sequence] = set()
        begun: list[tuple[Sequence, float]] = []
        for sequence in sequences:
            if sequence.state is SequenceState.WAITING:
                has_run = self._num_preemptions.get(sequence) != sequence.num_preemptions
                waiting[sequence] = now_s if has_run else joined_s.get(sequence, now_s)
                if not sequence.block_table and not sequence.num_pending:
                    idle.add(sequence)
            if sequence in self._idle and (sequence.is_fetching or sequence.state is SequenceState.RUNNING):
                begun.append((sequence, joined_s[sequence]))
        if begun and idle:
            for sequence in idle:
                before = self._order(sequence, waiting[sequence], now_s - _TOLERANCE_S)
                others = [other for other, _ in begun if other.request.tenant == sequence.request.tenant]
                late = [
                    other
                    for other, joined in begun
                    if other.request.tenant == sequence.request.tenant
                    and self._order(other, joined, now_s + _TOLERANCE_S) > before
                ]
                if len(late) < len(others):
                    self._passed_in_step.pop(sequence, None)
                elif late:
                    self._pass(sequence, late[0], step)
        if self._passed_in_step:
            self._passed_in_step = {s: first for s, first in self._passed_in_step.items() if s in idle}
        self._joined_s = waiting
        self._num_preemptions = {sequence: sequence.num_preemptions for sequence in waiting}
        self._idle = idle

    def _order(self, sequence: Sequence, joined_s: float, now_s: float) -> tuple[int, float, float, int]:
        """Who stands first: level, deadline, arrival."""
        request = sequence.request
        num_risen = max(0, int((now_s - joined_s) / self._ageing_s))
        return request.priority - num_risen, request.deadline_at_s, request.arrival_s, sequence.sequence_id

    def _pass(self, sequence: Sequence, other: Sequence, step: int) -> None:
        num_steps = step - self._passed_in_step.setdefault(sequence, step)
        self.longest_steps = max(self.longest_steps, num_steps)
        if num_steps > self._max_steps and self._awaits_transfer(sequence):
            del self._passed_in_step[sequence]
        elif num_steps > self._max_steps:
            who = f"sequence {sequence.sequence_id}, priority {sequence.request.priority},"
            by_whom = f"sequence {other.sequence_id}, priority {other.request.priority}"
            raise Starvation(f"{who} waits and has been passed over for {num_steps} steps, now by {by_whom}")
