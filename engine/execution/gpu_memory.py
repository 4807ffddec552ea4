"""How many KV blocks fit on a GPU, beside weights, steps, graphs and whoever else uses the card."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from engine.execution.kv_cache import GIB, PoolSize, fit_pool, most_blocks, rounded_up
from engine.models.config import ModelConfig
from streamkv.config import EngineConfig
from streamkv.errors import ConfigError
from streamkv.log import fields

_RESERVE_SHARE: Final = 100
"""A 100th of the card stays free, whatever is asked for: for what is loaded late (code, libraries' workspaces)."""
_MOST_CONTEXT_BYTES: Final = 768 * 2**20
"""More than CUDA's context takes of any card, with what the driver keeps for it: about 0.5 GiB on an H200."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CardBytes:
    """A card as its driver sees it."""

    total_bytes: int
    free_bytes: int
    """What other processes have is not in it."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What was measured of a card before the pool is allocated. All in bytes."""

    total_bytes: int
    free_bytes: int
    """As in CardBytes, with all on the card that stays there but pool and graphs."""
    own_bytes: int
    """What this process has of it by now: CUDA's context, weights, buffers, tables."""
    step_bytes: int
    """Needed beside them while the largest step is computed."""
    graph_bytes: int
    """Needed for all CUDA graphs, those that are captured later, too."""
    late_bytes: int = 0
    """Needed for what is allocated behind the pool."""

    @property
    def needed_bytes(self) -> int:
        """Of what is free, beside the pool."""
        return self.step_bytes + self.graph_bytes + self.late_bytes


def card_bytes(device: torch.device) -> CardBytes:
    """Once PyTorch has given back what it keeps for later. Waits for the device."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return CardBytes(total_bytes, free_bytes)


def measured_memory(
    before: CardBytes, now: CardBytes, reserved_bytes: int, step_bytes: int, graph_bytes: int, late_bytes: int
) -> GpuMemory:
    """before: as the process began. reserved_bytes: what PyTorch has of the card now. The others as GpuMemory says.

    CUDA tells what is free to no one without a context, and so never without that context: what it takes is in neither
    difference. Of a card that was empty all that was taken is that; of one that others use it is taken for as large as
    it may be. What others have left or taken meanwhile cannot be told from ours, but ours is at least reserved_bytes.
    """
    context_bytes = min(before.total_bytes - before.free_bytes, _MOST_CONTEXT_BYTES)
    own_bytes = context_bytes + max(before.free_bytes - now.free_bytes, reserved_bytes)
    return GpuMemory(now.total_bytes, now.free_bytes, own_bytes, step_bytes, graph_bytes, late_bytes)


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """How much more than before PyTorch holds of the card while `run` runs, fragments and all. Given back after it.

    run: the largest steps, whose results may go. Raises ConfigError if even that does not fit.
    """
    card = card_bytes(device)
    before_bytes = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "max_num_batched_tokens",
            f"a step of so many tokens does not fit on this GPU of {card.total_bytes / GIB:.3g} GiB beside "
            f"{before_bytes / GIB:.3g} GiB of weights and buffers; lower it or max_num_seqs, or use quantization fp8",
        ) from error
    needed_bytes = torch.cuda.max_memory_reserved(device) - before_bytes
    card_bytes(device)
    return needed_bytes


def size_gpu_pool(config: EngineConfig, model: ModelConfig, block_bytes: int, memory: GpuMemory) -> PoolSize:
    """How many blocks fit, and the longest sequence that they hold.

    The engine takes gpu_memory_utilization of the whole card: what comes off for weights, steps and graphs leaves the
    pool. Where other processes leave less, it takes less, and says so. The length is settled as fit_pool does; raises
    ConfigError when not one full sequence fits.
    """
    if config.kv_cache_memory_gib != EngineConfig().kv_cache_memory_gib:
        logger.warning(
            "kv_cache_memory_gib is for a CPU: on a GPU gpu_memory_utilization says how much the engine takes",
            extra=fields(gpu_memory_utilization=config.gpu_memory_utilization),
        )
    own_bytes, needed_bytes = memory.own_bytes, memory.needed_bytes
    logger.info(
        "what the KV pool is sized beside",
        extra=fields(
            total_gib=memory.total_bytes / GIB,
            free_gib=memory.free_bytes / GIB,
            own_gib=own_bytes / GIB,
            step_gib=memory.step_bytes / GIB,
            graphs_gib=memory.graph_bytes / GIB,
            late_gib=memory.late_bytes / GIB,
        ),
    )
    wished_bytes = int(config.gpu_memory_utilization * memory.total_bytes) - own_bytes - needed_bytes
    room_bytes = memory.free_bytes - needed_bytes - memory.total_bytes // _RESERVE_SHARE
    wished_bytes = min(wished_bytes, most_blocks(config, model) * block_bytes)
    if room_bytes < wished_bytes:
        logger.warning(
            "less KV memory than gpu_memory_utilization asks for: the GPU has no more free",
            extra=fields(
                asked_gib=wished_bytes / GIB,
                taken_gib=max(0, room_bytes) / GIB,
                others_gib=(memory.total_bytes - memory.free_bytes - own_bytes) / GIB,
                total_gib=memory.total_bytes / GIB,
            ),
        )

    def way_to(num_bytes: int) -> str:
        if num_bytes <= room_bytes:
            share = (num_bytes + own_bytes + needed_bytes) / memory.total_bytes
            return f"raise gpu_memory_utilization to {rounded_up(share)}"
        return (
            f"make room for {rounded_up((num_bytes - room_bytes) / GIB)} GiB: lower max_num_batched_tokens, use "
            "kv_cache_dtype fp8 or quantization fp8, or end what else runs on this GPU"
        )

    budget_bytes = min(wished_bytes, room_bytes)
    return fit_pool(config, model, block_bytes, budget_bytes, "gpu_memory_utilization", way_to)
