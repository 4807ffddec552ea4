"""Copies of whole KV blocks: copy-on-write within a pool, and swaps between two."""

import torch
import triton
import triton.language as tl

_TILE = 2048


@triton.jit
def _copy_blocks_kernel(
    source_ptr,
    target_ptr,
    pairs_ptr,
    block_numel,
    source_plane_stride,
    source_block_stride,
    target_plane_stride,
    target_block_stride,
    TILE: tl.constexpr,
):
    pair = tl.program_id(0)
    plane = tl.program_id(2).to(tl.int64)
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)  # an offset can pass 2**31
    target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_block = columns < block_numel
    source_start = plane * source_plane_stride + source * source_block_stride
    target_start = plane * target_plane_stride + target * target_block_stride
    row = tl.load(source_ptr + source_start + columns, mask=in_block)
    tl.store(target_ptr + target_start + columns, row, mask=in_block)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """target[:, pairs[i, 1]] = source[:, pairs[i, 0]] for all i, in one launch.

    source, target: [num_planes, num_blocks, ...], of one dtype and block shape; a block of one plane lies in one piece,
        planes and blocks lie in any order. num_blocks may differ. A plane is the keys or the values of one layer. They
        may be one tensor, and either may be pinned host memory.
    pairs: [n, 2] int32 on the device; n may be 0. No block is written twice; in one tensor none is read and written.
    Moves 2 * n * num_planes blocks and is bound by that. Raises ValueError for tensors that do not fit together.
    """
    if not (_has_whole_blocks(source) and _has_whole_blocks(target)):
        raise ValueError(f"blocks must be contiguous, got strides {source.stride()} and {target.stride()}")
    if source.dtype != target.dtype or source.shape[0] != target.shape[0] or source.shape[2:] != target.shape[2:]:
        raise ValueError(
            f"blocks must be alike, got {source.dtype} {list(source.shape)} and {target.dtype} {list(target.shape)}"
        )
    if not len(pairs):
        return
    if source.itemsize == 1:  # no arithmetic is done on them, and every target can move bytes
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    block_numel = source.shape[2:].numel()
    _copy_blocks_kernel[len(pairs), triton.cdiv(block_numel, _TILE), source.shape[0]](
        source,
        target,
        pairs,
        block_numel,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        TILE=_TILE,
    )


def _has_whole_blocks(pool: torch.Tensor) -> bool:
    """Whether [num_planes, num_blocks, ...] is contiguous from its third dimension on."""
    stride = 1
    for dim in range(pool.dim() - 1, 1, -1):
        if pool.shape[dim] > 1 and pool.stride(dim) != stride:
            return False
        stride *= pool.shape[dim]
    return True
