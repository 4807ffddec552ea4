"""What a step takes on a device, by a roofline: the truth of the simulation, which a latency model has to find out."""

from dataclasses import dataclass

from engine.plan import StepLoad


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of one model on one device. Times in seconds."""

    base_s: float
    """Of every step, whatever is in it: launches, sampling, the host's own part."""
    weights_s: float
    """To read the weights once."""
    token_s: float
    """Of one token's matrix products, when the device is bound by them."""
    pair_s: float
    """Of one (query, key) pair of prefill attention."""
    kv_token_s: float
    """To read one token's keys and values."""
    block_copy_s: float = 0.0
    host_bytes_per_s: float = 1e9
    disk_bytes_per_s: float = 1e9

    def step_s(self, load: StepLoad, num_block_copies: int = 0) -> float:
        num_tokens = load.num_prefill_tokens + load.num_decodes
        return (
            self.base_s
            + max(self.weights_s, num_tokens * self.token_s)
            + load.num_prefill_pairs * self.pair_s
            + load.num_decode_kv_tokens * self.kv_token_s
            + num_block_copies * self.block_copy_s
        )
