"""Who runs in the next step, and with how many tokens; who loses its blocks; what the sampled tokens mean.

A step costs the host O(sequences in it) and O(blocks that change hands); nothing is rebuilt from one to the next.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from math import inf
from typing import Final

from engine.kv.block_manager import BlockManager, Match
from engine.plan import NewSequence, ScheduledSequence, StepPlan, StepTokens
from engine.scheduling.queue import QueueFull, RunningList, WaitingQueue, order_key
from engine.sequence import Request, Sequence, SequenceOutput, SequenceState
from streamkv.errors import InvalidField
from streamkv.sampling import SamplingParams

_NO_BLOCKS: Final[list[int]] = []
"""Of most decodes; a plan is read only."""
_MAX_SKIPPED: Final = 64
"""Waiting sequences that a plan passes over, each of which costs about a microsecond."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold, and how much may wait. Raises ValueError for a limit under which nothing could run."""

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
        if self.max_prefill_tokens < 0:
            raise ValueError(f"max_prefill_tokens must not be negative, got {self.max_prefill_tokens}")


@dataclass(frozen=True, slots=True)
class KVUsage:
    """KV memory at one moment."""

    num_owned_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """In the prefix tree, without an owner."""
    num_computed_tokens: int
    """Tokens in owned blocks, those of a shared block once."""
    utilization: float
    """Computed tokens over the slots of owned blocks; 1 when none is owned."""


class _Admission(Enum):
    ADMITTED = auto()
    SKIPPED = auto()
    """Not now, for a reason of its own: others may go first."""
    BLOCKED = auto()
    """No memory or no tokens left: nobody behind it may take them first."""


@dataclass(slots=True)
class _Draft:
    """The step being planned."""

    budget_tokens: int
    """Left for prefill chunks: the running decodes have theirs."""
    decodes: list[ScheduledSequence] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    prefills: list[ScheduledSequence] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    short: dict[Sequence, int] = field(default_factory=dict)
    """Short prompts not yet scheduled, and the tokens that long ones leave to them."""
    new_sequences: list[NewSequence] = field(default_factory=list)
    readmitted_ids: list[int] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    sharing: set[Request] = field(default_factory=set)
    """Requests of which one choice computes the prompt and the others wait for it."""
    num_partial: int = 0
    """Prefills that this step leaves unfinished, with those that did not get a chunk."""
    num_promised_blocks: int = 0
    """Blocks that admitted sequences still need to finish their prefill."""
    has_preempted: bool = False


