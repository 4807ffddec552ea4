"""The kernels of plain sampling against engine/execution/sampler.py: the same logits, settings and draws, so the same
tokens. Its own tests hold that one to the definitions."""

import math
import struct
from dataclasses import replace

import pytest
import torch

from engine.execution.sampler import NO_TOKEN, SampledRow, sample
from engine.kernels.sampling import FEW_ROWS, sample_tokens
from engine.kernels.sampling_rows import (
    LIST_SIZE,
    NUM_SETTINGS,
    SETTINGS_FORMAT,
    SamplingScratch,
    make_sampling_scratch,
)
from engine.plan import NewSequence
from streamkv.sampling import SamplingParams

UNTOUCHED = -77
KINDS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.8, "top_p": 0.95},
    {"min_p": 0.05},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.001},
    {"temperature": 2.0, "top_k": 200, "top_p": 0.8},
    {"temperature": 1e-30},
    {"top_k": 1},
    {"top_p": 1e-9},
    {"min_p": 1.0},
    {"temperature": 0.01, "top_k": 100_000, "top_p": 0.999999},
]


def row(position: int = 100, choice: int = 0, seed: int = 1, **settings: float) -> SampledRow:
    sampling = SamplingParams(seed=seed, max_tokens=1000, **settings)  # type: ignore[arg-type]
    return SampledRow(NewSequence(7, choice, sampling, 5, ()), position)


def rows_of_all_kinds() -> list[SampledRow]:
    return [row(100 + i, i % 3, (i * 2**61 + 5) % 2**64, **kind) for i, kind in enumerate(KINDS)]


def settings_of(rows: list[SampledRow], vocab_size: int, device: torch.device) -> torch.Tensor:
    packed = bytearray()
    for one in rows:
        sampling = one.sequence.sampling
        top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
        scale = math.log2(math.e) / max(sampling.temperature, 1e-6) if sampling.temperature else 0.0
        has_filters = bool(sampling.temperature) and bool(top_k or sampling.top_p < 1.0 or sampling.min_p)
        chosen = (sampling.seed, one.sequence.choice, top_k, sampling.top_p, scale, sampling.min_p, has_filters)
        packed += struct.pack(SETTINGS_FORMAT, *chosen, -1, 1.0, 0.0, 0.0, 0, 0, 0)
    return torch.frombuffer(packed, dtype=torch.int64).view(-1, NUM_SETTINGS).to(device)


def sampled(
    logits: torch.Tensor,
    rows: list[SampledRow],
    device: torch.device,
    seq_slots: list[int] | None = None,
    scratch: SamplingScratch | None = None,
    filters: bool = True,
) -> tuple[list[int], list[int]]:
    """(token ids, last tokens). seq_slots: of each row of logits; rows: by slot."""
    num_rows, vocab_size = logits.shape
    seq_slots = list(range(num_rows)) if seq_slots is None else seq_slots
    positions = [rows[seq_slot].position if seq_slot >= 0 else 0 for seq_slot in seq_slots]
    token_ids = torch.full((num_rows,), UNTOUCHED, dtype=torch.int32, device=device)
    last_tokens = torch.full((len(rows),), UNTOUCHED, dtype=torch.int32, device=device)
    sample_tokens(
        logits.to(device),
        torch.tensor(seq_slots, dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
        settings_of(rows, vocab_size, device),
        token_ids,
        last_tokens,
        scratch or make_sampling_scratch(num_rows, vocab_size, device),
        filters=filters,
    )
    return token_ids.tolist(), last_tokens.tolist()


def draw_logits(num_rows: int, vocab_size: int, spread: float, seed: int = 4) -> torch.Tensor:
    return spread * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("vocab_size", "spread"), [(300, 2.0), pytest.param(2049, 4.0, marks=pytest.mark.long)])
def test_rows_of_every_kind_get_the_tokens_of_the_cpu(vocab_size: int, spread: float, device: torch.device) -> None:
    rows = rows_of_all_kinds()
    logits = draw_logits(len(rows), vocab_size, spread)
    assert sampled(logits, rows, device)[0] == sample(logits.clone(), rows)


@pytest.mark.parametrize("kind", [{"top_p": 0.9}, {"top_k": 2500}, {"top_k": 2600, "top_p": 0.7, "min_p": 0.1}])
def test_a_flat_row_that_no_list_holds_gets_the_token_of_the_cpu(kind: dict[str, float], device: torch.device) -> None:
    assert LIST_SIZE < 2500
    logits = draw_logits(1, 4097, 0.5)
    rows = [row(50, seed=2**64 - 1, **kind)]
    assert sampled(logits, rows, device)[0] == sample(logits.clone(), rows)


@pytest.mark.long
@pytest.mark.parametrize(("vocab_size", "spread"), [(4097, 0.05), (9000, 1.0), (9000, 6.0)])
def test_rows_of_every_kind_over_many_positions(vocab_size: int, spread: float, device: torch.device) -> None:
    rows = rows_of_all_kinds()
    logits = draw_logits(len(rows), vocab_size, spread)
    for position in (7, 131_071):
        moved = [replace(one, position=position + i) for i, one in enumerate(rows)]
        assert sampled(logits, moved, device)[0] == sample(logits.clone(), moved)


