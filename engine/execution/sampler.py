"""Logits → the next token of each row.

A draw is a race: who has weight w is there after an exponentially distributed time divided by w, and the first wins,
with a chance in proportion to its weight (the same as adding Gumbel numbers to the logits). The first race is between
tiles of 1024 ids, each with the sum of its tokens' weights, the second between the tokens of the tile that has won: so
the vocabulary is read once, nothing is sorted, and a token costs no number of its own, where one race between all would
take ten rounds of Philox for each four. The times are of the words of philox4x32 at

    key      seed, low 32 bits | seed, high 32 bits
    counter  position          | choice             | purpose | n

with position = the sampled token's index in its sequence, prompt included; purpose 1 for tiles, of which n has the
times of 4n to 4n + 3, and purpose 0 for tokens, likewise by their places in their tile. So a request that is sent
again as prompt + tokens so far goes on with the same draws.

What the sums of a forward pass are rounded to depends on the batch, and a token should not. A race turns out otherwise
only if two of its times are nearly the same, as the likeliest token does if two logits are: one draw in 600,000, with
SmolLM2-135M in float32. Inverting the cumulative distribution at one uniform number would be cheaper, but there each
token has a border with the next, and all of them move: one draw in 600.

A grammar's mask, biases and penalties (penalties.py) and bans change the logits first, in this order. Then come
temperature, min_p, top_k, top_p, and each filter is a threshold, whose ties are kept; with the weights
w = exp((logit - highest) / temperature):
    min_p   w >= min_p (the likeliest token has weight 1)
    top_k   logit >= the k-th largest logit
    top_p   w >= t for the largest t at which the tokens kept reach top_p of what the filters before have kept

Log probabilities, for who asks for them and where choices are ranked, are the model's own: of the softmax over the
whole vocabulary, before all of that. A beam's row draws nothing: its likeliest tokens are handed back, and the
scheduler chooses.
"""

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.execution.logprobs import logprobs_of
from engine.execution.penalties import LogitChanges
from engine.execution.philox import exponential, philox4x32
from engine.execution.token_masks import TokenMasks
from engine.plan import NewSequence, StepTokens
from streamkv.log import fields
from streamkv.sampling import SamplingParams

_PURPOSE_TOKEN = 0
_PURPOSE_TILE = 1

NO_TOKEN = -1
"""In place of a token id for a row without usable logits."""
UNUSABLE_LOGITS = (
    "the model gave no usable logits for this sequence (a NaN, an infinity, or every token banned), so no token can be "
    "chosen"
)
"""Why there is no token, as the client reads it."""

