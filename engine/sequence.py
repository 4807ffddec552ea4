"""All that the engine knows of one request and of its sequences."""

from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from streamkv.protocol import TokenLogprobs
from streamkv.sampling import SamplingParams


class SequenceState(Enum):
    WAITING = auto()
    """Not begun, or preempted: holds no blocks. Or resumed and not yet running again: may hold some."""
    RUNNING = auto()
    """Holds blocks; steps compute it."""
    PAUSED = auto()
    """Its reader is slow; may hold blocks, and loses them first under pressure."""
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: its tokens and where their KV lies.

    `token_ids` are the tokens known on the host, prompt first. A sequence whose newest token is still on the
    device has num_pending > 0. Blocks belong to the block manager; block_table is its record of them.
    """

    sequence_id: int
    request: "Request"
    choice: int
    token_ids: list[int]
    num_prompt: int
    """Tokens of the prompt, without those of a continuation: output starts here."""
    max_len: int
    """With this many tokens it ends with `length`. Of a beam: so many that it never decodes on its own, but with the
    other beams of its request (scheduling/beams.py)."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end it: the model's end-of-sequence ids unless they are ignored, and the request's stop ids."""
    follows_grammar: bool = False
    """What may be sampled depends on the token before."""
    rank: tuple[int, float, int] = (0, 0.0, 0)
    """(priority, arrival_s, sequence_id): who is highest runs first and is preempted last."""
    state: SequenceState = SequenceState.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose KV is written, or will be when the launched steps are done."""
    num_pending: int = 0
    """Tokens sampled by launched, uncollected steps."""
    num_in_flight: int = 0
    """Launched, uncollected steps that touch this sequence: its blocks stay while it is over 0."""
    is_known: bool = False
    """The executor has been told of it."""
    is_prefilling: bool = False
    """Runs, and has not come to its first sampled token since it was admitted."""
    is_fetching: bool = False
    """Waits, and part of its blocks are on their way up from host memory or disk: it can't run yet."""
    is_resident: bool = False
    """The executor has its block table: it has run on the blocks that it holds."""
    must_progress: bool = False
    """Readmitted after a preemption, and no token sampled since: not a victim again."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    """Of these, those in which its blocks were copied to host memory."""
    num_charged: int = 0
    """Of its tokens, counted from the first: those that its tenant has been charged for, or need not be."""
    num_recompute: int = 0
    """Tokens that were computed when it was last preempted."""
    is_hit_told: bool = False
    """Its gateway knows of num_cached_tokens."""
    finish_reason: str = ""
    finish_cause: str = ""

    @property
    def num_tokens(self) -> int:
        """All tokens, the pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED


@dataclass(slots=True, eq=False)
class Request:
    """What one Submit asked for. Identity: (gateway_id, request_id) on the wire, stream_id everywhere."""

    request_id: int
    gateway_id: bytes
    stream_id: bytes
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_s: float
    """On the scheduler's clock."""
    priority: int = 0
    deadline_at_s: float = float("inf")
    """On the scheduler's clock."""
    tenant: str = ""
    cache_salt: str = ""
    label: str = ""
    gateway_state: bytes = b""
    attach_grace_s: float = 0.0
    prior_token_ids: list[list[int]] = field(default_factory=list)
    """Continuation: the tokens that each choice has generated before; they count against max_tokens."""
    finished_choices: list[int] = field(default_factory=list)
    """Continuation: choices that ended before and are not run again."""
    prior_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Continuation: those of prior_token_ids, where the sampling asks for them."""
    tells_prompt: bool = False
    """Log probabilities of the prompt are asked for, and no step has yet computed its last token: until then whoever
    computes it does so from the first one, whatever is cached. Kept by the scheduler."""
    is_suspect: bool = False
    """It may be what ends the engine, and runs alone before it runs with others. Kept by the quarantine."""
    cleared_past: int = 0
    """Where its choices are ranked: it may be what ends the engine until they have more tokens."""
    shares_prefix: bool = False
    """Its prefixes are those of all who share, not its tenant's own."""
    packed_prompt: bytes = b""
    """The prompt as it came over the wire (protocol.pack_ids), so that nobody need pack it again; may be empty."""
    is_paused: bool = False
    is_held: bool = False
    """Its grammar is being compiled, or another request runs alone: none of it runs before."""
    compiled_grammar: object = None
    """What the executor made of its grammar, kept for it."""
    sequences: list[Sequence] = field(default_factory=list)
    """Its choices. Where choices are ranked: what they are chosen from, until all have ended."""
    first_sequence_id: int = -1
    """Of the sequence that was its first."""
    first_scheduled_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def num_ranked_tokens(self) -> int:
        """The most that one of its sequences has generated in this engine's life, where its choices are ranked; else
        0."""
        if not self.sampling.ranks_choices:
            return 0
        return max([sequence.num_output for sequence in self.sequences], default=0)

    @property
    def prefix_namespace(self) -> tuple[str, str]:
        """Within which its prompt is looked for in the prefix cache, and kept."""
        return "" if self.shares_prefix else self.tenant, self.cache_salt


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
    """What one collected step, or an abort, means for one sequence: new tokens, and perhaps its end."""

    sequence: Sequence
    token_ids: list[int]
    finish_reason: str = ""
    """Empty while it goes on."""
    cause: str = ""
    stop_token_id: int = -1
    logprobs: TokenLogprobs | None = None
    """Those of token_ids, where the request asks for them."""
    prompt_logprobs: tuple[int, TokenLogprobs] | None = None
    """As in StepTokens; alone, without tokens or an end."""
