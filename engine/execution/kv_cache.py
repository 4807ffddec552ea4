"""The tensors behind the KV blocks, and how many blocks fit."""

import logging
from dataclasses import dataclass

import torch

from engine.models.config import ModelConfig
from streamkv.config import EngineConfig
from streamkv.errors import ConfigError
from streamkv.log import fields

GIB = 2**30

CACHE_DTYPE = torch.float32
"""Whatever the weights' dtype: attention on a CPU computes in float32, and converting a narrower cache at every step
costs more than reading a wider one. So a token takes twice the memory that a bfloat16 cache would take."""

_AVAILABLE_SHARE = 0.9
"""Of the memory that this process could still have, the most that the pool takes."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What fits, decided before anything is allocated."""

    num_blocks: int
    """Block 0, which is never handed out, included."""
    max_model_len: int


def bytes_per_block(model: ModelConfig, block_size: int) -> int:
    """Keys and values of block_size tokens in all layers."""
    return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_dim * CACHE_DTYPE.itemsize


def size_pool(config: EngineConfig, model: ModelConfig, available_bytes: int | None) -> PoolSize:
    """How many blocks kv_cache_memory_gib buys, and the longest sequence that they hold.

    available_bytes: memory that this process could still have; None: unknown. A wish over it is cut, and logged.
    A limit that comes from the model is lowered to what fits, and logged; one that the user has set is not touched.
    Raises ConfigError when not one sequence of max_model_len tokens fits, and says which length would.
    """
    model_limit = model.max_position_embeddings
    if config.max_model_len > model_limit:
        raise ConfigError(
            "max_model_len", f"is {config.max_model_len}, but the model has {model_limit} positions; use at most that"
        )
    block_bytes = bytes_per_block(model, config.block_size)
    budget_bytes = int(config.kv_cache_memory_gib * GIB)
    if available_bytes is not None and budget_bytes > available_bytes * _AVAILABLE_SHARE:
        budget_bytes = int(available_bytes * _AVAILABLE_SHARE)
        logger.warning(
            "less KV memory than asked for: the machine, or the limit on this process, has no more",
            extra=fields(asked_gib=config.kv_cache_memory_gib, taken_gib=budget_bytes / GIB),
        )
    wanted_len = config.max_model_len or model_limit
    blocks_per_sequence = -(-wanted_len // config.block_size)
    # More than every sequence at its longest can never be used.
    num_blocks = min(budget_bytes // block_bytes, config.max_num_seqs * blocks_per_sequence + 1)
    fitting_len = (num_blocks - 1) * config.block_size
    if fitting_len >= wanted_len:
        return PoolSize(num_blocks, wanted_len)
    needed_gib = (blocks_per_sequence + 1) * block_bytes / GIB
    if fitting_len < 2:
        # A prompt of one token and one more: the least that can be served.
        raise ConfigError(
            "kv_cache_memory_gib",
            f"{budget_bytes / GIB:.3g} GiB hold no sequence at all; {2 * block_bytes / GIB:.3g} hold one of "
            f"{config.block_size} tokens, {needed_gib:.3g} one of {wanted_len}",
        )
    if config.max_model_len:
        raise ConfigError(
            "max_model_len",
            f"{wanted_len} tokens do not fit into {budget_bytes / GIB:.3g} GiB of KV memory; {fitting_len} do. "
            f"Lower max_model_len to that or raise kv_cache_memory_gib to {needed_gib:.3g}",
        )
    logger.warning(
        "sequences are shorter than the model allows: the KV memory holds no more",
        extra=fields(
            max_model_len=fitting_len, model_limit=model_limit, kv_cache_memory_gib=needed_gib, hint="would hold it all"
        ),
    )
    return PoolSize(num_blocks, fitting_len)


def size_host(config: EngineConfig, block_bytes: int, pool_bytes: int, available_bytes: int | None) -> int:
    """How many blocks host_kv_memory_gib buys below the pool; 0 where it is 0.

    pool_bytes: what the pool will take of available_bytes, of which a block takes its part only once it is written.
    A wish over what is left is cut, and logged. Raises ConfigError when not one block fits.
    """
    wanted_bytes = budget_bytes = int(config.host_kv_memory_gib * GIB)
    if not wanted_bytes:
        return 0
    if available_bytes is not None:
        budget_bytes = min(wanted_bytes, max(0, int(available_bytes * _AVAILABLE_SHARE) - pool_bytes))
    # Row 0 is left out, as block 0 is on the device.
    num_blocks = budget_bytes // block_bytes - 1
    if num_blocks < 1:
        left = "" if budget_bytes == wanted_bytes else ", which is all that the machine has beside the KV pool,"
        raise ConfigError(
            "host_kv_memory_gib",
            f"{budget_bytes / GIB:.3g} GiB{left} hold no block; {2 * block_bytes / GIB:.3g} hold one, 0 is for none",
        )
    if budget_bytes < wanted_bytes:
        logger.warning(
            "less host memory for KV blocks than asked for: the machine, or the limit on this process, has no more",
            extra=fields(asked_gib=config.host_kv_memory_gib, taken_gib=budget_bytes / GIB),
        )
    return num_blocks


class KvCache:
    """One pair of key and value tensors a layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, model: ModelConfig, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        shape = (model.num_layers, 2, num_blocks, block_size, model.num_kv_heads, model.head_dim)
        # Zeros come from the system untouched, so that a block takes memory only once it is written.
        self.storage = torch.zeros(shape, dtype=CACHE_DTYPE)
        """All of it, in one piece, so that one strided copy moves a block: [num_layers, keys and values, ...]."""
        self.layers = [(layer[0], layer[1]) for layer in self.storage]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer: (source, destination). No destination is also a source."""
        if not pairs:
            return
        source = torch.tensor([pair[0] for pair in pairs])
        destination = torch.tensor([pair[1] for pair in pairs])
        for keys, values in self.layers:
            keys.index_copy_(0, destination, keys.index_select(0, source))
            values.index_copy_(0, destination, values.index_select(0, source))
