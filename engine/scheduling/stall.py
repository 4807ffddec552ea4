"""How much prefill a step may hold so that the streams that decode beside it get their next token in time."""

from collections.abc import Iterable
from typing import Final

from engine.plan import StepLoad
from engine.scheduling.latency import LatencyModel
from engine.scheduling.limits import SchedulerLimits
from engine.sequence import Sequence

_HOST_SHARE: Final = 0.05
"""Of the target, what is left for planning and publishing between two steps."""
_LEAST_TOKENS: Final = 16
_LEAST_SHARE: Final = 64
"""A step's prefills get at least 16 tokens, or a 64th of the step's budget where that is more, even if the decodes
alone take longer than the target: a prompt goes on in every step."""


class PrefillBound:
    """Of one step that also decodes. A stream's gap is this step: whoever decodes in it decoded in the one before."""

    def __init__(self, latency: LatencyModel, seconds: float, least_tokens: int, load: StepLoad) -> None:
        """load: the decodes of the step."""
        self._latency = latency
        self._seconds = seconds
        self._least_tokens = least_tokens
        self._load = load
        self.is_spent = False
        """Whoever asked last found nothing left."""

    def tokens_behind(self, context_tokens: int) -> int:
        """Most tokens of one more chunk behind so many of its sequence."""
        within = self._latency.prefill_tokens_within(self._seconds, self._load, context_tokens)
        num_left = max(within, self._least_tokens - self._load.num_prefill_tokens)
        self.is_spent = num_left <= 0
        return num_left

    def take(self, num_tokens: int, context_tokens: int) -> None:
        """A chunk is in the step."""
        self._load = self._load.with_chunk(num_tokens, context_tokens)


class StallBound:
    """Sizes the prefills of steps that also decode by the latency model, for a target gap between two tokens.

    The prediction must keep the target with a margin: for the host's work between two steps, and for what steps of
    this kind have lately taken beyond their prediction.
    """

    def __init__(self, limits: SchedulerLimits, latency: LatencyModel) -> None:
        self._target_s = limits.itl_target_s
        self._least_tokens = max(_LEAST_TOKENS, limits.max_num_batched_tokens // _LEAST_SHARE)
        self._latency = latency

    def of_step(self, running: Iterable[Sequence]) -> PrefillBound | None:
        """The bound for a step of these sequences; None: there is none, for nobody among them decodes."""
        contexts = [sequence.num_computed + 1 for sequence in running if not sequence.is_prefilling]
        if not contexts:
            return None
        load = StepLoad(num_decodes=len(contexts), num_decode_kv_tokens=sum(contexts))
        seconds = self._target_s * (1 - _HOST_SHARE) / self._latency.overrun
        return PrefillBound(self._latency, seconds, self._least_tokens, load)
