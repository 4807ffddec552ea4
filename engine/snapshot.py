"""What every block and sequence is doing at this moment, for whoever watches.

Made only when it is asked for, and at most four times a second, however many ask: at 60,000 owned blocks one costs the
loop 1 to 7 ms.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from engine import figures
from engine.kv.block_manager import BlockManager
from engine.kv.block_states import block_states
from engine.plan import StepPlan
from engine.publisher import Publisher
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import EngineStats
from streamkv.protocol import SequenceSnapshot, Snapshot, StepRecord, pack_ids

MIN_PERIOD_S: Final = 0.25
MAX_SHOWN_BLOCKS: Final = 1 << 18
"""A larger pool is told of in figures only, and so are tables that together have more entries than this."""


def record_of(plan: StepPlan, ended_s: float, step_s: float) -> StepRecord:
    """What a step that was just collected computed."""
    load = plan.load
    num_preempted = len(plan.preempted_sequence_ids)
    return StepRecord(
        plan.step, ended_s, step_s, load.num_prefill_tokens, load.num_prefills, load.num_decodes, num_preempted
    )


class Snapshots:
    """Answers GetSnapshot. Belongs to the loop's thread."""

    def __init__(
        self,
        stats: EngineStats,
        scheduler: Scheduler,
        blocks: BlockManager,
        publisher: Publisher,
        clock: Callable[[], float],
    ) -> None:
        self._stats = stats
        self._scheduler = scheduler
        self._blocks = blocks
        self._publisher = publisher
        self._clock = clock
        self._newest: Snapshot | None = None

    def answer(self, query_id: int) -> Snapshot:
        """A snapshot that is not older than MIN_PERIOD_S. O(pool + entries of the block tables) when it is made."""
        now_s = self._clock()
        if self._newest is None or now_s >= self._newest.time_s + MIN_PERIOD_S:
            self._newest = self._take(now_s)
        return msgspec.structs.replace(self._newest, query_id=query_id)

    def _take(self, now_s: float) -> Snapshot:
        stats, scheduler, blocks = self._stats, self._scheduler, self._blocks
        left = MAX_SHOWN_BLOCKS if blocks.pool.num_blocks <= MAX_SHOWN_BLOCKS else 0
        sequences = []
        for sequence in sorted(blocks.holders, key=_by_age):
            is_shown = len(sequence.block_table) <= left
            left -= len(sequence.block_table) if is_shown else 0
            sequences.append(_seen(sequence, is_shown))
        tallies = {"queue": stats.queue, "first_token": stats.first_token, "e2e": stats.e2e}
        return Snapshot(
            query_id=0,
            time_s=now_s,
            block_states=bytes(block_states(blocks)) if blocks.pool.num_blocks <= MAX_SHOWN_BLOCKS else b"",
            sequences=sequences,
            steps=list(stats.steps),
            gauges={
                "num_running_sequences": scheduler.num_running,
                "num_waiting_sequences": scheduler.num_waiting,
                "num_paused_sequences": scheduler.num_paused,
                "num_live_streams": self._publisher.num_live,
                "num_free_blocks": blocks.num_free_blocks,
                "num_cached_blocks": blocks.num_cached_blocks,
                "num_allocated_blocks": blocks.num_owned_blocks,
                "num_in_transfer_blocks": blocks.num_in_transfer_blocks,
                "num_host_blocks": blocks.tiers.host.num_blocks if blocks.tiers else 0,
                "num_used_host_blocks": blocks.num_host_blocks,
                "num_disk_blocks": blocks.tiers.num_disk_blocks if blocks.tiers else 0,
                "num_used_disk_blocks": blocks.num_disk_blocks,
                "num_running_transfers": scheduler.num_transfers,
                "tokens_per_second": stats.generated.per_second(now_s),
            },
            counters=figures.counters(stats, scheduler, blocks, self._publisher),
            quantiles={name: found for name, tally in tallies.items() if (found := tally.quantiles())},
        )


def _by_age(sequence: Sequence) -> int:
    return sequence.sequence_id


def _seen(sequence: Sequence, with_table: bool) -> SequenceSnapshot:
    return SequenceSnapshot(
        sequence_id=sequence.sequence_id,
        state=sequence.state.name.lower(),
        num_prompt=sequence.num_prompt,
        num_tokens=sequence.num_tokens,
        num_computed=sequence.num_computed,
        num_cached_tokens=sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions,
        block_table=pack_ids(sequence.block_table) if with_table else b"",
    )
