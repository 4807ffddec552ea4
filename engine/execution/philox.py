"""Philox4x32-10: random numbers as a function of a key and a counter, with no state.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Whoever draws says which counter it uses, so
equal (key, counter) give equal bits in any batch, order, process or device.
"""

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


def philox4x32(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """counter: [..., 4], key: [..., 2], both int64 holding 32-bit words → [..., 4] int64 holding 32-bit words.

    int64 products wrap at 64 bits and the shift keeps the sign, but both halves come out right once they are masked.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(_NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), -1)


def exponential(words: torch.Tensor) -> torch.Tensor:
    """Words → float64, distributed as the waiting time for what happens once in a unit of it: over 0, at most 22.9."""
    return -((words.double() + 0.5) * 2.0**-32).log()
