"""Blocks between device, host memory and disk: whether it is worth it, and what has been moved."""

from collections.abc import Iterable
from typing import Final

from engine.kv.block_manager import BlockManager, Match
from engine.scheduling.latency import LatencyModel
from engine.scheduling.usage import Counts
from engine.sequence import Sequence
from engine.transfer import Transfer, TransferKind, TransferResult
from streamkv.config import PreemptionMode

_DISK_MEMORY: Final = 0.9
"""What is left of a measurement's weight after the next one."""
_DISK_HOPE: Final = 0.99
"""Each time that the disk is not read for being slow it counts as faster by so much, since only reading it tells
whether it still is."""


class Transfers:
    """Chooses between copying and computing by what each costs, and keeps account of the running transfers."""

    def __init__(
        self, mode: PreemptionMode, blocks: BlockManager, counts: Counts, latency: LatencyModel | None = None
    ) -> None:
        """Without a latency model nothing is copied for being cheaper: only `swap` copies then."""
        self._mode = mode
        self._blocks = blocks
        self._counts = counts
        self._latency = latency
        self._running: dict[int, Transfer] = {}
        self._disk_s = 0.0
        self._disk_blocks = 0.0
        """Blocks read from disk, and how long it took; the newest count most."""

    @property
    def num_running(self) -> int:
        """Transfers that were taken and whose result has not come."""
        return len(self._running)

    def swaps(self, sequence: Sequence) -> bool:
        """Whether a sequence that loses its blocks is to find them in host memory when it comes back."""
        if not self._blocks.has_tiers or self._mode == "recompute":
            return False
        if self._mode == "swap":
            return True
        if self._latency is None:
            return False
        copying_s = 2 * self._latency.transfer_s(len(sequence.block_table))
        return copying_s < self._latency.recompute_s(sequence.num_computed)

    def fetches(self, sequence: Sequence, match: Match) -> bool:
        """Whether what lower tiers hold of a waiting sequence is to be copied up rather than computed."""
        if not match.num_offloaded_tokens:
            return False
        if self._mode == "swap":
            return True
        if self._latency is None or (self._mode == "recompute" and sequence.num_preemptions):
            return False
        end = match.num_tokens + match.num_offloaded_tokens
        saved_s = self._latency.recompute_s(end) - self._latency.recompute_s(match.num_tokens)
        saved_s -= self._latency.transfer_s(match.num_offloaded_blocks)
        if saved_s <= 0 or not (match.num_disk_blocks and self._disk_blocks):
            return saved_s > 0
        is_cheaper = match.num_disk_blocks * self._disk_s / self._disk_blocks < saved_s
        if not is_cheaper:
            self._disk_s *= _DISK_HOPE
        return is_cheaper

    def take(self) -> list[Transfer]:
        """What the executor is to start now."""
        transfers = self._blocks.take_transfers()
        for transfer in transfers:
            self._running[transfer.transfer_id] = transfer
        return transfers

    def finish(self, results: Iterable[TransferResult]) -> list[Sequence]:
        """Take in what has finished. Returns the sequences whose fetch is over."""
        fetched: list[Sequence] = []
        for result in results:
            self._count(self._running.pop(result.transfer_id), result)
            fetched += self._blocks.finish_transfer(result)
        return fetched

    def _count(self, transfer: Transfer, result: TransferResult) -> None:
        kind, counts = transfer.kind, self._counts
        counts.num_transfers[kind] += 1
        counts.num_transfer_bytes[kind] += result.num_bytes
        if kind is TransferKind.DISK_TO_HOST:
            self._disk_s = self._disk_s * _DISK_MEMORY + result.elapsed_s
            self._disk_blocks = self._disk_blocks * _DISK_MEMORY + len(transfer.stored)
        elif kind in (TransferKind.DEVICE_TO_HOST, TransferKind.HOST_TO_DEVICE) and self._latency is not None:
            self._latency.observe_transfer(result.num_bytes, result.elapsed_s)