def test_tokens_that_tie_at_a_threshold_are_all_kept(device: torch.device) -> None:
    """Five tokens have about a fifth each, and the filters would be content with two or three."""
    logits = torch.full((9, 1100), -30.0)
    logits[:, 5] = 0.2
    logits[:, [0, 8, 1024, 1090]] = torch.tensor([0.0, -0.0, 0.0, 0.0])
    rows = [
        row(3 * i + j, **kind)
        for i, kind in enumerate(({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}))
        for j in range(3)
    ]
    tokens = sampled(logits, rows, device)[0]
    assert tokens == sample(logits.clone(), rows)
    assert set(tokens) <= {0, 5, 8, 1024, 1090} and any(token_id > 8 for token_id in tokens)


@pytest.mark.parametrize("num_tied", [2300, pytest.param(4097, marks=pytest.mark.long)])
def test_more_ties_than_a_list_holds_are_all_kept(num_tied: int, device: torch.device) -> None:
    logits = torch.full((1, 4097), -9.0)
    logits[0, :num_tied] = 1.0
    rows = [row(11, top_p=0.5)]
    uniform_row = [row(11, min_p=0.5)]
    tokens = sampled(logits, rows, device)[0]
    assert tokens == sample(logits.clone(), rows) == sampled(logits, uniform_row, device)[0]


def test_greedy_takes_the_lowest_id_on_a_tie(device: torch.device) -> None:
    logits = torch.zeros(3, 2100)
    logits[0, [2099, 1300, 1024]] = 2.0
    logits[1, [700, 511]] = 1.0
    assert sampled(logits, [row(temperature=0.0)] * 3, device, filters=False)[0] == [1024, 511, 0]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_p": 0.5}])
def test_a_row_without_usable_logits_gets_no_token_and_the_others_get_theirs(
    kind: dict[str, float], device: torch.device
) -> None:
    logits = draw_logits(5, 1100, 2.0)
    logits[0, 1050] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3, :1098] = float("-inf")
    rows = [row(i, **kind) for i in range(5)]
    token_ids, last_tokens = sampled(logits, rows, device)
    assert token_ids == [NO_TOKEN] * 3 + sample(logits[3:].clone(), rows[3:])
    assert token_ids[3] >= 1098, "banned tokens are never drawn"
    assert last_tokens == [0, 0, 0, *token_ids[3:]], "it is the next step's input, so it must be a token"


def test_padding_is_neither_read_nor_written(device: torch.device) -> None:
    rows = rows_of_all_kinds()[:4]
    logits = draw_logits(3, 300, 2.0)
    padded = torch.full((5, 300), float("nan"))
    padded[[0, 2, 3]] = logits
    scratch = make_sampling_scratch(8, 300, device)
    token_ids, last_tokens = sampled(padded, rows, device, [3, -1, 0, 2, -1], scratch)
    expected = sample(logits.clone(), [rows[3], rows[0], rows[2]])
    assert token_ids == [expected[0], UNTOUCHED, expected[1], expected[2], UNTOUCHED]
    assert last_tokens == [expected[1], UNTOUCHED, expected[2], expected[0]]
    assert not scratch.arrivals.any(), "the next step begins anew"


def test_a_row_gets_the_same_token_alone_and_in_any_batch(device: torch.device) -> None:
    """With more rows than FEW_ROWS a program has several tiles."""
    rows = rows_of_all_kinds()[:6]
    logits = draw_logits(6, 1100, 3.0)
    many = torch.cat((logits, torch.zeros(FEW_ROWS, 1100)))
    together = sampled(many, rows, device, [*range(6), *[-1] * FEW_ROWS])[0]
    assert together[:6] == sample(logits.clone(), rows)
    for i in (0, 1, 3):
        assert sampled(logits[i : i + 1], rows[i : i + 1], device)[0] == together[i : i + 1]


def test_logits_may_be_rows_of_a_wider_matrix(device: torch.device) -> None:
    wide = draw_logits(2, 320, 2.0).to(device)
    rows = [row(3, top_k=9), row(4, temperature=0.0)]
    assert sampled(wide[:, 16:316], rows, device)[0] == sample(wide[:, 16:316].cpu().clone(), rows)


def test_no_rows_need_no_launch(device: torch.device) -> None:
    scratch = make_sampling_scratch(1, 300, device)
    assert sampled(torch.empty(0, 300), [row()], device, [], scratch) == ([], [UNTOUCHED])


def test_refuses_what_does_not_fit_together(device: torch.device) -> None:
    scratch = make_sampling_scratch(2, 1500, device)
    with pytest.raises(ValueError, match="float32 in whole rows"):
        sampled(torch.zeros(1, 1500, dtype=torch.float16), [row()], device, scratch=scratch)
    with pytest.raises(ValueError, match="do not fit the scratch"):
        sampled(torch.zeros(3, 1500), [row()] * 3, device, scratch=scratch)
    with pytest.raises(ValueError, match="do not fit the scratch"):
        sampled(torch.zeros(1, 900), [row()], device, scratch=scratch)
    with pytest.raises(ValueError, match="vocab_size must be between 1 and"):
        make_sampling_scratch(1, 2**20 + 1, device)


