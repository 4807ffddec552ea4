import pytest
import torch

from engine.kernels.copy_blocks import copy_blocks


def pool(num_planes: int, num_blocks: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    numbers = torch.randn(num_planes, num_blocks, 3, 2, 24, generator=torch.Generator().manual_seed(seed))
    return numbers.to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_pairs", [0, 1, 7])
def test_copies_the_named_blocks_of_all_planes_and_no_other(
    dtype: torch.dtype, num_pairs: int, device: torch.device
) -> None:
    cache = pool(4, 20, dtype, device, 0)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    pairs = order[: 2 * num_pairs].view(-1, 2)
    expected = cache.clone().view(torch.uint8)
    for source, target in pairs.tolist():
        expected[:, target] = expected[:, source]
    copy_blocks(cache, cache, pairs.int().to(device))
    assert torch.equal(cache.view(torch.uint8), expected)


def test_a_block_may_be_copied_to_several(device: torch.device) -> None:
    cache = pool(1, 6, torch.float32, device, 0)
    copy_blocks(cache, cache, torch.tensor([[2, 0], [2, 5], [3, 1]], dtype=torch.int32, device=device))
    assert torch.equal(cache[0, 0], cache[0, 2])
    assert torch.equal(cache[0, 5], cache[0, 2])
    assert torch.equal(cache[0, 1], cache[0, 3])


def test_swaps_between_pools_of_different_size(device: torch.device) -> None:
    source, target = pool(2, 9, torch.float16, device, 0), pool(2, 4, torch.float16, device, 1)
    untouched = target[:, [0, 2]].clone()
    copy_blocks(source, target, torch.tensor([[8, 3], [0, 1]], dtype=torch.int32, device=device))
    assert torch.equal(target[:, [3, 1]], source[:, [8, 0]])
    assert torch.equal(target[:, [0, 2]], untouched)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_gathers_blocks_into_one_piece_each_and_scatters_them_again(dtype: torch.dtype, device: torch.device) -> None:
    """To and from [n, num_planes, ...], seen with the first two dimensions changed."""
    cache = pool(4, 9, dtype, device, 0)
    staging = pool(3, 4, dtype, device, 1)
    gathered = torch.tensor([[7, 0], [2, 2], [5, 1]], dtype=torch.int32, device=device)
    copy_blocks(cache, staging.transpose(0, 1), gathered)
    for block, row in gathered.tolist():
        assert torch.equal(staging[row].view(torch.uint8), cache[:, block].view(torch.uint8))
    expected = cache.clone().view(torch.uint8)
    expected[:, 8] = staging[2].view(torch.uint8)
    copy_blocks(staging.transpose(0, 1), cache, torch.tensor([[2, 8]], dtype=torch.int32, device=device))
    assert torch.equal(cache.view(torch.uint8), expected)


def test_refuses_what_does_not_fit_together(device: torch.device) -> None:
    cache = pool(2, 4, torch.float32, device, 0)
    pairs = torch.tensor([[1, 2]], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="alike"):
        copy_blocks(cache, cache.half(), pairs)
    with pytest.raises(ValueError, match="contiguous"):
        copy_blocks(cache, cache.transpose(2, 3), pairs)
