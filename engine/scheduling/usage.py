"""What the scheduler counts, and how full KV memory is."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from engine.kv.block_manager import BlockManager
from engine.transfer import TransferKind

PreemptionKind = Literal["recompute", "swap"]


@dataclass(slots=True)
class Counts:
    """Over the scheduler's life."""

    preemptions: Counter[PreemptionKind] = field(default_factory=Counter)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Tokens computed again after a preemption; prefill tokens, too."""
    num_wasted_tokens: int = 0
    """Tokens sampled for a sequence that had ended."""
    num_unreturned_tokens: int = 0
    """Tokens generated for requests that rank their choices, and not returned."""
    num_prompt_tokens: int = 0
    """Of requests that have begun to run."""
    num_prefix_hit_tokens: int = 0
    """Of these, tokens that were found in the prefix tree when the request began to run, on whatever tier."""
    num_transfers: Counter[TransferKind] = field(default_factory=Counter)
    """Finished ones."""
    num_transfer_bytes: Counter[TransferKind] = field(default_factory=Counter)

    @property
    def num_preemptions(self) -> int:
        return self.preemptions.total()


@dataclass(frozen=True, slots=True)
class KVUsage:
    """KV memory at one moment."""

    num_owned_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """In the prefix tree, without an owner."""
    num_in_transfer_blocks: int
    """On their way between the device and host memory. These four are all blocks that can be handed out."""
    num_computed_tokens: int
    """Tokens in owned blocks, those of a shared block once."""
    utilization: float
    """Computed tokens over the slots of owned blocks; 1 when none is owned."""


def measure(blocks: BlockManager) -> KVUsage:
    """O(blocks owned)."""
    num_owned, num_tokens = blocks.num_owned_blocks, blocks.num_computed_tokens()
    return KVUsage(
        num_owned_blocks=num_owned,
        num_free_blocks=blocks.num_free_blocks,
        num_cached_blocks=blocks.num_cached_blocks,
        num_in_transfer_blocks=blocks.num_in_transfer_blocks,
        num_computed_tokens=num_tokens,
        utilization=num_tokens / (num_owned * blocks.block_size) if num_owned else 1.0,
    )
