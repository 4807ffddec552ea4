"""The generator inside a kernel gives the words of engine/execution/philox.py, bit by bit."""

import torch
import triton
import triton.language as tl

from engine.execution import philox as reference
from engine.kernels.philox import exponential, philox4x32


@triton.jit
def _words_kernel(words_ptr, times_ptr, counters_ptr, seeds_ptr):
    row = tl.program_id(0)
    seed = tl.load(seeds_ptr + row).to(tl.uint64, bitcast=True)
    c0 = tl.load(counters_ptr + 4 * row).to(tl.uint64)
    c1 = tl.load(counters_ptr + 4 * row + 1).to(tl.uint64)
    c2 = tl.load(counters_ptr + 4 * row + 2).to(tl.uint64)
    c3 = tl.load(counters_ptr + 4 * row + 3).to(tl.uint64)
    w0, w1, w2, w3 = philox4x32(c0, c1, c2, c3, seed & 0xFFFFFFFF, seed >> 32)
    tl.store(words_ptr + 4 * row, w0.to(tl.int64))
    tl.store(words_ptr + 4 * row + 1, w1.to(tl.int64))
    tl.store(words_ptr + 4 * row + 2, w2.to(tl.int64))
    tl.store(words_ptr + 4 * row + 3, w3.to(tl.int64))
    tl.store(times_ptr + row, exponential(w0))


def test_words_and_exponentials_are_those_of_the_cpu(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    counters = torch.randint(0, 2**32, (12, 4), generator=generator)
    keys = torch.randint(0, 2**32, (12, 2), generator=generator)
    counters[0], keys[0] = 0, 0
    counters[1], keys[1] = 2**32 - 1, 2**32 - 1
    counters[2] = torch.tensor([131071, 127, 0, 0])
    words = torch.empty(12, 4, dtype=torch.int64, device=device)
    times = torch.empty(12, dtype=torch.float64, device=device)
    seeds = (keys[:, 1] << 32) | keys[:, 0]
    _words_kernel[(12,)](words, times, counters.to(device), seeds.to(device))
    expected = reference.philox4x32(counters, keys)
    assert torch.equal(words.cpu(), expected)
    torch.testing.assert_close(times.cpu(), reference.exponential(expected[:, 0]), rtol=1e-14, atol=0)
