"""What a step may hold, and how much may wait."""

from dataclasses import dataclass

from streamkv.config import PreemptionMode


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The scheduler's settings. Raises ValueError for a limit under which nothing could run."""

    max_num_seqs: int
    """Sequences that run at once; one more than max_num_batched_tokens never does."""
    max_num_batched_tokens: int
    """Tokens of one step. Only a whole prompt alone in its step may exceed it, without chunked prefill."""
    max_prefill_tokens: int
    """Largest chunk of one sequence; 0: max_num_batched_tokens. Without meaning when prompts are not chunked."""
    max_num_partial_prefills: int
    """Running sequences whose prompt a step may leave unfinished."""
    enable_chunked_prefill: bool
    max_model_len: int
    max_queue: int
    """Requests that may wait for their first step, beyond those that the next one has room for."""
    eos_token_ids: tuple[int, ...] = ()
    preemption_mode: PreemptionMode = "auto"
    """How a sequence that lost its blocks comes back. auto: whatever the latency model finds cheaper."""
    ageing_s: float = 30.0
    """Time in the queue that is worth one level of priority; inf: none is."""
    itl_target_s: float = 0.0
    """Gap between two tokens of a stream that prompts computed beside it may not exceed; 0: none. Without chunked
    prefill it can't be kept and has no meaning."""

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_partial_prefills",
            "max_model_len",
            "max_queue",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.ageing_s > 0:
            raise ValueError(f"ageing_s must be over 0, got {self.ageing_s}")
        if self.max_prefill_tokens < 0:
            raise ValueError(f"max_prefill_tokens must not be negative, got {self.max_prefill_tokens}")

    @property
    def max_running(self) -> int:
        """Sequences that can run at once."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_chunk(self) -> int:
        """Most prompt tokens of one sequence in a step, where prompts are chunked."""
        return self.max_prefill_tokens or self.max_num_batched_tokens