class Scheduler:
    """Plans steps and takes in their tokens. One thread; the clock, in seconds, is handed in.

    Order: running decodes, then running prefills, then waiting sequences by priority, deadline and arrival. Blocks are
    allocated per step. When none is free, sequences lose theirs and are computed again later: first those that do
    not run, then the running one of the lowest rank (priority, arrival), never the highest, and none that was
    readmitted and has not sampled since. A readmitted one gets at once all blocks for the tokens it has, so it comes
    to its next token without another's help: that is why pressure never ends in a standstill.

    Every plan must be launched, in order, and its tokens handed to `update`, in the same order. `plan` may be called
    before the tokens of the step before are there: a sequence whose newest token is still on the device runs on it.
    """

    def __init__(self, limits: SchedulerLimits, block_manager: BlockManager, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._blocks = block_manager
        self._clock = clock
        self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._max_chunk = limits.max_prefill_tokens or limits.max_num_batched_tokens
        self._eos_ids = frozenset(limits.eos_token_ids)
        self.max_len = min(limits.max_model_len, block_manager.capacity_tokens)
        """Most tokens of a sequence: the model's limit, or what one sequence alone can hold."""

        self._running = RunningList()
        self._waiting = WaitingQueue()
        self._paused: set[Sequence] = set()
        self._parked: set[Sequence] = set()
        """Sequences that hold blocks and do not run: paused ones, and resumed ones that wait."""
        self._unstarted: set[Request] = set()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._num_prefilling = 0
        self._launched: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._ended: list[SequenceOutput] = []
        """Ends that no step brought about; the next `update` or `expire` hands them out."""
        self._finished_ids: list[int] = []
        self._preempted_ids: dict[int, None] = {}
        self._next_sequence_id = 0
        self._next_step = 0

        self.num_preemptions = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_recomputed_tokens = 0
        """Tokens computed again after a preemption; prefill tokens, too."""
        self.num_wasted_tokens = 0
        """Tokens sampled for a sequence that had ended."""
        self.num_prompt_tokens = 0
        """Of requests that have begun to run."""
        self.num_prefix_hit_tokens = 0
        """Of these, tokens that were found in the prefix tree when the request began to run."""

    # figures

    @property
    def has_runnable(self) -> bool:
        """Whether `plan` or `expire` may have something. With no step in flight it is exact."""
        return bool(len(self._running) or len(self._waiting) or self._ended)

    @property
    def has_work(self) -> bool:
        """Something could run now, or is running."""
        return self.has_runnable or bool(self._launched)

    @property
    def next_deadline_s(self) -> float:
        """When `expire` will next have something, on the scheduler's clock; inf: never."""
        if self._ended:
            return self._clock()
        return self._deadlines[0][0] if self._deadlines else inf

    @property
    def num_running(self) -> int:
        """Sequences."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences."""
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        """Sequences."""
        return len(self._paused)

    @property
    def num_block_copies(self) -> int:
        """Blocks copied because they were to be written and were shared."""
        return self._blocks.num_block_copies

    def kv_usage(self) -> KVUsage:
        """O(blocks owned)."""
        blocks = self._blocks
        num_owned, num_tokens = blocks.num_owned_blocks, blocks.num_computed_tokens()
        return KVUsage(
            num_owned_blocks=num_owned,
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=blocks.num_cached_blocks,
            num_computed_tokens=num_tokens,
            utilization=num_tokens / (num_owned * blocks.block_size) if num_owned else 1.0,
        )

    # requests come, stand aside and go

    def check(self, prompt_len: int, sampling: SamplingParams) -> None:
        """Whether such a request can be added. Raises InvalidField if it never can, QueueFull if not now."""
        if prompt_len < 1:
            raise InvalidField("prompt", "must have at least one token")
        if prompt_len + 1 > self.max_len:
            raise InvalidField(
                "prompt",
                f"has {prompt_len} tokens, and with one more it must fit into the limit of {self.max_len} tokens for "
                f"prompt and output together; shorten it to {self.max_len - 1}",
            )
        if prompt_len + sampling.min_tokens > self.max_len:
            raise InvalidField(
                "min_tokens",
                f"prompt has {prompt_len} tokens and min_tokens is {sampling.min_tokens}, together over the limit of "
                f"{self.max_len}; lower min_tokens to {self.max_len - prompt_len} or shorten the prompt",
            )
        if len(self._unstarted) >= self._limits.max_queue + max(0, self._max_running - len(self._running)):
            raise QueueFull(len(self._unstarted))

    def add(self, request: Request) -> None:
        """Take a request in and make its sequences. The caller has called `check`.

        A continuation's choice that has ended by its prior tokens is handed out by the next `update` or `expire`.
        """
        sampling = request.sampling
        stop_ids = frozenset() if sampling.ignore_eos else self._eos_ids
        if sampling.stop_token_ids:
            stop_ids = stop_ids.union(sampling.stop_token_ids)
        num_prompt = len(request.prompt_token_ids)
        request.sequences = []
        for choice in range(sampling.n):
            prior = request.prior_token_ids[choice] if choice < len(request.prior_token_ids) else []
            sequence = Sequence(
                sequence_id=self._next_sequence_id,
                request=request,
                choice=choice,
                token_ids=[*request.prompt_token_ids, *prior],
                num_prompt=num_prompt,
                max_len=min(self.max_len, num_prompt + sampling.max_tokens),
                stop_ids=stop_ids,
                rank=(request.priority, request.arrival_s, self._next_sequence_id),
            )
            self._next_sequence_id += 1
            request.sequences.append(sequence)
            ending = self._ending(sequence) if prior or len(sequence.token_ids) >= sequence.max_len else None
            if choice in request.finished_choices:
                sequence.state = SequenceState.FINISHED
            elif ending is not None:
                sequence.state = SequenceState.FINISHED
                self._ended.append(self._end(sequence, [], *ending))
            else:
                self._waiting.add(sequence)
        if request.is_finished:
            return
        self._unstarted.add(request)
        if request.deadline_at_s < inf:
            insort(self._deadlines, self._deadline(request))

    def abort(self, request: Request, cause: str) -> list[SequenceOutput]:
        """End what still goes on of a request. Blocks that a launched step touches are freed when it is collected."""
        outputs = []
        for sequence in request.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self._finish(sequence)
                outputs.append(self._end(sequence, [], "abort", cause, -1))
        return outputs

    def expire(self) -> list[SequenceOutput]:
        """Abort, with cause `deadline`, what has passed its deadline; hand out ends that no step brought about."""
        outputs, self._ended = self._ended, []
        now_s = self._clock() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now_s:
            outputs += self.abort(self._deadlines[0][2], "deadline")
        return outputs

    def pause(self, request: Request) -> None:
        """Deschedule a request. Tokens of launched steps still come; its blocks are the first to be preempted."""
        request.is_paused = True
        for sequence in request.sequences:
            if sequence.state is SequenceState.RUNNING:
                self._leave_running(sequence)
                self._parked.add(sequence)
            elif sequence.state is SequenceState.WAITING:
                self._waiting.remove(sequence)
            else:
                continue
            sequence.state = SequenceState.PAUSED
            self._paused.add(sequence)

    def resume(self, request: Request) -> None:
        """Let a paused request wait for its turn again, at its old place and with the blocks that it still has."""
        request.is_paused = False
        for sequence in request.sequences:
            if sequence.state is SequenceState.PAUSED:
                self._paused.remove(sequence)
                sequence.state = SequenceState.WAITING
                self._waiting.add(sequence)

    # a step

    def plan(self) -> StepPlan | None:
        """The next step, which the caller must launch; None when nothing can run now."""
        draft = _Draft(self._limits.max_num_batched_tokens - (len(self._running) - self._num_prefilling))
        if not self._plan_alone(draft):
            if self._num_prefilling or len(self._waiting):
                self._reserve_for_short(draft)
            self._plan_running(draft)
            if len(self._waiting) and not draft.has_preempted:
                self._plan_waiting(draft)
        if not draft.decodes and not draft.prefills:
            return None
        self._blocks.end_plan(draft.prefilling)
        num_prefill_tokens = sum([entry.num_tokens for entry in draft.prefills])
        self.num_prefill_tokens += num_prefill_tokens
        self.num_decode_tokens += len(draft.decodes)
        plan = StepPlan(
            step=self._next_step,
            scheduled=draft.decodes + draft.prefills,
            new_sequences=draft.new_sequences,
            finished_sequence_ids=self._finished_ids,
            preempted_sequence_ids=list(self._preempted_ids),
            readmitted_sequence_ids=draft.readmitted_ids,
            block_copies=draft.block_copies,
            total_num_scheduled_tokens=len(draft.decodes) + num_prefill_tokens,
            num_prefill_requests=len(draft.prefills),
            num_decode_requests=len(draft.decodes),
        )
        self._next_step += 1
        self._finished_ids = []
        self._preempted_ids = {}
        self._launched.append((plan, draft.decoding + draft.prefilling))
        return plan

    def update(self, plan: StepPlan, tokens: StepTokens) -> list[SequenceOutput]:
        """Take in the tokens of the oldest launched step. Tokens of sequences that have ended are dropped."""
        launched, sequences = self._launched.popleft()
        assert launched is plan, f"step {plan.step} was collected before step {launched.step}"
        outputs, self._ended = self._ended, []
        sampled = iter(tokens.token_ids)
        finished = SequenceState.FINISHED
        for entry, sequence in zip(plan.scheduled, sequences, strict=True):
            sequence.num_in_flight -= 1
            if entry.samples:
                token_id = next(sampled)
                sequence.num_pending -= 1
            if sequence.state is finished:
                self.num_wasted_tokens += entry.samples
                if not sequence.num_in_flight:
                    self._release(sequence)
                continue
            if not entry.samples:
                continue
            if token_id < 0:
                sequence.finish_reason = "error"
                self._finish(sequence)
                outputs.append(self._end(sequence, [], "error", tokens.failed[sequence.sequence_id], -1))
                continue
            token_ids = sequence.token_ids
            token_ids.append(token_id)
            if entry.is_prefill and not sequence.request.first_token_s:
                sequence.request.first_token_s = self._clock()
            if token_id in sequence.stop_ids or len(token_ids) >= sequence.max_len:
                ending = self._ending(sequence)
                if ending is not None:
                    self._finish(sequence)
                    outputs.append(self._end(sequence, [token_id], *ending))
                    continue
            outputs.append(SequenceOutput(sequence, [token_id]))
        assert next(sampled, None) is None, f"step {plan.step} sampled more tokens than its plan asked for"
        return outputs

    # planning

    def _plan_running(self, draft: _Draft) -> None:
        """Every running decode and, in what they leave of the budget, the running prefills; by rank."""
        blocks, running = self._blocks, self._running.sequences
        block_size = blocks.block_size
        decodes, decoding = draft.decodes, draft.decoding
        index = 0
        while index < len(running):
            sequence = running[index]
            if sequence.is_prefilling:
                index += self._plan_running_prefill(draft, sequence, index)
                continue
            token_ids, start = sequence.token_ids, sequence.num_computed
            if start + 1 >= sequence.max_len:
                index += 1
                continue  # the last token that it may have is on its way
            new_block_ids = _NO_BLOCKS
            # A block that it has already is its own: whoever forks copies the block that both would write, at once.
            if start >= len(sequence.block_table) * block_size:
                if not blocks.num_available_blocks and not self._make_room(draft, sequence, 1, index):
                    index += sequence.state is SequenceState.RUNNING
                    continue
                new_block_ids = [blocks.extend(sequence)]
            decodes.append(
                ScheduledSequence(
                    sequence.sequence_id,
                    start,
                    1,
                    False,
                    True,
                    [] if sequence.num_pending else token_ids[-1:],
                    new_block_ids,
                )
            )
            decoding.append(sequence)
            sequence.num_computed = start + 1
            sequence.num_pending += 1
            sequence.num_in_flight += 1
            sequence.must_progress = False
            index += 1

    def _plan_running_prefill(self, draft: _Draft, sequence: Sequence, index: int) -> bool:
        """Whether running[index] still runs, be it with a chunk in this step or without."""
        chunk = self._chunk(draft, sequence, sequence.num_tokens - sequence.num_computed)
        end = sequence.num_computed + chunk
        if chunk > 0:
            num_needed = self._blocks.num_needed(sequence, end)
            if self._blocks.num_available_blocks >= num_needed or self._make_room(draft, sequence, num_needed, index):
                self._schedule(draft, sequence, end)
        if sequence.is_prefilling:
            draft.num_partial += 1
            draft.num_promised_blocks += self._blocks.num_needed(sequence, sequence.num_tokens)
        return sequence.state is SequenceState.RUNNING

    def _plan_waiting(self, draft: _Draft) -> None:
        """Admit waiting sequences in their order while there are places, tokens and blocks."""
        admitted = []
        num_skipped = 0
        for sequence in self._waiting:
            if draft.budget_tokens <= 0 or len(self._running) >= self._max_running or num_skipped > _MAX_SKIPPED:
                break
            if sequence.request in draft.sharing:
                continue
            admission = self._admit(draft, sequence)
            if admission is _Admission.ADMITTED:
                admitted.append(sequence)
            elif admission is _Admission.BLOCKED:
                break
            else:
                num_skipped += 1
        for sequence in admitted:
            self._waiting.remove(sequence)

    def _plan_alone(self, draft: _Draft) -> bool:
        """Without chunked prefill: give the first waiting sequence a step of its own if it is too long to go beside
        the running ones. That step may exceed the budget. Returns whether it was planned."""
        if self._limits.enable_chunked_prefill or len(self._running) >= self._max_running:
            return False
        for sequence in self._waiting:
            if self._num_remaining(sequence) <= draft.budget_tokens:
                return False
            if not sequence.block_table and self._find_parent(draft, sequence) != (None, False):
                continue  # little is left to compute, or will be soon
            budget_tokens = draft.budget_tokens
            draft.budget_tokens = sequence.num_tokens
            admission = self._admit(draft, sequence)
            if admission is _Admission.ADMITTED:
                self._waiting.remove(sequence)
                return True
            draft.budget_tokens = budget_tokens
            if admission is _Admission.BLOCKED:
                return False
        return False

    def _admit(self, draft: _Draft, sequence: Sequence) -> _Admission:
        """Schedule a waiting sequence's first chunk if there is room. The caller takes it out of the queue."""
        blocks, num_tokens = self._blocks, sequence.num_tokens
        holds_blocks = bool(sequence.block_table)
        if num_tokens >= sequence.max_len or (sequence.num_pending and not holds_blocks):
            return _Admission.SKIPPED  # its newest token is on its way, and a recomputation needs it on the host
        parent, match, start = None, None, sequence.num_computed
        if not holds_blocks:
            match = blocks.find(sequence)
            start = match.num_tokens
            if start < _shared_len(sequence) and len(sequence.request.sequences) > 1:
                parent, must_wait = self._find_parent(draft, sequence)
                if must_wait:
                    draft.sharing.add(sequence.request)
                    return _Admission.SKIPPED
                if parent is not None:
                    start = _shared_len(sequence)
            if parent is None and self._must_wait_for_prefix(draft, sequence):
                return _Admission.SKIPPED
        chunk = self._chunk(draft, sequence, num_tokens - start)
        if chunk <= 0:
            return _Admission.SKIPPED if self._limits.enable_chunked_prefill else _Admission.BLOCKED
        is_partial = start + chunk < num_tokens
        if is_partial and draft.num_partial >= self._limits.max_num_partial_prefills:
            return _Admission.SKIPPED
        # Whoever cannot have all blocks for the tokens that it has would only be preempted, or preempt, half-way.
        if holds_blocks:
            num_needed = blocks.num_needed(sequence, num_tokens)
        else:
            num_needed = blocks.num_needed_after(start, num_tokens)
        if num_needed and not self._make_room_for_waiting(draft, sequence, num_needed, None if parent else match):
            return _Admission.BLOCKED

        if parent is not None:
            blocks.fork(parent, sequence, start)
        elif match is not None:
            copy = blocks.share(sequence, match)
            if copy is not None:
                draft.block_copies.append(copy)
        if sequence.is_known and not holds_blocks:
            draft.readmitted_ids.append(sequence.sequence_id)
        sequence.state = SequenceState.RUNNING
        sequence.is_prefilling = num_tokens - start > 1 or start < sequence.num_prompt
        self._num_prefilling += sequence.is_prefilling
        self._running.add(sequence)
        self._parked.discard(sequence)
        if sequence.request in self._unstarted:
            self._begin(sequence.request, 0 if match is None else match.num_tokens)
        if sequence.is_prefilling:
            blocks.announce(sequence)
        self._schedule(draft, sequence, start + chunk)
        if is_partial:
            draft.num_partial += 1
            draft.num_promised_blocks += blocks.num_needed(sequence, num_tokens)
        return _Admission.ADMITTED

    def _begin(self, request: Request, num_cached_tokens: int) -> None:
        """The first sequence of a request is scheduled for the first time."""
        self._unstarted.remove(request)
        request.first_scheduled_s = self._clock()
        num_prompt = len(request.prompt_token_ids)
        num_cached_tokens = min(num_cached_tokens, num_prompt)
        for sequence in request.sequences:
            sequence.num_cached_tokens = num_cached_tokens
        self.num_prompt_tokens += num_prompt
        self.num_prefix_hit_tokens += num_cached_tokens

    def _must_wait_for_prefix(self, draft: _Draft, sequence: Sequence) -> bool:
        """Whether another sequence is computing the next block of this one's prompt. Nobody waits for a lower
        priority."""
        producer = self._blocks.producer(sequence)
        if producer is None or producer.request.priority > sequence.request.priority:
            return False
        draft.short.pop(sequence, None)
        return True

    def _num_remaining(self, sequence: Sequence) -> int:
        """Tokens that a sequence which runs or waits has still to compute."""
        if sequence.block_table or sequence.num_pending:
            return sequence.num_tokens - sequence.num_computed
        return sequence.num_tokens - self._blocks.find(sequence).num_tokens

    def _schedule(self, draft: _Draft, sequence: Sequence, end: int) -> None:
        """Put tokens [num_computed, end) of a sequence into the step. Blocks and budget have been checked."""
        start, num_tokens = sequence.num_computed, sequence.num_tokens
        is_prefill, samples = sequence.is_prefilling, end == num_tokens
        num_known_blocks = 0
        if not sequence.is_known:
            self._introduce(draft, sequence)
        elif sequence.sequence_id not in draft.readmitted_ids:
            num_known_blocks = len(sequence.block_table)
        copy = self._blocks.allocate(sequence, num_tokens if sequence.must_progress else end)
        if copy is not None:
            assert not num_known_blocks, "a block that the executor knows was replaced by a copy"
            draft.block_copies.append(copy)
        entry = ScheduledSequence(
            sequence.sequence_id,
            start,
            end - start,
            is_prefill,
            samples,
            [] if sequence.num_pending else sequence.token_ids[start:end],
            sequence.block_table[num_known_blocks:],
        )
        if is_prefill:
            draft.prefills.append(entry)
            draft.prefilling.append(sequence)
            draft.short.pop(sequence, None)
            draft.budget_tokens -= end - start
        else:
            draft.decodes.append(entry)
            draft.decoding.append(sequence)
            draft.budget_tokens -= 1
        if sequence.num_preemptions and start < sequence.num_recompute:
            self.num_recomputed_tokens += min(end, sequence.num_recompute) - start
        sequence.num_computed = end
        sequence.num_in_flight += 1
        if samples:
            sequence.num_pending += 1
            sequence.must_progress = False
            self._num_prefilling -= is_prefill
            sequence.is_prefilling = False

    def _introduce(self, draft: _Draft, sequence: Sequence) -> None:
        """The sequence's first step: tell the executor what it must know."""
        request = sequence.request
        sequence.is_known = True
        eos_token_ids = () if request.sampling.ignore_eos else self._limits.eos_token_ids
        draft.new_sequences.append(
            NewSequence(sequence.sequence_id, sequence.choice, request.sampling, sequence.num_prompt, eos_token_ids)
        )

    def _chunk(self, draft: _Draft, sequence: Sequence, remaining: int) -> int:
        """How many of its `remaining` tokens a prefill may compute in this step; 0: none."""
        if not self._limits.enable_chunked_prefill:
            return remaining if remaining <= draft.budget_tokens else 0
        left_to_others = sum(draft.short.values()) - draft.short.get(sequence, 0)
        return min(remaining, self._max_chunk, draft.budget_tokens - left_to_others)

    def _reserve_for_short(self, draft: _Draft) -> None:
        """Set aside tokens for a few short prompts, so that they do not queue behind a long one's many chunks.

        Short is what fits into an equal share of the budget among max_num_partial_prefills; one share stays for
        the long ones, which take it, and all that is left, in their order.
        """
        num_shares = self._limits.max_num_partial_prefills
        share = min(draft.budget_tokens // num_shares, self._max_chunk)
        if num_shares < 2 or share < 1 or not self._limits.enable_chunked_prefill:
            return
        if self._num_prefilling:
            for sequence in self._running.sequences:
                remaining = sequence.num_tokens - sequence.num_computed
                if sequence.is_prefilling and remaining <= share and len(draft.short) < num_shares - 1:
                    draft.short[sequence] = remaining
        num_places = min(self._max_running - len(self._running), num_shares - 1 - len(draft.short))
        num_available = self._blocks.num_available_blocks
        for sequence in islice(self._waiting, max(0, num_places)):
            if self._blocks.num_needed(sequence, sequence.num_tokens) > num_available:
                break
            remaining = self._num_remaining(sequence)
            if remaining <= share:
                draft.short[sequence] = remaining

    def _find_parent(self, draft: _Draft, sequence: Sequence) -> tuple[Sequence | None, bool]:
        """(another choice whose prompt blocks can be shared now, or whether one is computing them)."""
        shared, must_wait = _shared_len(sequence), False
        for sibling in sequence.request.sequences:
            if sibling.state is not SequenceState.RUNNING or not shared:
                continue
            if sibling.is_prefilling or sibling in draft.prefilling:
                must_wait = True  # a copy of this step would be made before the block is written
            elif sibling.num_computed >= shared:
                return sibling, False
        return None, must_wait

    # pressure

    def _make_room(self, draft: _Draft, sequence: Sequence, num_needed: int, index: int) -> bool:
        """Preempt until so many blocks are free for running[index]; False if it must wait or was itself the victim.

        Blocks are free at once: steps run in the order of their launch, so one in flight that still reads them is
        done before their next owner writes.
        """
        draft.has_preempted = True
        while self._blocks.num_available_blocks < num_needed:
            victim = max(self._parked, key=_parked_rank, default=None) or self._running_victim(index)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _running_victim(self, index: int) -> Sequence | None:
        """The lowest in rank from running[index] on: those before it are in the step already."""
        running = self._running.sequences
        for place in range(len(running) - 1, max(index, 1) - 1, -1):
            if not running[place].must_progress:
                return running[place]
        return None

    def _make_room_for_waiting(self, draft: _Draft, sequence: Sequence, num_needed: int, match: Match | None) -> bool:
        """Whether so many blocks are free for a waiting sequence, beside those of its match and what those who run
        will need soon.

        Takes blocks from paused sequences and from those behind it in the queue, never from running ones.
        """
        blocks = self._blocks
        wanted = num_needed + draft.num_promised_blocks + len(self._running) // 4
        if match is not None and blocks.has_room(match, wanted):
            return True
        while (num_available := blocks.num_available_blocks - (blocks.num_claimed(match) if match else 0)) < wanted:
            key = order_key(sequence)
            behind = [other for other in self._parked if other.state is SequenceState.PAUSED or order_key(other) > key]
            if sum([len(other.block_table) for other in behind]) + num_available < wanted:
                return False
            self._preempt(max(behind, key=_parked_rank))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks away; it is computed again when it is readmitted."""
        if sequence.state is SequenceState.RUNNING:
            self._leave_running(sequence)
            sequence.state = SequenceState.WAITING
            self._waiting.add(sequence)
        self._parked.discard(sequence)
        sequence.is_prefilling = False
        sequence.num_recompute = sequence.num_computed
        self._blocks.free(sequence)
        sequence.must_progress = True
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted_ids[sequence.sequence_id] = None

    # ends

    def _ending(self, sequence: Sequence) -> tuple[str, str, int] | None:
        """(finish_reason, cause, stop_token_id) if its last token ends it. A stop wins over a limit."""
        token_id, sampling = sequence.token_ids[-1], sequence.request.sampling
        if token_id in sequence.stop_ids and sequence.num_output > sampling.min_tokens:
            is_eos = token_id in self._eos_ids and not sampling.ignore_eos
            return "stop", "eos" if is_eos else "stop_id", token_id
        if len(sequence.token_ids) >= sequence.max_len:
            return "length", "", -1
        return None

    def _end(
        self, sequence: Sequence, token_ids: list[int], finish_reason: str, cause: str, stop_token_id: int
    ) -> SequenceOutput:
        sequence.finish_reason, sequence.finish_cause = finish_reason, cause
        return SequenceOutput(sequence, token_ids, finish_reason, cause, stop_token_id)

    def _finish(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is; its blocks stay while a launched step touches it."""
        if sequence.state is SequenceState.RUNNING:
            self._leave_running(sequence)
        elif sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        self._paused.discard(sequence)
        self._parked.discard(sequence)
        sequence.state = SequenceState.FINISHED
        if not sequence.num_in_flight:
            self._release(sequence)
        request = sequence.request
        if request.is_finished:
            self._unstarted.discard(request)
            if request.deadline_at_s < inf:
                del self._deadlines[bisect_left(self._deadlines, self._deadline(request))]

    def _release(self, sequence: Sequence) -> None:
        """Free an ended sequence's blocks; the next plan lets the executor forget it."""
        self._blocks.forget(sequence)
        if sequence.finish_reason == "error":
            self._blocks.drop_cached()  # among them its own blocks, in which something was no number
        if sequence.is_known:
            self._preempted_ids.pop(sequence.sequence_id, None)
            self._finished_ids.append(sequence.sequence_id)

    def _leave_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._num_prefilling -= sequence.is_prefilling
        self._blocks.withdraw(sequence)

    def _deadline(self, request: Request) -> tuple[float, int, Request]:
        return request.deadline_at_s, request.sequences[0].sequence_id, request


def _shared_len(sequence: Sequence) -> int:
    """Tokens that a choice can share with another: the prompt, but not its own last token, whose logits it needs."""
    return min(sequence.num_prompt, len(sequence.token_ids) - 1)


def _parked_rank(sequence: Sequence) -> tuple[bool, tuple[int, float, int]]:
    """Highest for whom blocks are taken from first: paused before waiting, then by rank."""
    return sequence.state is SequenceState.PAUSED, sequence.rank
