"""Where each sequence stands in its grammar, and the masks that follow from that, filled beside the step's forward."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import llguidance
import torch

from engine.execution.grammar import CompiledGrammar, GrammarCompiler, reason_of
from engine.execution.sampler import SampledRow
from engine.execution.token_masks import WORD_BITS, TokenMasks
from engine.plan import NewSequence, StepPlan
from streamkv.errors import InvalidField


@dataclass(slots=True)
class _Following:
    """A sequence on its way through its grammar."""

    facts: NewSequence
    pending: list[int]
    """Tokens that its matcher has not taken in."""
    num_output: int
    """Tokens generated, the pending ones included."""
    matcher: llguidance.LLMatcher | None = None
    compiled: CompiledGrammar | None = None
    """What its matcher came from."""
    taken: list[int] = field(default_factory=list)
    """Tokens that its matcher has taken in."""
    is_renewed: bool = False
    """It went on with the grammar compiled anew. Once only: so that who needs too much by itself comes to an end."""


class SequenceGrammars:
    """The matchers of all sequences with a grammar that a plan has named and none has named finished.

    Belongs to the thread that computes the steps. Per step: apply, begin_masks, the masks' result, remember.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int, num_threads: int = 1) -> None:
        """num_threads: for the masks of one step, beside the thread that waits for them."""
        self._compiler = compiler
        self._num_words = -(-vocab_size // WORD_BITS)
        self._following: dict[int, _Following] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._filling = llguidance.LLExecutor(num_threads=num_threads)

    def __len__(self) -> int:
        return len(self._following)

    def apply(self, plan: StepPlan) -> None:
        """Forget and learn what the plan says. A preempted sequence stays where it is in its grammar."""
        for sequence_id in plan.finished_sequence_ids if self._following else ():
            self._following.pop(sequence_id, None)
        for facts in plan.new_sequences:
            if facts.sampling.grammar is not None:
                prior = facts.token_ids[facts.num_prompt :]
                self._following[facts.sequence_id] = _Following(facts, prior, len(prior))

    def begin_masks(self, rows: list[SampledRow]) -> "Future[TokenMasks] | None":
        """The masks of a step's sampled rows, filled on a thread; None if none of them has a grammar."""
        if not self._following:
            return None
        following = {i: one for i, row in enumerate(rows) if (one := self._following.get(row.sequence.sequence_id))}
        for i, one in following.items():
            if rows[i].position != one.facts.num_prompt + one.num_output:
                raise ValueError(
                    f"sequence {one.facts.sequence_id} samples position {rows[i].position}, but its grammar knows "
                    f"{one.num_output} tokens behind {one.facts.num_prompt}"
                )
        return self._thread.submit(self._fill, following) if following else None

    def remember(self, rows: list[SampledRow], token_ids: list[int]) -> None:
        """What the rows of begin_masks have sampled; negative: nothing."""
        if not self._following:
            return
        for row, token_id in zip(rows, token_ids, strict=True):
            one = self._following.get(row.sequence.sequence_id)
            if one is not None and token_id >= 0:
                one.pending.append(token_id)
                one.num_output += 1

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _fill(self, following: dict[int, _Following]) -> TokenMasks:
        """following: by row."""
        masks = TokenMasks(list(following), torch.zeros(len(following), self._num_words, dtype=torch.int32))
        filled: list[tuple[llguidance.LLMatcher, int]] = []
        for place, (row, one) in enumerate(following.items()):
            try:
                filled.append((self._advance(one), place))
            except InvalidField as error:
                masks.failed[row] = str(error)
        self._compute(filled, masks.bits)
        renewed: list[tuple[llguidance.LLMatcher, int]] = []
        for matcher, place in filled:
            row = masks.rows[place]
            if matcher.is_error():
                try:
                    renewed.append((self._renew(following[row]), place))
                except InvalidField as error:
                    masks.failed[row] = str(error)
        self._compute(renewed, masks.bits)
        for matcher, place in renewed:
            if matcher.is_error():
                row = masks.rows[place]
                masks.failed[row] = f"{_field(following[row])}: the grammar is too much here: {reason_of(matcher)}"
        for place, row in enumerate(masks.rows):
            if row not in masks.failed and not _allows_more(following[row].facts, masks.bits[place]):
                masks.ending.add(row)
        return masks

    def _compute(self, matchers: list[tuple[llguidance.LLMatcher, int]], bits: torch.Tensor) -> None:
        """matchers: each with its place in `bits`."""
        if matchers:
            self._filling.unsafe_compute_mask_ptr(
                matchers, bits.data_ptr(), self._num_words * bits.element_size(), len(bits)
            )

    def _advance(self, one: _Following) -> llguidance.LLMatcher:
        """Take in the pending tokens. Raises InvalidField where that cannot be."""
        if one.matcher is None:
            grammar = one.facts.sampling.grammar
            assert grammar is not None
            one.compiled = self._compiler.get(grammar)
            one.matcher = one.compiled.begin()
        pending, one.pending = one.pending, []
        one.taken += pending
        if pending and not one.matcher.consume_tokens(pending):
            return self._renew(one)
        return one.matcher

    def _renew(self, one: _Following) -> llguidance.LLMatcher:
        """Go on with the grammar compiled anew, if it can be that others have filled the old one. Raises InvalidField
        where it is its own tokens that cannot be followed."""
        grammar = one.facts.sampling.grammar
        assert grammar is not None and one.matcher is not None and one.compiled is not None
        if one.is_renewed:
            raise InvalidField(grammar.field, f"the grammar is too much here: {reason_of(one.matcher)}")
        one.is_renewed = True
        one.compiled = self._compiler.renew(grammar, one.compiled)
        one.matcher = one.compiled.begin()
        if one.taken and not one.matcher.consume_tokens(one.taken):
            raise InvalidField(grammar.field, f"cannot be followed behind the tokens so far: {reason_of(one.matcher)}")
        return one.matcher


def _field(one: _Following) -> str:
    assert one.facts.sampling.grammar is not None
    return one.facts.sampling.grammar.field


def _allows_more(facts: NewSequence, bits: torch.Tensor) -> bool:
    """Whether a token is allowed that does not end the sequence."""
    rest = bits.clone()
    for token_id in {*facts.eos_token_ids, *facts.sampling.stop_token_ids}:
        word, bit = divmod(token_id, WORD_BITS)
        if word < len(rest):
            rest[word] &= ~(1 << bit) if bit < WORD_BITS - 1 else 0x7FFFFFFF
    return bool(rest.any())
