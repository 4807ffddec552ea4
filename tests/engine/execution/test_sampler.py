"""Sampling: the distribution of each filter, and what a draw may depend on."""

import logging
import random
from collections.abc import Iterator

import pytest
import torch

from engine.execution.sampler import NO_TOKEN, UNUSABLE_LOGITS, SampledRow, sample, sample_step
from engine.plan import NewSequence
from streamkv.protocol import unpack_floats
from streamkv.sampling import SamplingParams


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of small operations are faster without a second thread, above all where others keep it busy."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def row(
    position: int = 10,
    *,
    choice: int = 0,
    num_prompt: int = 5,
    eos: tuple[int, ...] = (),
    seed: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    best_of: int = 0,
    beam_width: int = 0,
    sequence_id: int = 9,
) -> SampledRow:
    sampling = SamplingParams(
        seed=seed,
        max_tokens=1000,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop_token_ids=list(stop_token_ids),
        best_of=best_of,
        beam_width=beam_width,
    )
    return SampledRow(NewSequence(sequence_id, choice, sampling, num_prompt, eos), position)


def expected_distribution(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Straight from the words of the definition, with a full sort, in float64."""
    probabilities = torch.softmax(logits.double() / temperature, -1)
    probabilities[probabilities < min_p * probabilities.max()] = 0.0
    if top_k > 0:
        probabilities[torch.argsort(probabilities, descending=True)[top_k:]] = 0.0
    probabilities /= probabilities.sum()
    order = torch.argsort(probabilities, descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[before >= top_p]] = 0.0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 40, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (2.0, 0, 0.99, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.5, 20, 0.8, 0.02),
    ],
)
@pytest.mark.parametrize("vocab_size", [300, 512])
def test_draws_follow_the_exact_probabilities(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    expected = expected_distribution(logits, temperature, top_k, top_p, min_p)
    rows = [
        row(position, seed=77, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for position in range(3000)
    ]
    check_draws(logits, expected, rows)


@pytest.mark.parametrize("settings", [{}, {"top_k": 30}, {"top_p": 0.8}])
def test_draws_between_tiles_follow_the_exact_probabilities(settings: dict[str, float]) -> None:
    """Of the 2,500 ids most are unlikely; tokens that stand out lie close together and in all three tiles."""
    logits = torch.randn(2500, generator=torch.Generator().manual_seed(5)) - 3
    logits[[0, 1, 2, 900, 1023, 1024, 1025, 1900, 2047, 2048, 2499]] = torch.linspace(4.0, 5.5, 11)
    expected = expected_distribution(logits, 1.0, int(settings.get("top_k", 0)), settings.get("top_p", 1.0), 0.0)
    check_draws(logits, expected, [row(position, seed=2**40 + 3, **settings) for position in range(3000)])


def check_draws(logits: torch.Tensor, expected: torch.Tensor, rows: list[SampledRow]) -> None:
    """Chi-square of what `rows` draw; all have the same logits and settings."""
    num_draws = len(rows)
    counts = torch.bincount(torch.tensor(sample(logits.repeat(num_draws, 1), rows)), minlength=len(logits))
    assert counts[expected == 0].sum() == 0, "a token that the filters drop was drawn"
    # Chi-square over the tokens that are expected often enough, the others taken together.
    often = expected * num_draws >= 5
    observed = torch.cat((counts[often], counts[~often].sum()[None])).double()
    wanted = torch.cat((expected[often], expected[~often].sum()[None])) * num_draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    degrees = max(1, len(wanted) - 1)
    # Wilson and Hilferty's approximation of the quantile that is passed once in 10,000.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert chi_square < limit


def mixed_rows(num_rows: int) -> list[SampledRow]:
    kinds = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_k": 50},
        {"temperature": 1.8, "top_p": 0.95},
        {"min_p": 0.05},
        {"temperature": 1.2, "top_k": 400, "top_p": 0.9, "min_p": 0.001},
    ]
    return [row(100 + i, seed=i * 2**40 + 5, choice=i % 3, **kinds[i % len(kinds)]) for i in range(num_rows)]


@pytest.mark.parametrize("vocab_size", [1000, 49152])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(vocab_size: int) -> None:
    logits = torch.randn(24, vocab_size, generator=torch.Generator().manual_seed(4)) * 3
    rows = mixed_rows(24)
    together = sample(logits.clone(), rows)
    alone = [sample(logits[i : i + 1].clone(), rows[i : i + 1])[0] for i in range(24)]
    order = random.Random(5).sample(range(24), 24)
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert alone == together
    assert shuffled == [together[i] for i in order]


def test_the_draw_depends_on_seed_choice_and_position_alone() -> None:
    logits = torch.zeros(1, 4096)
    draw = lambda **settings: sample(logits.clone(), [row(**settings)])[0]  # noqa: E731
    first = draw(position=50, seed=3, choice=1)
    assert draw(position=50, seed=3, choice=1, num_prompt=40) == first, "a continuation must go on with the same draws"
    others = [
        draw(position=51, seed=3, choice=1),
        draw(position=50, seed=4, choice=1),
        draw(position=50, seed=3 + 2**32, choice=1),
        draw(position=50, seed=3, choice=2),
    ]
    assert len({first, *others}) == 5


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.95}, {"top_k": 3000}, {"min_p": 0.02}])
def test_rounding_of_logits_hardly_ever_changes_a_draw(settings: dict[str, float]) -> None:
    """They are rounded as the batch has it, and many at once move the same way. If a draw were an id at a place of the
    cumulative distribution, some 150 of these 400 would change."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(400, 8000, generator=generator)
    rounded = logits + 5e-4 * torch.linspace(-3, 3, 8000).sin()
    rows = [row(position, seed=9, **settings) for position in range(400)]
    changed = sum(a != b for a, b in zip(sample(logits, rows), sample(rounded, rows), strict=True))
    assert changed <= 1


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [999, 300, 256]] = 2.0
    logits[1, [700, 511]] = 1.0
    assert sample(logits, [row(temperature=0.0)] * 3) == [256, 511, 0]


