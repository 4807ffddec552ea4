"""Logits on the device → tokens on the device, with the definitions of sampler.py and no wait in between.

A sequence's settings stand on the device under its seq_slot, and are copied there when it gets one: a step of plain
sampling needs nothing of the host and can be replayed as a graph. What only some requests ask for (grammars, biases,
penalties, min_tokens, log probabilities, beams) is launched when a row of the step needs it.
"""

import logging
import math
import struct
from dataclasses import dataclass

import torch

from engine.execution.device_changes import DeviceChanges
from engine.execution.device_copies import begin_to_host, to_device
from engine.execution.logprobs import LOWEST, Logprobs
from engine.execution.sampler import MIN_TEMPERATURE, NO_TOKEN, UNUSABLE_LOGITS, SampledRow, tells_logprobs
from engine.execution.token_masks import TokenMasks
from engine.kernels.likeliest import Likeliest, likeliest, tile_sums
from engine.kernels.sampling import FEW_ROWS, sample_tokens
from engine.kernels.sampling_rows import NUM_SETTINGS, SETTINGS_FORMAT, make_sampling_scratch
from engine.plan import NewSequence, StepTokens
from streamkv.log import fields
from streamkv.protocol import TokenLogprobs
from streamkv.sampling import SamplingParams

_NO_ROW = -1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Occupant:
    """The sequence that has a slot."""

    settings: bytes
    """As SETTINGS_FORMAT."""
    counts_row: int
    has_filters: bool
    is_special: bool
    """Its rows always need more than plain sampling, or do until it has min_tokens."""


def _fail(tokens: StepTokens, row: SampledRow) -> None:
    tokens.failed[row.sequence.sequence_id] = UNUSABLE_LOGITS
    logger.error(
        "no usable logits; the weights may be damaged or overflow this dtype",
        extra=fields(sequence_id=row.sequence.sequence_id, position=row.position),
    )


class PendingRows:
    """A step of the full path, whose numbers are on their way to the host."""

    def __init__(
        self,
        rows: list[SampledRow],
        failed: dict[int, str],
        told: list[int],
        logprobs: Logprobs | None,
        beams: list[int],
        candidates: Logprobs | None,
    ) -> None:
        self._rows = rows
        self._failed = failed
        self._told = told
        self._logprobs = logprobs
        self._beams = beams
        self._candidates = candidates

    def finish(self, token_ids: list[int]) -> StepTokens:
        """token_ids: one for each row, changed where a row gets none. Call when the step's event has passed."""
        rows = self._rows
        tokens = StepTokens(token_ids)
        for i, reason in self._failed.items():
            token_ids[i] = NO_TOKEN
            tokens.failed[rows[i].sequence.sequence_id] = reason
        for i, token_id in enumerate(token_ids):
            if token_id == NO_TOKEN and i not in self._failed:
                _fail(tokens, rows[i])
        if self._logprobs is not None:
            num_tops = [max(0, rows[i].sequence.sampling.logprobs) for i in self._told]
            for i, values in zip(self._told, self._logprobs.rows(num_tops), strict=True):
                if token_ids[i] != NO_TOKEN:
                    tokens.logprobs[rows[i].sequence.sequence_id] = values
        if self._candidates is not None:
            offered = zip(self._beams, self._candidates.top_ids.tolist(), self._candidates.top.tolist(), strict=True)
            for i, ids, logprobs in offered:
                if token_ids[i] != NO_TOKEN:
                    facts = rows[i].sequence
                    num = facts.num_candidates
                    likeliest_first = zip(ids[:num], logprobs[:num], strict=True)
                    tokens.candidates[facts.sequence_id] = [pair for pair in likeliest_first if pair[1] > LOWEST]
                    token_ids[i] = NO_TOKEN
        return tokens


class PendingPromptLogprobs:
    """Log probabilities of a prompt's tokens, on their way to the host."""

    def __init__(self, values: Logprobs, num_top: int) -> None:
        self._values = values
        self._num_top = num_top

    def finish(self) -> TokenLogprobs:
        """Call when an event behind the call that began it has passed."""
        return self._values.pack(self._num_top)


