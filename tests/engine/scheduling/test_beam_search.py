"""The rule of beam search: against one that looks at everything, and against all sequences there are."""

from collections.abc import Callable
from itertools import product
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.beam_search import BeamSearch, Hypothesis

Model = Callable[[tuple[int, ...]], list[float]]
"""Generated tokens so far → log probability of each next one. Sixteenths, so that every sum is exact."""


@st.composite
def models(draw: st.DrawFn) -> tuple[int, Model]:
    """(vocabulary's size, model). Few different values, so that many ties arise; -inf for a ban."""
    vocab_size = draw(st.integers(2, 6))
    values = st.one_of(st.integers(-24, -1).map(lambda value: value / 16), st.just(-0.25), st.just(-inf))
    row = st.lists(values, min_size=vocab_size, max_size=vocab_size).filter(lambda row: max(row) > -inf)
    rows = draw(st.lists(row, min_size=1, max_size=7))

    def logprobs(tokens: tuple[int, ...]) -> list[float]:
        return rows[sum((token + 1) * (place + 3) for place, token in enumerate(tokens)) % len(rows)]

    return vocab_size, logprobs


def search(
    model: Model, width: int, length_penalty: float, stop_ids: frozenset[int], max_output: int
) -> list[Hypothesis]:
    """As the engine uses it: each beam offers no more candidates than it must."""
    beam_search = BeamSearch(width, length_penalty, stop_ids, max_output)
    outputs: list[list[int]] = [[]]
    while outputs:
        candidates = []
        for output in outputs:
            likeliest = sorted(enumerate(model(tuple(output))), key=lambda pair: (-pair[1], pair[0]))
            candidates.append([pair for pair in likeliest[: width + len(stop_ids)] if pair[1] > -inf])
        live = beam_search.step(len(outputs[0]) + 1, outputs.__getitem__, candidates)
        outputs = [[*outputs[continuation.beam], continuation.token_id] for continuation in live]
    return beam_search.kept


def look_at_everything(
    model: Model, width: int, length_penalty: float, stop_ids: frozenset[int], max_output: int
) -> list[tuple[list[int], bool, float]]:
    """The same rule in plain words, with every token of every beam in one list."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    kept: list[tuple[list[int], bool, float]] = []
    for length in range(1, max_output + 1):
        everything = [
            (-(total + logprob), token, place)
            for place, (tokens, total) in enumerate(beams)
            for token, logprob in enumerate(model(tuple(tokens)))
            if logprob > -inf
        ]
        everything.sort()
        following = []
        for place, (negative, token, beam) in enumerate(everything):
            tokens = [*beams[beam][0], token]
            if token not in stop_ids and length < max_output:
                following.append((tokens, -negative))
            elif place < width:
                kept.append((tokens, token in stop_ids, -negative / length**length_penalty))
        kept = sorted(kept, key=lambda hypothesis: -hypothesis[2])[:width]
        beams = following[:width]
        if not beams or (len(kept) == width and beams[0][1] / length**length_penalty <= kept[-1][2]):
            break
    return kept


@settings(max_examples=250, deadline=None)
@given(
    models(),
    st.integers(1, 5),
    st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    st.sets(st.integers(0, 5), max_size=3),
    st.integers(1, 7),
)
def test_the_search_keeps_what_one_that_looks_at_everything_keeps(
    sized: tuple[int, Model], width: int, length_penalty: float, stop_ids: set[int], max_output: int
) -> None:
    vocab_size, model = sized
    stops = frozenset(stop_ids & set(range(vocab_size)))
    found = search(model, width, length_penalty, stops, max_output)
    expected = look_at_everything(model, width, length_penalty, stops, max_output)
    assert [(hypothesis.token_ids, hypothesis.is_stopped, hypothesis.score) for hypothesis in found] == expected


@settings(max_examples=60, deadline=None)
@given(models(), st.sets(st.integers(0, 5), max_size=2), st.integers(1, 4), st.integers(1, 3))
def test_without_length_penalty_enough_beams_find_the_likeliest_of_all_sequences(
    sized: tuple[int, Model], stop_ids: set[int], max_output: int, num_wanted: int
) -> None:
    """A sum never grows, so the rule's stop is exact then; with as many beams as sequences nothing is left out."""
    vocab_size, model = sized
    totals = []
    for length in range(1, max_output + 1):
        for tokens in product(range(vocab_size), repeat=length):
            stops_before_its_end = any(token in stop_ids for token in tokens[:-1])
            if stops_before_its_end or (length < max_output and tokens[-1] not in stop_ids):
                continue
            totals.append(sum(model(tokens[:place])[token] for place, token in enumerate(tokens)))
    likeliest = sorted((total for total in totals if total > -inf), reverse=True)
    found = search(model, max(1, len(totals)), 0.0, frozenset(stop_ids), max_output)
    assert [hypothesis.score for hypothesis in found[:num_wanted]] == likeliest[:num_wanted]


def test_a_search_that_is_cut_keeps_its_beams_beside_what_was_finished() -> None:
    beam_search = BeamSearch(2, 1.0, frozenset([0]), 10)
    live = beam_search.step(1, lambda beam: [], [[(0, -1.0), (1, -2.0), (2, -3.0)]])
    assert [continuation.token_id for continuation in live] == [1, 2]
    live = beam_search.step(2, [[1], [2]].__getitem__, [[(3, -0.5), (4, -9.0)], [(3, -0.25), (0, -9.0)]])
    outputs = [[continuation.beam + 1, continuation.token_id] for continuation in live]
    beam_search.cut(outputs.__getitem__)
    assert [hypothesis.token_ids for hypothesis in beam_search.kept] == [[0], [1, 3]]
    assert [hypothesis.is_stopped for hypothesis in beam_search.kept] == [True, False]
    assert [hypothesis.score for hypothesis in beam_search.kept] == [-1.0, -1.25]
