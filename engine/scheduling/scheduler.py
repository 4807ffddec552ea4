"""Who runs in the next step, and with how many tokens; what the sampled tokens mean.

A step costs the host O(sequences in it) and O(blocks that change hands); nothing is rebuilt from one to the next.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from math import inf
from typing import Final

import msgspec

from engine.kv.block_manager import BlockManager
from engine.plan import ScheduledSequence, StepPlan, StepTokens
from engine.scheduling.admission import Admission
from engine.scheduling.beams import Beams
from engine.scheduling.draft import StepDraft
from engine.scheduling.latency import LatencyModel
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.pressure import Pressure
from engine.scheduling.queue import QueueFull
from engine.scheduling.ranking import BestOf
from engine.scheduling.roster import Roster
from engine.scheduling.stall import StallBound
from engine.scheduling.transfers import Transfers
from engine.scheduling.usage import Counts, KVUsage, measure
from engine.sequence import Request, Sequence, SequenceOutput, SequenceState
from engine.transfer import Transfer, TransferResult
from streamkv.errors import InvalidField
from streamkv.sampling import SamplingParams

_NO_BLOCKS: Final[list[int]] = []
_NO_TOKENS: Final[list[int]] = []
"""Of most decodes; a plan is read only."""


class Scheduler:
    """Plans steps and takes in their tokens. One thread; the clock, in seconds, is handed in.

    Order: running decodes, then running prefills, then waiting sequences as queue.py says. Blocks are allocated per
    step. When none is free, sequences lose theirs: first those that do not run, then the running one of the lowest
    rank (priority, arrival), never the highest, and none that was readmitted and has not sampled since. They come back
    with the same tokens, computed again or copied from host memory.

    Why pressure never ends in a standstill: a readmitted sequence gets at once all blocks for the tokens it has, and
    one is only fetched where there is room for these, so both come to their next token without another's help; what is
    fetched or leaves the device does so whatever else happens, and whoever waits for it is woken by its end; and a
    sequence that only waits gives its blocks up to any that runs.

    Every plan must be launched, in order, and its tokens handed to `update`, in the same order. `plan` may be called
    before the tokens of the step before are there: a sequence whose newest token is still on the device runs on it.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        block_manager: BlockManager,
        clock: Callable[[], float],
        latency: LatencyModel | None = None,
    ) -> None:
        """latency: predicts the steps; the caller lets it observe them. Without one, nothing is known of their time."""
        self._limits = limits
        self._blocks = block_manager
        self._clock = clock
        self._eos_ids = frozenset(limits.eos_token_ids)
        self.max_len = min(limits.max_model_len, block_manager.capacity_tokens)
        """Most tokens of a sequence: the model's limit, or what one sequence alone can hold."""
        self.counts = Counts()

        self._roster = Roster(clock, limits.ageing_s)
        self._transfers = Transfers(limits.preemption_mode, block_manager, self.counts, latency)
        self._pressure = Pressure(block_manager, self._roster, self._transfers, self.counts)
        self._best_of = BestOf(self._finish, self.counts)
        self._beams = Beams(
            limits, block_manager, self._roster, self._pressure, self.counts, self._finish, self._take_sequence_id
        )
        self._admission = Admission(
            limits, block_manager, self._roster, self._pressure, self._transfers, self._beams, self.counts, clock
        )
        has_target = limits.itl_target_s > 0 and limits.enable_chunked_prefill
        self._stall_bound = StallBound(limits, latency or LatencyModel()) if has_target else None
        self._launched: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._ended: list[SequenceOutput] = []
        """Ends that no step brought about; the next `update` or `expire` hands them out."""
        self._next_sequence_id = 0
        self._next_step = 0

    # figures

    @property
    def has_runnable(self) -> bool:
        """Whether `plan` or `expire` may have something. With no step and no transfer in flight it is exact."""
        return bool(len(self._roster.running) or len(self._roster.waiting) or self._ended)

    @property
    def has_work(self) -> bool:
        """Something could run now, or is running."""
        return self.has_runnable or bool(self._launched)

    @property
    def next_deadline_s(self) -> float:
        """When `expire` will next have something, on the scheduler's clock; inf: never."""
        if self._ended:
            return self._clock()
        return self._roster.next_deadline_s

    @property
    def num_running(self) -> int:
        """Sequences."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Sequences."""
        return len(self._roster.waiting)

    @property
    def num_paused(self) -> int:
        """Sequences."""
        return len(self._roster.paused)

    @property
    def num_block_copies(self) -> int:
        """Blocks copied because they were to be written and were shared."""
        return self._blocks.num_block_copies

    @property
    def newest_launched(self) -> list[Sequence]:
        """Those in the newest plan, in its order. Of two plans with the same sequences the lists are equal."""
        return self._launched[-1][1]

    def kv_usage(self) -> KVUsage:
        """O(blocks owned)."""
        return measure(self._blocks)

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
        if sampling.ranks_choices and sampling.num_sequences > self._limits.max_running:
            raise InvalidField(
                "beam_width" if sampling.beam_width else "best_of",
                f"is {sampling.num_sequences}, and no more than {self._limits.max_running} sequences run at once "
                f"(max_num_seqs, max_num_batched_tokens); lower it to {self._limits.max_running}",
            )
        if len(self._roster.unstarted) >= self._limits.max_queue + max(
            0, self._limits.max_running - len(self._roster.running)
        ):
            raise QueueFull(len(self._roster.unstarted))

    def add(self, request: Request) -> None:
        """Take a request in and make its sequences. The caller has called `check`.

        A continuation's choice that has ended by its prior tokens is handed out by the next `update` or `expire`.
        What is_held does not run before `release`.
        """
        sampling = request.sampling
        stop_ids = frozenset() if sampling.ignore_eos else self._eos_ids
        if sampling.stop_token_ids:
            stop_ids = stop_ids.union(sampling.stop_token_ids)
        num_prompt = len(request.prompt_token_ids)
        request.tells_prompt = sampling.prompt_logprobs >= 0 and num_prompt > 1
        request.sequences = []
        request.first_sequence_id = self._next_sequence_id
        for choice in range(1 if sampling.beam_width else sampling.num_sequences):
            prior = request.prior_token_ids[choice] if choice < len(request.prior_token_ids) else []
            sequence = Sequence(
                sequence_id=self._next_sequence_id,
                request=request,
                choice=choice,
                token_ids=[*request.prompt_token_ids, *prior],
                num_prompt=num_prompt,
                max_len=min(self.max_len, num_prompt + sampling.max_tokens),
                stop_ids=stop_ids,
                follows_grammar=sampling.grammar is not None,
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
                self._roster.wait(sequence)
        if sampling.beam_width:
            self._next_sequence_id += sampling.beam_width - 1  # its further beams stand beside it in rank
            self._beams.add(request, request.sequences[0].max_len)
        elif sampling.ranks_choices:
            self._best_of.add(request)
        if request.is_finished:
            return
        self._roster.add(request)
        if request.is_held:
            for sequence in request.sequences:
                if sequence.state is SequenceState.WAITING:
                    self._roster.pause(sequence)

    def release(self, request: Request) -> None:
        """What a request was held for is there: it waits for its turn, unless its reader is slow."""
        request.is_held = False
        if not request.is_paused:
            self._let_wait(request)

    def abort(self, request: Request, cause: str, choice: int = -1) -> list[SequenceOutput]:
        """End what still goes on of a request, or of one choice. Blocks that a launched step touches are freed when it
        is collected. Where choices are ranked nothing of them is handed out but their end."""
        outputs = []
        if request.sampling.ranks_choices:
            return (self._beams if request.sampling.beam_width else self._best_of).abort(request, cause)
        for sequence in request.sequences:
            if sequence.state is not SequenceState.FINISHED and choice in (-1, sequence.choice):
                self._finish(sequence)
                outputs.append(self._end(sequence, [], "abort", cause, -1))
        return outputs

    def expire(self) -> list[SequenceOutput]:
        """Abort, with cause `deadline`, what has passed its deadline; hand out ends that no step brought about."""
        outputs, self._ended = self._ended, []
        if self._roster.next_deadline_s < inf:
            now_s = self._clock()
            while (request := self._roster.overdue(now_s)) is not None:
                outputs += self.abort(request, "deadline")
        return outputs

    def pause(self, request: Request) -> None:
        """Deschedule a request. Tokens of launched steps still come; its blocks are the first to be preempted. Beams,
        which can't lose theirs one by one, lose them at once."""
        request.is_paused = True
        group = self._roster.beam_groups.get(request)
        if group is not None:
            self._pressure.set_down(group)
        for sequence in request.sequences:
            if sequence.state is SequenceState.RUNNING or sequence.state is SequenceState.WAITING:
                self._roster.pause(sequence)
                self._blocks.withdraw(sequence)

    def resume(self, request: Request) -> None:
        """Let a paused request wait for its turn again, at its old place and with the blocks that it still has."""
        request.is_paused = False
        if not request.is_held:
            self._let_wait(request)

    def _let_wait(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.state is SequenceState.PAUSED:
                self._roster.resume(sequence)

    # a step

    def plan(self) -> StepPlan | None:
        """The next step, which the caller must launch; None when nothing can run now."""
        roster, admission = self._roster, self._admission
        running = roster.running
        num_decodes = len(running) - running.num_prefilling
        draft = StepDraft(
            self._limits, self._blocks, running, self.counts, self._limits.max_num_batched_tokens - num_decodes
        )
        if not self._beams.rebuild_alone(draft) and not admission.admit_alone(draft):
            if running.num_prefilling or len(roster.waiting):
                if self._stall_bound is not None:
                    draft.bound = self._stall_bound.of_step(running.sequences)
                admission.reserve_for_short(draft)
            self._plan_running(draft)
            if roster.beam_groups:
                self._beams.rebuild(draft)
            if len(roster.waiting) and not draft.has_preempted:
                admission.admit(draft)
        if roster.beam_groups:
            self._ended += self._beams.end_outgrown()
        if draft.is_empty:
            return None
        plan = draft.finish(self._next_step, roster.finished_ids, list(roster.preempted_ids))
        self._next_step += 1
        roster.finished_ids, roster.preempted_ids = [], {}
        self._launched.append((plan, draft.decoding + draft.prefilling))
        return plan

    def update(self, plan: StepPlan, tokens: StepTokens) -> list[SequenceOutput]:
        """Take in the tokens of the oldest launched step. Tokens of sequences that have ended are dropped."""
        launched, sequences = self._launched.popleft()
        assert launched is plan, f"step {plan.step} was collected before step {launched.step}"
        outputs, self._ended = self._ended, []
        sampling = sequences
        if len(tokens.token_ids) < len(sequences):
            sampling = [sequence for sequence, entry in zip(sequences, plan.scheduled, strict=True) if entry.samples]
            for sequence, entry in zip(sequences, plan.scheduled, strict=True):
                if not entry.samples:
                    self._end_step(sequence)
        assert len(sampling) == len(tokens.token_ids), f"step {plan.step} has not one token for each that sampled"
        finished = SequenceState.FINISHED
        for sequence, token_id in zip(sampling, tokens.token_ids, strict=True):
            sequence.num_pending -= 1
            if sequence.state is finished:
                self.counts.num_wasted_tokens += 1
                self._end_step(sequence)
                continue
            sequence.num_in_flight -= 1
            request = sequence.request
            if token_id < 0:
                if request.sampling.beam_width:
                    self._beams.take(sequence, tokens)
                    request.first_token_s = request.first_token_s or self._clock()
                    continue
                sequence.finish_reason = "error"
                self._finish(sequence)
                outputs.append(self._end(sequence, [], "error", tokens.failed[sequence.sequence_id], -1))
                continue
            token_ids = sequence.token_ids
            token_ids.append(token_id)
            if not request.first_token_s:
                request.first_token_s = self._clock()
            if token_id in sequence.stop_ids or len(token_ids) >= sequence.max_len:
                ending = self._ending(sequence)
                if ending is not None:
                    self._finish(sequence)
                    outputs.append(self._end(sequence, [token_id], *ending))
                    continue
            outputs.append(SequenceOutput(sequence, [token_id]))
        if tokens.logprobs:
            outputs = [_with_logprobs(output, tokens) for output in outputs]
        if self._best_of:
            outputs = self._best_of.hold_back(outputs, tokens)
        if self._roster.beam_groups:
            outputs += self._beams.advance()
        if tokens.prompt_logprobs:
            told = tokens.prompt_logprobs
            parts = [
                SequenceOutput(sequence, [], prompt_logprobs=told[sequence.sequence_id])
                for sequence in sequences
                if sequence.sequence_id in told
            ]
            outputs = parts + outputs
        return outputs

    def _end_step(self, sequence: Sequence) -> None:
        """A step that had it was collected, and told nothing of it: it has ended, or its prompt goes on."""
        sequence.num_in_flight -= 1
        if sequence.state is SequenceState.FINISHED and not sequence.num_in_flight:
            self._release(sequence)

    # transfers

    @property
    def num_transfers(self) -> int:
        """Copies between the tiers that were taken and whose result has not come."""
        return self._transfers.num_running

    def take_transfers(self) -> list[Transfer]:
        """What the executor is to start now, in this order. To be called when the plans of a turn are launched,
        whether there were any or not."""
        return self._transfers.take()

    def finish_transfers(self, results: Iterable[TransferResult]) -> None:
        """Take in what the executor has finished. Sequences whose fetch is over can run in the next plan."""
        for sequence in self._transfers.finish(results):
            if not sequence.block_table:
                self._roster.unpark(sequence)

    # planning

    def _plan_running(self, draft: StepDraft) -> None:
        """Every running decode and, in what they leave of the budget, the running prefills; by rank."""
        blocks, running = self._blocks, self._roster.running.sequences
        block_size = blocks.block_size
        decodes, decoding = draft.decodes, draft.decoding
        index = num_kv_tokens = 0
        while index < len(running):
            for sequence in islice(running, index, None):
                start, num_pending = sequence.num_computed, sequence.num_pending
                end = start + 1
                if sequence.is_prefilling or end >= sequence.max_len or (num_pending and sequence.follows_grammar):
                    break
                new_block_ids = _NO_BLOCKS
                # A block that it has already is its own: whoever forks copies the block that both would write, at once.
                if not start % block_size and start >= len(sequence.block_table) * block_size:
                    if not blocks.num_available_blocks:
                        break
                    new_block_ids = [blocks.extend(sequence)]
                token_ids = _NO_TOKENS if num_pending else sequence.token_ids[-1:]
                decodes.append(ScheduledSequence(sequence.sequence_id, start, 1, False, True, token_ids, new_block_ids))
                decoding.append(sequence)
                num_kv_tokens += end
                sequence.num_computed = end
                sequence.num_pending = num_pending + 1
                sequence.num_in_flight += 1
                sequence.must_progress = False
                index += 1
            else:
                break
            index += self._plan_other(draft, sequence, index)
        draft.num_decode_kv_tokens += num_kv_tokens

    def _plan_other(self, draft: StepDraft, sequence: Sequence, index: int) -> int:
        """running[index] is no decode that has what it needs: how many places of the running list are dealt with."""
        if sequence.is_prefilling:
            return self._plan_running_prefill(draft, sequence, index)
        if sequence.num_pending and sequence.follows_grammar:
            return 1  # it sits out until its last token is on the host: what may come next depends on it
        if sequence.num_computed + 1 >= sequence.max_len:
            # The last token that it may have is on its way; or it is a beam, whose group is planned at once.
            return self._beams.plan(draft, sequence, index)
        if self._pressure.make_room(draft, sequence, 1, index):
            return 0  # there is room now
        return sequence.state is SequenceState.RUNNING

    def _plan_running_prefill(self, draft: StepDraft, sequence: Sequence, index: int) -> bool:
        """Whether running[index] still runs, be it with a chunk in this step or without."""
        chunk = draft.chunk(sequence, sequence.num_tokens - sequence.num_computed)
        end = sequence.num_computed + chunk
        if chunk > 0:
            num_needed = self._blocks.num_needed(sequence, end)
            if self._blocks.num_available_blocks >= num_needed or self._pressure.make_room(
                draft, sequence, num_needed, index
            ):
                draft.schedule(sequence, end)
        if sequence.is_prefilling:
            draft.num_partial += 1
            draft.num_promised_blocks += self._blocks.num_needed(sequence, sequence.num_tokens)
        return sequence.state is SequenceState.RUNNING

    # ends

    def _take_sequence_id(self) -> int:
        self._next_sequence_id += 1
        return self._next_sequence_id - 1

    def _ending(self, sequence: Sequence) -> tuple[str, str, int] | None:
        """(finish_reason, cause, stop_token_id) if its last token ends it. A stop wins over a limit."""
        token_id, sampling = sequence.token_ids[-1], sequence.request.sampling
        if token_id in sequence.stop_ids and (sequence.num_output > sampling.min_tokens or sequence.follows_grammar):
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
        self._roster.finish(sequence)
        self._blocks.withdraw(sequence)
        if not sequence.num_in_flight:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free an ended sequence's blocks; the next plan lets the executor forget it."""
        self._blocks.forget(sequence)
        if sequence.finish_reason == "error":
            self._blocks.drop_cached(sequence)  # among them its own blocks, in which something was no number
        self._roster.forget(sequence)


def _with_logprobs(output: SequenceOutput, tokens: StepTokens) -> SequenceOutput:
    sequence = output.sequence
    if sequence.request.sampling.logprobs < 0 or not output.token_ids:
        return output
    return msgspec.structs.replace(output, logprobs=tokens.logprobs[sequence.sequence_id])
