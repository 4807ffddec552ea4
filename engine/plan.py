"""What the scheduler hands to the executor, and what comes back. Plain data, no tensor, no behaviour."""

from dataclasses import dataclass, field

import msgspec

from streamkv.protocol import TokenLogprobs
from streamkv.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """Facts that the executor keeps of a sequence from its first step to the plan that names it finished."""

    sequence_id: int
    """Unique in this engine's life."""
    choice: int
    sampling: SamplingParams
    num_prompt: int
    """Tokens before the first generated one, for min_tokens: a sampled token at position p is output p - num_prompt."""
    eos_token_ids: tuple[int, ...]
    """Empty under ignore_eos. Banned, with the stop ids, until min_tokens."""
    token_ids: list[int] = field(default_factory=list)
    """All tokens that it has, those of a continuation behind the prompt's: for whom penalties, a grammar or
    prompt_logprobs look at tokens that may never be scheduled, because they are cached. Empty for others. Read only."""
    tells_prompt: bool = False
    """Log probabilities of the prompt's tokens are to be told, as its chunks are computed."""

    @property
    def num_candidates(self) -> int:
        """Of a beam: next tokens that it offers. Among so many there are always beam_width that do not end it."""
        return self.sampling.beam_width + len({*self.eos_token_ids, *self.sampling.stop_token_ids})


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: compute tokens [start, start + num_tokens) and perhaps sample the next.

    A struct and no dataclass because hundreds are made per step: it takes a tenth of the time.
    """

    sequence_id: int
    start: int
    num_tokens: int
    is_prefill: bool
    samples: bool
    """The last of these tokens is the sequence's last known one, so the step samples position start + num_tokens."""
    token_ids: list[int]
    """The num_tokens input ids. Empty: the single input is the token that the step before sampled for this
    sequence and that has not reached the host (only with an executor that runs more than one step at once)."""
    new_block_ids: list[int]
    """To append to the executor's copy of the block table. For a sequence that the plan names new or readmitted:
    the whole table, which may start with blocks that it shares with others or that were cached. Read only."""


class StepLoad(msgspec.Struct, frozen=True, gc=False):
    """What a step costs the device, in the terms of the latency model."""

    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0
    """(query, key) pairs of the prefills: the sum over their tokens of position + 1."""
    num_decodes: int = 0
    num_decode_kv_tokens: int = 0
    """Tokens whose KV the decodes read."""
    num_prefills: int = 0
    """Sequences with a chunk in it."""
    num_prefill_kv_tokens: int = 0
    """Tokens before the chunks, whose KV they read."""

    def with_chunk(self, num_tokens: int, context_tokens: int) -> "StepLoad":
        """The load with one more prefill chunk, behind `context_tokens` of its sequence."""
        return StepLoad(
            self.num_prefill_tokens + num_tokens,
            self.num_prefill_pairs + num_tokens * context_tokens + num_tokens * (num_tokens + 1) // 2,
            self.num_decodes,
            self.num_decode_kv_tokens,
            self.num_prefills + 1,
            self.num_prefill_kv_tokens + context_tokens,
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The executor applies it in this order: finished and preempted sequences are forgotten or lose their
    block table, new ones are learnt, blocks are copied, then the scheduled tokens are computed."""

    step: int
    scheduled: list[ScheduledSequence]
    """Decodes first, then prefills."""
    new_sequences: list[NewSequence] = field(default_factory=list)
    finished_sequence_ids: list[int] = field(default_factory=list)
    """Ended since the last plan; their ids never come again."""
    preempted_sequence_ids: list[int] = field(default_factory=list)
    """Lost their blocks since the last plan: clear the block table, keep the rest."""
    readmitted_sequence_ids: list[int] = field(default_factory=list)
    """Preempted before, scheduled again in this step."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination): copy-on-write, before anything of this step is written."""
    total_num_scheduled_tokens: int = 0
    num_prefill_requests: int = 0
    num_decode_requests: int = 0
    load: StepLoad = field(default_factory=StepLoad)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a collected step sampled: one id for each scheduled entry with `samples`, in the plan's order."""

    token_ids: list[int]
    """-1 for a sequence that is named in `failed` or `candidates`."""
    failed: dict[int, str] = field(default_factory=dict)
    """sequence_id → why no token could be sampled for it. It ends with `error`; the others go on."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """sequence_id → those of its sampled token, for sequences whose SamplingParams ask for them, or rank choices."""
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """sequence_id → its NewSequence.num_candidates likeliest next tokens, fewer where others are banned, with their log
    probabilities: likeliest first, the lowest id on a tie. For beam search, in which the scheduler chooses."""
    prompt_logprobs: dict[int, tuple[int, TokenLogprobs]] = field(default_factory=dict)
    """sequence_id → (index of the first, those of consecutive prompt tokens): what this step's chunk, which may sample
    or not, tells of the prompt."""
