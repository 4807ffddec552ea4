"""How long it takes to serve what is there."""

from collections.abc import Iterable
from typing import Final

from engine.plan import StepLoad
from engine.scheduling.latency import LatencyModel
from engine.scheduling.limits import SchedulerLimits
from engine.sequence import Request, SequenceState

_LEAST_CHUNK: Final = 16


def predict_drain_s(
    requests: Iterable[Request], num_at_once: int, mean_output: float, limits: SchedulerLimits, latency: LatencyModel
) -> float:
    """Seconds until these requests, waiting and running, have ended if no more come; 0: unknown. O(sequences).

    num_at_once: sequences that run together. mean_output: tokens that a sequence is expected to generate, if its own
    limit is not lower. Cached prefixes of those that wait are not looked up, and paused ones do not count.
    """
    num_prefill_tokens = num_output_tokens = num_tokens = num_sequences = 0
    for request in requests:
        for sequence in request.sequences:
            if sequence.state is not SequenceState.RUNNING and sequence.state is not SequenceState.WAITING:
                continue
            num_left = sequence.max_len - sequence.num_tokens
            num_sequences += 1
            num_tokens += sequence.num_tokens
            num_prefill_tokens += max(0, sequence.num_tokens - sequence.num_computed - 1)
            num_output_tokens += min(num_left, max(1, round(mean_output) - sequence.num_output))
    if not num_sequences:
        return 0.0
    context_tokens = num_tokens // num_sequences
    num_at_once = max(1, min(num_at_once, num_sequences))
    chunk = limits.max_num_batched_tokens
    if limits.itl_target_s:
        decodes = StepLoad(num_decodes=num_at_once, num_decode_kv_tokens=num_at_once * context_tokens)
        within = latency.prefill_tokens_within(limits.itl_target_s, decodes, context_tokens // 2)
        chunk = min(chunk, max(within, _LEAST_CHUNK))
    return latency.drain_s(num_prefill_tokens, num_output_tokens, num_at_once, context_tokens, chunk)
