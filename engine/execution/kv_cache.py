"""The tensors behind the KV blocks, and how many blocks fit."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.models.config import ModelConfig
from streamkv.config import EngineConfig, KvCacheDtype
from streamkv.errors import ConfigError
from streamkv.log import fields

if TYPE_CHECKING:
    from engine.execution.block_copies import DeviceBlockCopies

GIB = 2**30
CPU = torch.device("cpu")

CACHE_DTYPE = torch.float32
"""On a CPU, whatever the weights' dtype: attention computes in float32 there, and converting a narrower cache at every
step costs more than reading a wider one. So a token takes twice the memory that a bfloat16 cache would take."""

_ALIGNMENT = 16
"""Bytes at whose multiples the keys, the values and the scales of each layer begin: kernels read wider there, and have
another form where that does not hold. So the form is one for all layers and pools."""

_AVAILABLE_SHARE = 0.9
"""Of the memory that this process could still have, the most that the pool takes."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What fits, decided before anything is allocated."""

    num_blocks: int
    """Block 0, which is never handed out, included."""
    max_model_len: int


def resolve_cache_dtype(name: KvCacheDtype, weights_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What `--kv-cache-dtype` means. Raises ConfigError for fp8 on a CPU."""
    if device.type == "cpu":
        if name == "fp8":
            raise ConfigError("kv_cache_dtype", "fp8 needs a GPU; a CPU's cache is float32, use auto")
        return CACHE_DTYPE
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    if name == "fp8" and has_gpu and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError("kv_cache_dtype", "fp8 needs a GPU of compute capability 8.9 or more; use auto")
    return torch.float8_e4m3fn if name == "fp8" else weights_dtype


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype = CACHE_DTYPE) -> int:
    """Keys and values of block_size tokens in all layers."""
    return 2 * model.num_layers * block_size * model.num_kv_heads * model.head_dim * dtype.itemsize


def size_pool(config: EngineConfig, model: ModelConfig, available_bytes: int | None) -> PoolSize:
    """How many blocks kv_cache_memory_gib buys on a CPU, and the longest sequence that they hold.

    available_bytes: memory that this process could still have; None: unknown. A wish over it is cut, and logged.
    Else as fit_pool.
    """
    budget_bytes = int(config.kv_cache_memory_gib * GIB)
    if available_bytes is not None and budget_bytes > available_bytes * _AVAILABLE_SHARE:
        budget_bytes = int(available_bytes * _AVAILABLE_SHARE)
        logger.warning(
            "less KV memory than asked for: the machine, or the limit on this process, has no more",
            extra=fields(asked_gib=config.kv_cache_memory_gib, taken_gib=budget_bytes / GIB),
        )

    def way_to(num_bytes: int) -> str:
        return f"raise kv_cache_memory_gib to {rounded_up(num_bytes / GIB)}"

    block_bytes = bytes_per_block(model, config.block_size)
    return fit_pool(config, model, block_bytes, budget_bytes, "kv_cache_memory_gib", way_to)


def wanted_length(config: EngineConfig, model: ModelConfig) -> int:
    """The longest sequence that is asked for. Raises ConfigError for one over the model's positions."""
    model_limit = model.max_position_embeddings
    if config.max_model_len > model_limit:
        raise ConfigError(
            "max_model_len", f"is {config.max_model_len}, but the model has {model_limit} positions; use at most that"
        )
    return config.max_model_len or model_limit


def most_blocks(config: EngineConfig, model: ModelConfig) -> int:
    """More than every sequence at its longest can never be used."""
    return config.max_num_seqs * -(-wanted_length(config, model) // config.block_size) + 1


def fit_pool(
    config: EngineConfig,
    model: ModelConfig,
    block_bytes: int,
    budget_bytes: int,
    field: str,
    way_to: Callable[[int], str],
) -> PoolSize:
    """How many blocks budget_bytes hold, and the longest sequence that they hold.

    field: the setting that buys memory. way_to: what gives so many bytes of KV memory, as an imperative.
    A limit that comes from the model is lowered to what fits, and logged; one that the user has set is not touched.
    Raises ConfigError when not one sequence of max_model_len tokens fits, and says which length would.
    """
    wanted_len = wanted_length(config, model)
    num_blocks = min(max(0, budget_bytes) // block_bytes, most_blocks(config, model))
    fitting_len = (num_blocks - 1) * config.block_size
    if fitting_len >= wanted_len:
        return PoolSize(num_blocks, wanted_len)
    budget_gib = max(0, budget_bytes) / GIB
    needed_bytes = (-(-wanted_len // config.block_size) + 1) * block_bytes
    if fitting_len < 2:
        # A prompt of one token and one more: the least that can be served.
        least_bytes = (-(-2 // config.block_size) + 1) * block_bytes
        raise ConfigError(
            field,
            f"{budget_gib:.3g} GiB of KV memory hold no sequence at all; {rounded_up(least_bytes / GIB)} hold one of "
            f"{max(2, config.block_size)} tokens, {rounded_up(needed_bytes / GIB)} one of {wanted_len}: "
            f"{way_to(least_bytes)} at least",
        )
    if config.max_model_len:
        raise ConfigError(
            "max_model_len",
            f"{wanted_len} tokens do not fit into {budget_gib:.3g} GiB of KV memory; {fitting_len} do. "
            f"Lower max_model_len to that or {way_to(needed_bytes)}",
        )
    logger.warning(
        "sequences are shorter than the model allows: the KV memory holds no more",
        extra=fields(
            max_model_len=fitting_len,
            model_limit=model.max_position_embeddings,
            hint=f"to hold it all, {way_to(needed_bytes)}",
        ),
    )
    return PoolSize(num_blocks, fitting_len)


def rounded_up(number: float) -> str:
    """With three digits, and never less than it is: what an error says would work does work."""
    if number <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(number)) - 2)
    count = math.ceil(number / unit)
    text = f"{count * unit:.6g}"
    return text if float(text) >= number else f"{(count + 1) * unit:.6g}"


def size_host(config: EngineConfig, block_bytes: int, pool_bytes: int, available_bytes: int | None) -> int:
    """How many blocks host_kv_memory_gib buys below the pool; 0 where it is 0.

    pool_bytes: what the pool will take of available_bytes.
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


def _aligned(count: int, item_bytes: int) -> int:
    """The least number from `count` on whose items end at a multiple of _ALIGNMENT bytes."""
    step = _ALIGNMENT // math.gcd(item_bytes, _ALIGNMENT)
    return -(-count // step) * step


class KvCache:
    """One pair of key and value tensors a layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = CACHE_DTYPE,
        device: torch.device = CPU,
    ) -> None:
        """dtype: float32 on a CPU; on a GPU that of the queries, or float8_e4m3fn."""
        self.num_blocks = num_blocks
        plane_block_bytes = block_size * model.num_kv_heads * model.head_dim * dtype.itemsize
        num_rows = _aligned(num_blocks, plane_block_bytes)
        shape = (model.num_layers, 2, num_rows, block_size, model.num_kv_heads, model.head_dim)
        # Zeros, so that nobody meets a NaN in slots that were never written. All memory is taken here, once (some 25
        # ms for 100 GB on a GPU): on a CPU, too, where pages would otherwise be cleared in mid-step.
        num_bytes = num_rows * bytes_per_block(model, block_size, dtype)
        storage = torch.zeros(num_bytes, dtype=torch.uint8, device=device).view(dtype).view(shape)
        self.storage = storage[:, :, :num_blocks]
        """All of it, in one piece, so that one strided copy moves a block: [num_layers, keys and values, ...]."""
        self.layers = [(layer[0], layer[1]) for layer in self.storage]
        self.key_scales: torch.Tensor | None = None
        """[num_layers, num_kv_heads] float32: what keys of a float8 cache are multiplied by. None for other dtypes."""
        self.value_scales: torch.Tensor | None = None
        """The same for values."""
        if dtype == torch.float8_e4m3fn:
            num_scales = _aligned(model.num_kv_heads, torch.float32.itemsize)
            scales = torch.ones(2, model.num_layers, num_scales, device=device)[:, :, : model.num_kv_heads]
            self.key_scales, self.value_scales = scales
        self._copies: DeviceBlockCopies | None = None
        if device.type == "cuda":
            from engine.execution import block_copies  # here, since a CPU's engine runs without Triton

            self._copies = block_copies.DeviceBlockCopies(self.planes)

    @property
    def planes(self) -> torch.Tensor:
        """The storage as kernels.copy_blocks takes it: [num_layers * 2, num_blocks, ...]."""
        return self.storage.flatten(0, 1)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer: (source, destination). No destination is also a source.

        On a GPU it returns at once: the copies stand in the current stream.
        """
        if not pairs:
            return
        if self._copies is not None:
            self._copies.run(pairs)
            return
        source = torch.tensor([pair[0] for pair in pairs])
        destination = torch.tensor([pair[1] for pair in pairs])
        for layer in self.layers:
            for half in layer:
                blocks = half.view(torch.uint8) if half.itemsize == 1 else half  # PyTorch moves no float8 by index
                blocks.index_copy_(0, destination, blocks.index_select(0, source))