_RACING_TILE = 1024
"""Ids of a tile in a race. What a draw gives depends on it, and kernels/sampling_rows.py has the same."""
_TILE = 256
"""Ids of a tile otherwise. Maxima and sums of tiles come first: most tiles are never looked at again."""
MIN_TEMPERATURE = 1e-6
"""Below it the division would overflow; the likeliest token has all the weight long before."""
_MAX_SORTED = 2048
"""Weights that are sorted at once; of more, those round the threshold are found first."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampledRow:
    """Whose token a row of logits decides."""

    sequence: NewSequence
    position: int
    """Index in the sequence of the token to be sampled."""
    changes: LogitChanges | None = None
    """Of a sequence with biases or penalties. Only read here."""


def sample_step(logits: torch.Tensor, rows: list[SampledRow], masks: TokenMasks | None = None) -> StepTokens:
    """logits: [len(rows), vocab_size] float32, changed in place → what the step hands back.

    Rows with log probabilities cost a copy of their logits and two passes over it, beams one pass more than `sample`;
    rows with biases or penalties what penalties.py says; the others what `sample` does.
    """
    told = [i for i, row in enumerate(rows) if tells_logprobs(row.sequence.sampling)]
    own = logits[told] if told else logits  # a copy: the model's own
    beams = [i for i, row in enumerate(rows) if row.sequence.sampling.beam_width]
    log_sums: list[float] = logits[beams].logsumexp(-1).tolist() if beams else []
    if masks is not None:
        masks.apply(logits)
    for i, row in enumerate(rows):
        if row.changes is not None:
            row.changes.apply(logits[i])
    token_ids = sample(logits, rows, masks.ending if masks is not None else ())
    tokens = StepTokens(token_ids)
    failed = masks.failed if masks is not None else {}
    for i in failed:
        token_ids[i] = NO_TOKEN
    for i, token_id in enumerate(token_ids):
        if token_id == NO_TOKEN:
            tokens.failed[rows[i].sequence.sequence_id] = failed.get(i, UNUSABLE_LOGITS)
    if told:
        _tell_logprobs(tokens, own, [rows[i].sequence for i in told], [token_ids[i] for i in told])
    for i, log_sum in zip(beams, log_sums, strict=True):
        facts = rows[i].sequence
        if token_ids[i] != NO_TOKEN:
            tokens.candidates[facts.sequence_id] = _likeliest(logits[i], log_sum, facts.num_candidates)
            token_ids[i] = NO_TOKEN
    return tokens


def tells_logprobs(sampling: SamplingParams) -> bool:
    return sampling.logprobs >= 0 or (sampling.best_of > sampling.n)


def _tell_logprobs(
    tokens: StepTokens, logits: torch.Tensor, sequences: list[NewSequence], token_ids: list[int]
) -> None:
    """logits: [len(sequences), vocab_size], the model's own. Who has no token has no log probability either."""
    num_top = max(0, *(facts.sampling.logprobs for facts in sequences))
    values = logprobs_of(logits, torch.tensor(token_ids).clamp(min=0), num_top)
    for index, (facts, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
        if token_id != NO_TOKEN:
            tokens.logprobs[facts.sequence_id] = values.row(index, max(0, facts.sampling.logprobs))


def _likeliest(logits: torch.Tensor, log_sum: float, num: int) -> list[tuple[int, float]]:
    """(token id, log probability) of the `num` highest logits, highest first, the lowest ids on a tie.

    logits: [vocab_size]. Fewer where the others are banned.
    """
    threshold = logits.topk(min(num, len(logits))).values[-1]
    ids = (logits >= threshold).nonzero().view(-1)  # ascending; more than `num` if they tie at the threshold
    values, order = logits[ids].sort(descending=True, stable=True)
    likeliest = zip(ids[order[:num]].tolist(), values[:num].tolist(), strict=True)
    return [(token_id, value - log_sum) for token_id, value in likeliest if value > float("-inf")]


def sample(logits: torch.Tensor, rows: list[SampledRow], ending: Collection[int] = ()) -> list[int]:
    """logits: [len(rows), vocab_size] float32, changed in place by bans → a token id for each row.

    ending: rows that can only end, whatever min_tokens says.
    A row's token depends on its logits and its SampledRow alone. Greedy rows cost one pass over their logits.
    A row whose highest logit is no finite number gets NO_TOKEN, and is logged; the others get theirs.
    """
    if not rows:
        return []
    _ban_stop_ids(logits, rows, ending)
    vocab_size = logits.shape[1]
    if vocab_size % _RACING_TILE:
        logits = F.pad(logits, (0, -vocab_size % _RACING_TILE), value=float("-inf"))
    tiles = logits.view(len(rows), -1, _TILE)
    tile_maxima = tiles.amax(-1)
    maxima, best_tiles = tile_maxima.max(-1)
    highest = maxima.tolist()
    # The first tile that holds the maximum, and the first place in it, are the lowest id on a tie.
    greedy = best_tiles * _TILE + tiles[torch.arange(len(rows)), best_tiles].argmax(-1)
    token_ids: list[int] = greedy.tolist()
    for i, value in enumerate(highest):
        if not math.isfinite(value):
            token_ids[i] = NO_TOKEN
            logger.error(
                "no usable logits; the weights may be damaged or overflow this dtype",
                extra=fields(
                    sequence_id=rows[i].sequence.sequence_id, position=rows[i].position, highest_logit=str(value)
                ),
            )
    drawn = [i for i, row in enumerate(rows) if not row.sequence.sampling.is_greedy and token_ids[i] != NO_TOKEN]
    if drawn:
        times = _draw([rows[i] for i in drawn], logits.shape[1] // _RACING_TILE)
        for i, race in zip(drawn, times, strict=True):
            token_ids[i] = _sample_row(tiles[i], tile_maxima[i], highest[i], rows[i].sequence.sampling, race)
    return token_ids


def _ban_stop_ids(logits: torch.Tensor, rows: list[SampledRow], ending: Collection[int]) -> None:
    """Take end-of-sequence and stop ids from the rows that have fewer than min_tokens tokens."""
    for i, row in enumerate(rows):
        sampling = row.sequence.sampling
        if row.position - row.sequence.num_prompt < sampling.min_tokens and i not in ending:
            banned = {*row.sequence.eos_token_ids, *sampling.stop_token_ids}
            in_vocabulary = [token_id for token_id in banned if token_id < logits.shape[1]]
            if in_vocabulary:
                logits[i, in_vocabulary] = float("-inf")


def _draw(rows: list[SampledRow], num_tiles: int) -> torch.Tensor:
    """→ [len(rows), 1024 + num_tiles or up to 3 more] float64: times of the places in a tile, then of the tiles."""
    num_token_counters, num_tile_counters = _RACING_TILE // 4, -(-num_tiles // 4)
    counter = torch.empty(len(rows), num_token_counters + num_tile_counters, 4, dtype=torch.int64)
    counter[:, :, :2] = torch.tensor([[row.position, row.sequence.choice] for row in rows])[:, None]
    for purpose, counters in (
        (_PURPOSE_TOKEN, counter[:, :num_token_counters]),
        (_PURPOSE_TILE, counter[:, num_token_counters:]),
    ):
        counters[:, :, 2] = purpose
        counters[:, :, 3] = torch.arange(counters.shape[1])
    seeds = [row.sequence.sampling.seed for row in rows]
    key = torch.tensor([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds])[:, None]
    return exponential(philox4x32(counter, key).flatten(1))


def _sample_row(
    tiles: torch.Tensor, tile_maxima: torch.Tensor, highest: float, sampling: SamplingParams, times: torch.Tensor
) -> int:
    """tiles: [num_tiles, 256], one row's logits; tile_maxima: [num_tiles]; highest: their maximum; times: its _draw."""
    inverse_temperature = 1.0 / max(sampling.temperature, MIN_TEMPERATURE)
    limits_count = 0 < sampling.top_k < tiles.numel()
    if limits_count or sampling.min_p > 0.0:
        # No token that the two filters keep is under this logit: at least k tiles reach the k-th largest maximum.
        floor = float("-inf")
        if sampling.min_p > 0.0:
            floor = highest + (math.log(sampling.min_p) - 1e-3) / inverse_temperature - 1e-5 * abs(highest)
        if limits_count and sampling.top_k <= len(tile_maxima):
            floor = max(floor, tile_maxima.topk(sampling.top_k).values[-1].item())
        ids, logits = _candidates(tiles, tile_maxima, floor)
        weights = (logits - highest).mul_(inverse_temperature).exp_()
        kept = weights >= sampling.min_p
        if limits_count and sampling.top_k < len(logits):
            kept &= logits >= logits.topk(sampling.top_k).values[-1]
        ids, weights = ids[kept], weights[kept]
        if sampling.top_p < 1.0:
            weights *= weights >= _top_p_threshold(weights, sampling.top_p * weights.double().sum().item())
        return _first_of_few(ids, weights.double(), times)

    weights = (tiles - highest).mul_(inverse_temperature).exp_()
    tile_sums = weights.sum(-1).double()
    if sampling.top_p < 1.0:
        weights *= weights >= _top_p_threshold(weights.view(-1), sampling.top_p * tile_sums.sum().item())
        tile_sums = weights.sum(-1).double()
    tile = _first_tile(tile_sums.view(-1, _RACING_TILE // _TILE).sum(-1), times)
    return tile * _RACING_TILE + int((times[:_RACING_TILE] / weights.view(-1, _RACING_TILE)[tile].double()).argmin())


def _first_tile(sums: torch.Tensor, times: torch.Tensor) -> int:
    """Who wins between tiles with these weights, [num_tiles] float64, not all 0. Without weight nobody arrives."""
    return int((times[_RACING_TILE : _RACING_TILE + len(sums)] / sums).argmin())


def _first_of_few(ids: torch.Tensor, weights: torch.Tensor, times: torch.Tensor) -> int:
    """The token that wins, of some: ids, ascending, with their weights, float64, not all 0."""
    tiles = ids // _RACING_TILE
    sums = torch.zeros(len(times) - _RACING_TILE, dtype=torch.float64).index_add_(0, tiles, weights)
    here = tiles == _first_tile(sums, times)
    ids = ids[here]
    return int(ids[(times[ids % _RACING_TILE] / weights[here]).argmin()])


def _candidates(tiles: torch.Tensor, tile_maxima: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids, ascending, of the logits that are at least `floor`, and those logits."""
    tile_ids = (tile_maxima >= floor).nonzero().view(-1)
    logits = tiles.index_select(0, tile_ids).view(-1)
    places = (logits >= floor).nonzero().view(-1)
    return tile_ids[places // _TILE] * _TILE + places % _TILE, logits[places]


def _top_p_threshold(weights: torch.Tensor, wanted: float) -> float:
    """The largest t with sum(weights[weights >= t]) >= wanted; 0 if there is none.

    weights: float32, 0 .. 1. A flat distribution leaves tens of thousands of them, so they are not sorted but told
    apart by their bits, which are in the order of the numbers, ten at a time.
    """
    above = 0.0
    for shift in (20, 10, 0):
        if len(weights) <= _MAX_SORTED:
            break
        digits = (weights.view(torch.int32) >> shift) & 1023
        # A weight is at most 1, whose first digit is 1016, so the first round's mask takes nothing away.
        mass_from = above + torch.bincount(digits, weights.double(), 1024).flip(0).cumsum(0).flip(0)
        reached = int((mass_from >= wanted).sum()) - 1
        if reached < 0:
            return 0.0
        above = float(mass_from[reached + 1]) if reached < 1023 else above
        weights = weights[digits == reached]
    descending = weights.sort(descending=True).values
    reached = int(torch.searchsorted(descending.double().cumsum(0), wanted - above))
    return float(descending[min(reached, len(descending) - 1)])
