"""How many blocks a group of beams needs when it begins again."""

import random

import pytest

from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.beam_search import BeamSearch
from engine.sequence import Request, Sequence
from streamkv.sampling import SamplingParams


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("num_prompt", [1, 5, 16])
def test_blocks_for_all_beams_count_what_they_have_in_common_once(num_prompt: int, block_size: int) -> None:
    dice = random.Random(f"{num_prompt} {block_size}")
    prompt = list(range(num_prompt))
    for num_output in (1, 2, 7, 40):
        outputs = {tuple(dice.choices((3, 4), k=num_output)) for _ in range(20)}
        sampling = SamplingParams(seed=0, max_tokens=50, temperature=0.0, beam_width=20)
        request = Request(1, b"", b"", prompt, sampling, 0.0)
        beams = [
            Sequence(number, request, 0, [*prompt, *output], num_prompt, max_len=100)
            for number, output in enumerate(outputs)
        ]
        group = BeamGroup(request, BeamSearch(20, 1.0, frozenset(), 50), 20, [], beams)
        whole = {
            tuple(beam.token_ids[:end])
            for beam in beams
            for end in range(block_size, num_prompt + num_output + 1, block_size)
        }
        num_partial = len(beams) if (num_prompt + num_output) % block_size else 0
        assert group.num_needed_anew(block_size) == len(whole) + num_partial