def exact_distribution(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """From the words of the definition, with a full sort, in float64."""
    probabilities = torch.softmax(logits.double() / temperature, -1)
    order = torch.argsort(probabilities, descending=True)
    if top_k:
        probabilities[order[top_k:]] = 0.0
        probabilities /= probabilities.sum()
    before = probabilities[order].cumsum(0) - probabilities[order]
    probabilities[order[before >= top_p]] = 0.0
    return probabilities / probabilities.sum()


def check_distribution(
    logits: torch.Tensor, settings: dict[str, float], num_draws: int, rows_at_once: int, device: torch.device
) -> None:
    """Chi-square over the tokens that are expected often enough, the others taken together."""
    expected = exact_distribution(
        logits.cpu(), settings.get("temperature", 1.0), int(settings.get("top_k", 0)), settings.get("top_p", 1.0)
    )
    repeated = logits.repeat(rows_at_once, 1)
    drawn: list[int] = []
    for at in range(0, num_draws, rows_at_once):
        rows = [row(at + i, seed=2**63 + 77, **settings) for i in range(rows_at_once)]
        drawn += sampled(repeated, rows, device)[0]
    counts = torch.bincount(torch.tensor(drawn), minlength=len(expected))
    assert counts[expected == 0].sum() == 0, "a token that the filters drop was drawn"
    often = expected * len(drawn) >= 5
    observed = torch.cat((counts[often], counts[~often].sum()[None])).double()
    wanted = torch.cat((expected[often], expected[~often].sum()[None])) * len(drawn)
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = ((observed - wanted) ** 2 / wanted).sum().item()
    degrees = max(1, len(wanted) - 1)
    # Wilson and Hilferty's approximation of the quantile that is passed once in 10,000.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert chi_square < limit


CHI_SQUARE_KINDS = [
    {"temperature": 1.3},
    {"top_k": 20},
    {"temperature": 1.5, "top_p": 0.8},
    {"top_k": 50, "top_p": 0.9},
]


@pytest.mark.long
@pytest.mark.parametrize("settings", CHI_SQUARE_KINDS[::3])
def test_draws_follow_the_exact_probabilities(settings: dict[str, float], device: torch.device) -> None:
    check_distribution(draw_logits(1, 60, 1.5)[0], settings, 256, 32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", CHI_SQUARE_KINDS)
@pytest.mark.parametrize("spread", [0.5, 2.5])
def test_many_draws_follow_the_exact_probabilities(
    settings: dict[str, float], spread: float, device: torch.device
) -> None:
    check_distribution(draw_logits(1, 50_257, spread)[0].to(device), settings, 40 * 256, 256, device)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [128_256, 151_936, 262_208])
@pytest.mark.parametrize("spread", [0.5, 1.0, 4.0])
def test_compiled_kernels_agree_with_the_cpu_at_full_size(vocab_size: int, spread: float, device: torch.device) -> None:
    """Weights of float32 summed in another order may decide a race in which two are there at nearly the same time, or
    move the threshold of a filter past the token that wins: one draw in 100,000, so one in all is much."""
    rows = (rows_of_all_kinds() * 22)[:256]
    rows = [replace(one, position=1000 + i) for i, one in enumerate(rows)]
    logits = draw_logits(256, vocab_size, spread)
    token_ids = sampled(logits, rows, device)[0]
    expected = sample(logits.clone(), rows)
    different = [i for i in range(256) if token_ids[i] != expected[i]]
    assert len(different) <= 1, [(i, KINDS[i % len(KINDS)], token_ids[i], expected[i]) for i in different]
    assert not any(rows[i].sequence.sampling.is_greedy for i in different)
    for i in range(0, 256, 17):
        assert sampled(logits[i : i + 1], rows[i : i + 1], device)[0] == token_ids[i : i + 1]


@pytest.mark.gpu
def test_a_captured_step_serves_other_logits_and_settings(device: torch.device) -> None:
    vocab_size, rows = 128_256, rows_of_all_kinds()
    num_rows = len(rows)
    logits = draw_logits(num_rows, vocab_size, 2.0).to(device)
    seq_slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    positions = torch.tensor([one.position for one in rows], dtype=torch.int32, device=device)
    settings = settings_of(rows, vocab_size, device)
    token_ids, last_tokens = torch.zeros_like(seq_slots), torch.zeros_like(seq_slots)
    scratch = make_sampling_scratch(num_rows, vocab_size, device)
    parts = (logits, seq_slots, positions, settings, token_ids, last_tokens, scratch)
    sample_tokens(*parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_tokens(*parts)
    for seed in (1, 2):
        changed = draw_logits(num_rows, vocab_size, 3.0, seed)
        turned = rows[seed:] + rows[:seed]
        logits.copy_(changed)
        positions.copy_(torch.tensor([one.position for one in turned], dtype=torch.int32))
        settings.copy_(settings_of(turned, vocab_size, device))
        graph.replay()
        assert token_ids.tolist() == sampled(changed, turned, device)[0]