class DeviceSampler:
    """Samples for the sequences that have a seq_slot.

    Everything is queued on the current stream, which must be the same for all calls.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        """Raises ValueError for a vocabulary that is too large for the kernels."""
        self._vocab_size = vocab_size
        self._device = device
        self._occupants: list[_Occupant | None] = [None] * max_num_seqs
        self._stale: set[int] = set()
        """Slots whose settings on the device are not their occupant's."""
        self._num_filtered = 0
        self._num_special = 0
        self._settings = torch.zeros(max_num_seqs, NUM_SETTINGS, dtype=torch.int64, device=device)
        self._scratch = make_sampling_scratch(max_num_seqs, vocab_size, device)
        self._changes = DeviceChanges(max_num_seqs, vocab_size, device)

    def add(self, seq_slot: int, facts: NewSequence, output_ids: list[int]) -> None:
        """A sequence gets a slot, in place of who had it.

        output_ids: all tokens that it has generated, in this engine or before; only read if it has penalties.
        Raises ValueError for more biases than a request may have.
        """
        self.remove(seq_slot)
        sampling = facts.sampling
        if sampling.logit_bias:
            self._changes.set_biases(seq_slot, sampling.logit_bias)
        num_bans = 0
        if sampling.min_tokens:
            num_bans = self._changes.set_bans(seq_slot, {*facts.eos_token_ids, *sampling.stop_token_ids})
        counts_row = self._changes.take_counts(facts, output_ids) if sampling.has_penalties else _NO_ROW
        top_k = sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0
        has_filters = not sampling.is_greedy and bool(top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0)
        settings = struct.pack(
            SETTINGS_FORMAT,
            sampling.seed,
            facts.choice,
            top_k,
            sampling.top_p,
            0.0 if sampling.is_greedy else math.log2(math.e) / max(sampling.temperature, MIN_TEMPERATURE),
            sampling.min_p,
            has_filters,
            counts_row,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            len(sampling.logit_bias),
            facts.num_prompt + sampling.min_tokens if num_bans else 0,
            num_bans,
        )
        occupant = _Occupant(settings, counts_row, has_filters, _is_special(sampling) or num_bans > 0)
        self._occupants[seq_slot] = occupant
        self._num_filtered += occupant.has_filters
        self._num_special += occupant.is_special
        self._stale.add(seq_slot)

    def remove(self, seq_slot: int) -> None:
        """Its sequence has ended or lost it. Steps that are on their way may still use it."""
        occupant = self._occupants[seq_slot]
        if occupant is None:
            return
        self._occupants[seq_slot] = None
        self._num_filtered -= occupant.has_filters
        self._num_special -= occupant.is_special
        self._stale.discard(seq_slot)
        if occupant.counts_row != _NO_ROW:
            self._changes.give_back(occupant.counts_row)

    def upload(self) -> None:
        """Copy what `add` has changed to the device. Before the step that samples it, and outside of any graph."""
        if not self._stale:
            return
        packed = bytearray()
        for seq_slot in sorted(self._stale):
            occupant = self._occupants[seq_slot]
            assert occupant is not None
            packed += struct.pack("<q", seq_slot) + occupant.settings
        self._stale.clear()
        values = torch.frombuffer(packed, dtype=torch.int64).view(-1, 1 + NUM_SETTINGS)
        values = to_device(values, self._device)
        self._settings.index_copy_(0, values[:, 0], values[:, 1:])

    @property
    def has_filters(self) -> bool:
        """Whether any sequence with a slot has top_k, top_p or min_p."""
        return self._num_filtered > 0

    def needs_more(self, rows: list[SampledRow]) -> bool:
        """Whether plain sampling is not enough for these rows. O(1) while no sequence asks for more."""
        if not self._num_special:
            return False
        return any(_is_special(row.sequence.sampling) or _is_banned(row) for row in rows)

    def sample(
        self,
        logits: torch.Tensor,
        seq_slots: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        last_tokens: torch.Tensor,
        *,
        filters: bool = True,
    ) -> None:
        """Plain sampling: as engine.kernels.sampling.sample_tokens says. Can be captured; allocates nothing.

        Raises ValueError for `filters` off while a sequence has one.
        """
        if self.has_filters and not filters:
            raise ValueError("a sequence has top_k, top_p or min_p: sample with filters")
        sample_tokens(
            logits, seq_slots, positions, self._settings, token_ids, last_tokens, self._scratch, filters=filters
        )

    def plain_tokens(self, rows: list[SampledRow], token_ids: list[int]) -> StepTokens:
        """What a step hands back that took plain sampling alone. Rows without a token are named and logged."""
        tokens = StepTokens(token_ids)
        for row, token_id in zip(rows, token_ids, strict=True):
            if token_id == NO_TOKEN:
                _fail(tokens, row)
        return tokens

    def sample_more(
        self,
        logits: torch.Tensor,
        rows: list[SampledRow],
        seq_slots: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        last_tokens: torch.Tensor,
        masks: TokenMasks | None,
    ) -> PendingRows:
        """As `sample`, with all that the rows ask for; logits are changed in place. Begins the copies to the host.

        rows: of the first len(rows) logits; what comes behind them is padding.
        """
        samplings = [row.sequence.sampling for row in rows]
        told = [i for i, sampling in enumerate(samplings) if tells_logprobs(sampling)]
        beams = [i for i, sampling in enumerate(samplings) if sampling.beam_width]
        has_biases = any(sampling.logit_bias for sampling in samplings)
        has_penalties = any(sampling.has_penalties for sampling in samplings)
        has_bans = any(_is_banned(row) for row in rows)
        told_rows, beam_rows = self._rows(told), self._rows(beams)
        own, own_rows = logits, told_rows
        if told and (masks is not None or has_biases or has_penalties or has_bans):
            own, own_rows = logits.index_select(0, told_rows), self._rows(list(range(len(told))))
        beam_sums = tile_sums(logits, beam_rows) if beams else None

        changes, settings = self._changes, self._settings
        if masks is not None:
            changes.mask(logits, masks)
        if has_biases:
            changes.add_biases(logits, seq_slots, settings)
        if has_penalties:
            changes.penalise(logits, seq_slots, settings)
        if has_bans:
            changes.ban(logits, seq_slots, positions, settings, masks.ending if masks is not None else set())
        self.sample(logits, seq_slots, positions, token_ids, last_tokens, filters=self.has_filters)
        if has_penalties:
            changes.count(token_ids, seq_slots, settings)

        logprobs = candidates = None
        if told:
            sums = tile_sums(own, own_rows)
            num_top = max(0, *(samplings[i].logprobs for i in told))
            chosen = token_ids.index_select(0, told_rows)
            logprobs = _begin_to_host(likeliest(own, own_rows, sums.maxima, sums, chosen, num_top))
        if beam_sums is not None:
            num = max(rows[i].sequence.num_candidates for i in beams)
            maxima = tile_sums(logits, beam_rows).maxima
            chosen = token_ids.index_select(0, beam_rows)
            candidates = _begin_to_host(likeliest(logits, beam_rows, maxima, beam_sums, chosen, num))
        return PendingRows(rows, masks.failed if masks is not None else {}, told, logprobs, beams, candidates)

    def begin_prompt_logprobs(self, logits: torch.Tensor, token_ids: list[int], num_top: int) -> PendingPromptLogprobs:
        """logits: [m, vocab_size] float32; token_ids: the m tokens of the prompt that they tell of."""
        rows = self._rows(list(range(len(token_ids))))
        sums = tile_sums(logits, rows)
        chosen = to_device(torch.tensor(token_ids, dtype=torch.int32), self._device)
        return PendingPromptLogprobs(
            _begin_to_host(likeliest(logits, rows, sums.maxima, sums, chosen, max(0, num_top))), num_top
        )

    def compile(self) -> None:
        """Have every kernel compiled, by rows of padding and tables of nothing: seconds where no cache has them."""
        max_num_seqs = len(self._occupants)
        device, vocab_size = self._device, self._vocab_size
        last_tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        for num_rows in {min(num_rows, max_num_seqs) for num_rows in (1, FEW_ROWS + 1)}:
            logits = torch.zeros(num_rows, vocab_size, device=device)
            padding = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
            self.sample(logits, padding, padding, padding.clone(), last_tokens)
        self._changes.compile(logits, padding, self._settings)
        rows = torch.zeros(1, dtype=torch.int32, device=device)
        sums = tile_sums(logits, rows)
        likeliest(logits, rows, sums.maxima, sums, rows, 0)

    def _rows(self, rows: list[int]) -> torch.Tensor:
        return to_device(torch.tensor(rows, dtype=torch.int32), self._device)


def _begin_to_host(found: Likeliest) -> Logprobs:
    return Logprobs(begin_to_host(found.chosen), begin_to_host(found.ids), begin_to_host(found.logprobs))


def _is_special(sampling: SamplingParams) -> bool:
    return (
        tells_logprobs(sampling) or sampling.beam_width > 0 or sampling.changes_logits or sampling.grammar is not None
    )


def _is_banned(row: SampledRow) -> bool:
    """Whether it has fewer than min_tokens tokens."""
    return row.position - row.sequence.num_prompt < row.sequence.sampling.min_tokens
