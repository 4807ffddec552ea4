"""The beams of one request: sequences that go on together."""

from collections import Counter
from dataclasses import dataclass, field

from engine.scheduling.beam_search import BeamSearch
from engine.sequence import Request, Sequence, SequenceState


@dataclass(slots=True, eq=False)
class BeamGroup:
    """All beams have the same length, and each step computes all of them or none.

    They lose their blocks together. To begin again they need places and blocks for all, which are held for them
    until each has what is its own: only that much is sure to bring every beam to its next token.
    """

    request: Request
    search: BeamSearch
    width: int
    """Places that it holds while it runs, be there so many beams or not."""
    free_ranks: list[int]
    """Numbers for the ranks of further beams: all of a group stand together in the running list."""
    live: list[Sequence]
    """In the order of the search's totals. At first one, which computes the prompt as any other sequence does."""
    arrived: dict[Sequence, list[tuple[int, float]]] = field(default_factory=dict)
    """Next tokens of the beams whose step has been collected, until those of all are there."""
    has_branched: bool = False
    """The prompt's next tokens have been chosen."""
    is_rebuilding: bool = False
    """Has lost its blocks, and holds what its beams need to compute them again, from then on until they have come to
    their next tokens: so long it may not lose them again."""
    num_held_places: int = 0
    num_held_blocks: int = 0
    num_preemptions: int = 0
    failure: str = ""
    """Why a beam got no next token."""

    @property
    def num_running(self) -> int:
        return sum([beam.state is SequenceState.RUNNING for beam in self.live])

    @property
    def holds_partial(self) -> bool:
        """Whether one of the unfinished prefills that a step may leave is kept for it: its beams that wait need one."""
        return (
            self.is_rebuilding
            and any(beam.state is SequenceState.WAITING for beam in self.live)
            and not any(beam.is_prefilling for beam in self.live)
        )

    @property
    def is_complete(self) -> bool:
        """The next tokens of all beams are there."""
        return len(self.arrived) == len(self.live) and not any(beam.num_pending for beam in self.live)

    @property
    def is_ready(self) -> bool:
        """Every beam waits for nothing but the group's next step."""
        return not self.arrived and all(
            beam.state is SequenceState.RUNNING and not beam.num_pending and not beam.is_prefilling
            for beam in self.live
        )

    def output_of(self, place: int) -> list[int]:
        """A copy of what a beam has generated."""
        beam = self.live[place]
        return beam.token_ids[beam.num_prompt :]

    @property
    def num_owned_blocks(self) -> int:
        return len({block_id for beam in self.live for block_id in beam.block_table})

    def num_needed(self, block_size: int, ref_counts: list[int]) -> int:
        """Blocks that the next step takes, destinations of copies included. The group is ready."""
        if self.live[0].num_computed % block_size == 0:
            return len(self.live)
        owners = Counter(beam.block_table[-1] for beam in self.live)
        # Of those who share a block all but one copy it.
        return sum(count - (count == ref_counts[block_id]) for block_id, count in owners.items())

    def num_needed_anew(self, block_size: int) -> int:
        """Blocks for all tokens of all beams, when none has any. O(width log width) comparisons of outputs: in their
        order, of those before a beam the last one has most in common with it."""
        beams = sorted(self.live, key=_output)
        return sum(
            num_own_blocks(beam, beams[max(place - 1, 0) : place], block_size) for place, beam in enumerate(beams)
        )


def num_own_blocks(beam: Sequence, others: list[Sequence], block_size: int) -> int:
    """Blocks for the tokens of a beam that shares whole blocks with whichever of `others` has most in common.

    However the beams are put in order, each counted with those before it, the sum is the same.
    """
    shared = max((num_common(beam, other) for other in others), default=0)
    return -(-len(beam.token_ids) // block_size) - shared // block_size


def num_common(beam: Sequence, other: Sequence) -> int:
    """First tokens that two beams of a group have in common. O(generated tokens), by comparing slices."""
    tokens, others = beam.token_ids, other.token_ids
    equal, end = beam.num_prompt, min(len(tokens), len(others))
    while equal < end:
        middle = (equal + end + 1) // 2
        if tokens[equal:middle] == others[equal:middle]:
            equal = middle
        else:
            end = middle - 1
    return equal


def _output(beam: Sequence) -> list[int]:
    return beam.token_ids[beam.num_prompt :]
