"""Philox4x32-10 inside a kernel: the same words as engine/execution/philox.py, which names its source.

Who calls it says which counter it uses. Products are taken in 64 bits, so that the interpreter's cannot overflow.
"""

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Counter and key as 32-bit words in uint64 → four such words. Scalars or tensors of one shape."""
    for _ in tl.static_range(10):
        product0 = c0 * 0xD2511F53
        product1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & 0xFFFFFFFF,
        )
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


@triton.jit
def exponential(words):
    """As the CPU's: float64 of a word, over 0 and at most 22.9."""
    return -tl.log((words.to(tl.int64).to(tl.float64) + 0.5) * 2.3283064365386963e-10)