def test_top_k_1_is_greedy_at_any_temperature() -> None:
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(6))
    assert sample(logits.clone(), [row(i, temperature=2.0, top_k=1) for i in range(8)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("settings", [{"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-30}])
def test_extreme_filters_leave_the_likeliest_token(settings: dict[str, float]) -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(7)) * 20
    assert sample(logits.clone(), [row(i, **settings) for i in range(4)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.97])
@pytest.mark.parametrize("spread", [0.01, 1.0, 9.0])
def test_top_p_keeps_the_smallest_set_of_a_large_vocabulary(spread: float, top_p: float) -> None:
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(8)) * spread
    expected = expected_distribution(logits, 1.0, 0, top_p, 0.0)
    rows = [row(position, top_p=top_p) for position in range(100)]
    drawn = torch.tensor(sample(logits.repeat(100, 1), rows))
    # Sums of 20,000 float32 weights may differ in their last digits: a token on the border may fall either way.
    border = expected[expected > 0].min() * (1 - 1e-4)
    assert (torch.softmax(logits.double(), -1)[drawn] / top_p >= border).all()
    assert drawn.unique().numel() >= min(20, int((expected > 0).sum()) // 4)


def test_top_p_over_a_flat_distribution_looks_at_the_whole_vocabulary() -> None:
    logits = torch.full((400, 10_000), -12.0)
    logits[:, 0] = 0.0
    drawn = sample(logits, [row(i, top_p=0.9, temperature=1.5) for i in range(400)])
    # Weight 1 against 9,999 times e**-8: the first token has 0.23 of all. The others are all tied, so all stay.
    assert 0.15 < drawn.count(0) / 400 < 0.31
    assert max(drawn) > 9_000


def test_min_tokens_bans_end_of_sequence_and_stop_ids_until_they_are_generated() -> None:
    logits = torch.zeros(1, 600)
    logits[0, [2, 17, 40]] = torch.tensor([9.0, 8.0, 7.0])
    settings = {"num_prompt": 10, "eos": (2,), "stop_token_ids": (17, 100_000), "min_tokens": 3, "temperature": 0.0}
    at = lambda position: sample(logits.clone(), [row(position, **settings)])[0]  # noqa: E731
    assert [at(position) for position in (10, 11, 12, 13)] == [40, 40, 40, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_numbers_gets_no_token_and_the_others_get_theirs(
    bad: float, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(3))
    alone = [sample(logits[i : i + 1].clone(), [row(temperature=temperature)])[0] for i in (0, 2)]
    logits[1, 423] = bad
    with caplog.at_level(logging.ERROR):
        token_ids = sample(logits, [row(temperature=temperature)] * 3)
    assert token_ids == [alone[0], NO_TOKEN, alone[1]]
    assert [record.message.partition(";")[0] for record in caplog.records] == ["no usable logits"]


def test_a_ban_of_everything_leaves_no_token() -> None:
    rows = [row(5, eos=(0, 1, 2), min_tokens=1, temperature=0.0), row(5, eos=(0, 1), min_tokens=1, temperature=0.0)]
    assert sample(torch.zeros(2, 3), rows) == [NO_TOKEN, 2]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 700), float("-inf"))
    logits[:, [3, 699]] = 0.0
    assert set(sample(logits, [row(i) for i in range(500)])) == {3, 699}


def test_no_rows_need_no_logits() -> None:
    assert sample(torch.empty(0, 100), []) == []


def test_ranked_rows_get_the_models_own_log_probabilities_and_others_draw_as_ever() -> None:
    """Before bans, temperature and filters: over the whole vocabulary."""
    logits = 3 * torch.randn(4, 700, generator=torch.Generator().manual_seed(6))
    logits[:, 2] = 9.0
    rows = [
        row(sequence_id=0),
        row(sequence_id=1, best_of=3, temperature=0.7, top_p=0.8, top_k=50),
        row(sequence_id=2, best_of=3, temperature=0.0, eos=(2,), min_tokens=20),
        row(sequence_id=3, best_of=1),
    ]
    drawn = sample(logits.clone(), rows)
    tokens = sample_step(logits.clone(), rows)
    assert tokens.token_ids == drawn
    assert drawn[2] != 2
    expected = torch.log_softmax(logits.double(), -1)
    told = {i: unpack_floats(values.chosen) for i, values in tokens.logprobs.items()}
    assert told == {i: [pytest.approx(expected[i, drawn[i]].item(), abs=1e-5)] for i in (1, 2)}, (
        "a row whose choices are not ranked has none"
    )
    assert not tokens.candidates and not tokens.failed


@pytest.mark.parametrize("vocab_size", [7, 600])
@pytest.mark.parametrize("min_tokens", [0, 20])
def test_a_beam_is_given_its_likeliest_tokens_the_lowest_id_first_on_a_tie(vocab_size: int, min_tokens: int) -> None:
    width, stops = 4, (3, 5)
    # Few different values: dozens tie, also where the list ends.
    logits = torch.randint(0, 4, (3, vocab_size), generator=torch.Generator().manual_seed(8)).float()
    logits[1, 0] = float("-inf")
    rows = [
        row(sequence_id=i, beam_width=width, temperature=0.0, eos=(3,), stop_token_ids=(5,), min_tokens=min_tokens)
        for i in range(3)
    ]
    tokens = sample_step(logits.clone(), rows)
    assert tokens.token_ids == [NO_TOKEN] * 3
    for i in range(3):
        logprobs = torch.log_softmax(logits[i].double(), -1).tolist()
        allowed = [
            token_id
            for token_id in range(vocab_size)
            if logprobs[token_id] > float("-inf") and not (min_tokens and token_id in stops)
        ]
        best = sorted(allowed, key=lambda token_id: (-logits[i, token_id].item(), token_id))[: width + len(stops)]
        assert tokens.candidates[i] == [(token_id, pytest.approx(logprobs[token_id], abs=1e-5)) for token_id in best]


def test_a_ranked_row_without_numbers_is_named_failed_alone() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(9))
    logits[0, 7] = float("nan")
    logits[1, 7] = float("inf")
    rows = [row(sequence_id=i, beam_width=2 * (i != 1), best_of=2 * (i == 1), temperature=0.0) for i in range(3)]
    tokens = sample_step(logits, rows)
    assert tokens.failed == {0: UNUSABLE_LOGITS, 1: UNUSABLE_LOGITS}
    assert list(tokens.candidates) == [2]
    assert not tokens.logprobs
