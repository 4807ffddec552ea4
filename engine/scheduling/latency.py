"""How long a step takes: predicted from what is in it, fitted at the start, corrected by what is measured."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Final

from engine.plan import StepLoad

_KNEES: Final = (64, 256)
"""Tokens of a step at which the price of one more may change."""
_NUM_TERMS: Final = 8
_TOKENS: Final = range(1, 4)
"""The terms that share a step's tokens: up to the first knee, from there to the second, beyond it."""
_DECODES: Final = 6

_SMOOTHING: Final = 0.05
"""Weight, in the fit, of the wish that a token costs the same on both sides of a knee, against one sample."""
_MAX_SWEEPS: Final = 2000
_FIT_TOLERANCE: Final = 1e-7

# All relative: of a term's coefficient, or of a step's time.
_OWN_DOUBT: Final = 0.2
_COMMON_DOUBT: Final = 0.1
_MOST_DOUBT: Final = 0.5
_OWN_DRIFT: Final = 0.004
_COMMON_DRIFT: Final = 0.02
_NOISE: Final = 0.1
_MAX_SURPRISE: Final = 0.3
_LEAST_SHARE: Final = 0.1
"""Of a sampled step's time that a term may grow to at once though the fit found nothing of it."""

_MAX_GROWTH: Final = 2
"""A step is trusted to at most so many times the tokens of the largest one that was measured."""
_RECENT_STEPS: Final = 64
_ALIKE_STEPS: Final = 8
_ENOUGH_STEPS: Final = 8
_FIRST_OVERRUN: Final = 1.2
_LEAST_OVERRUN: Final = 1.05
_MAX_OVERRUN: Final = 1.5
_TRANSFER_MEMORY: Final = 0.9
_LEAD_SHARE: Final = 0.2
"""Of a step's predicted time: how far that may be wrong."""
_LEAD_S: Final = 0.004
"""What a plan, its launch and a sleep that ends late take at most."""
_CALIBRATED_TRANSFER_S: Final = 0.1
"""What a speed that is known from the start weighs, as if a copy of this length had been seen."""


@dataclass(slots=True)
class _AlikeSteps:
    """Sums over the newest steps, all of which decode for the same number of sequences."""

    num_steps: int = 0
    num_decodes: int = 0
    num_kv_tokens: int = 0
    seconds: float = 0.0

    @property
    def mean_load(self) -> StepLoad:
        return StepLoad(num_decodes=self.num_decodes, num_decode_kv_tokens=self.num_kv_tokens // self.num_steps)


class LatencyModel:
    """Predicts the time of a step. Never raises for what it is told and never answers with NaN. Times are in seconds.

    The time is a sum of terms with coefficients that are never negative: a constant (all weights are read once,
    whatever the tokens), the tokens of the step in three segments (a roofline, S. Williams et al., CACM 52(4), 2009:
    on a device that waits for its memory a token is free up to the knee and is paid for beyond it; where arithmetic
    is scarce from the first token on, the segments come out alike), query-key pairs and context read by the prefills,
    decoding sequences, and KV tokens that they read.

    The coefficients are fitted to the samples by non-negative least squares over relative errors, one coordinate after
    the other (V. Franc, V. Hlaváč, M. Navara, CAIP 2005). Each step observed later corrects them by a Kalman filter
    (R. E. Kalman, 1960) whose state drifts in two ways: all coefficients together (the machine has become slower), and
    each alone (the fit was wrong about it). What is measured of one kind of step so holds for the others, too, until
    they are measured. A surprise beyond 0.3 of the prediction counts as one of 0.3 (P. J. Huber's clipping, in the
    filter as by C. J. Masreliez and R. D. Martin, 1977): one slow step moves the prediction by a few per cent, a
    machine that stays twice as slow is followed within some 20 steps.

    Without samples it knows nothing, answers 0, and learns from the first steps that it observes.
    """

    def __init__(
        self,
        samples: Iterable[tuple[StepLoad, float]] = (),
        block_bytes: int = 0,
        host_bytes_per_s: float = 0.0,
        token_buckets: Sequence[int] = (),
    ) -> None:
        """samples: steps measured at the start, with their seconds. The others as in DeviceLimits."""
        self._token_buckets = token_buckets
        self._coefficients = [0.0] * _NUM_TERMS
        self._covariance = [[0.0] * _NUM_TERMS for _ in range(_NUM_TERMS)]
        self._known = [False] * _NUM_TERMS
        """Terms that a sample or an observed step had."""
        self._max_tokens = 0
        """Of the largest step known."""
        self._errors: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._mixed_ratios: deque[float] = deque(maxlen=_RECENT_STEPS)
        """measured / predicted of steps that decode and prefill."""
        self._alike = _AlikeSteps()
        self._block_bytes = max(0, block_bytes)
        is_speed_known = isfinite(host_bytes_per_s) and host_bytes_per_s > 0
        self._transfer_s = _CALIBRATED_TRANSFER_S if is_speed_known else 0.0
        self._transfer_bytes = host_bytes_per_s * self._transfer_s if is_speed_known else 0.0
        usable = [(load, seconds) for load, seconds in samples if isfinite(seconds) and seconds > 0]
        if usable:
            self._fit(usable)

    # predictions

    def predict_s(self, load: StepLoad) -> float:
        """How long such a step takes; 0: unknown."""
        return sum([weight * amount for weight, amount in zip(self._coefficients, self._terms(load), strict=True)])

    def plan_next_from_s(self, begun_s: float, load: StepLoad) -> float:
        """When to plan the step behind one with `load` that began at begun_s: soon enough for the device not to wait,
        and behind a long step no sooner, since whoever comes meanwhile would miss it."""
        return begun_s + (1.0 - _LEAD_SHARE) * self.predict_s(load) - _LEAD_S

    def prefill_tokens_within(self, target_s: float, load: StepLoad, context_tokens: int) -> int:
        """The most prefill tokens of one sequence, behind `context_tokens` of its own, that a step with `load` may
        take in addition and be done within target_s, by the prediction. 0: none, or nothing is known of such steps.

        At most twice the tokens of the largest step that was measured: how a device behaves far beyond is a guess.
        """
        least, most = 0, _MAX_GROWTH * self._max_tokens - load.num_prefill_tokens - load.num_decodes
        if most <= 0 or self.predict_s(load.with_chunk(most, context_tokens)) <= target_s:
            return max(0, most)
        while least + 1 < most:  # `least` fits, or is 0, and `most` doesn't
            middle = (least + most) // 2
            if self.predict_s(load.with_chunk(middle, context_tokens)) <= target_s:
                least = middle
            else:
                most = middle
        return least

    def recompute_s(self, num_tokens: int) -> float:
        """Device time that computing a sequence's first num_tokens adds to steps that run anyway; 0: unknown."""
        return self.predict_s(StepLoad().with_chunk(num_tokens, 0)) - self._coefficients[0]

    def transfer_s(self, num_blocks: int) -> float:
        """How long copying so many blocks between device and host memory takes; inf: unknown."""
        if not self._transfer_bytes or not self._block_bytes:
            return inf
        return num_blocks * self._block_bytes * self._transfer_s / self._transfer_bytes

    def drain_s(
        self, num_prefill_tokens: int, num_output_tokens: int, num_at_once: int, context_tokens: int, step_tokens: int
    ) -> float:
        """How long it takes to compute so many prompt tokens and then so many output tokens; 0: unknown.

        num_at_once: sequences that decode together, each behind `context_tokens`. step_tokens: the largest prefill of
        a step. Steps that mix the two are shorter than both, so this is an upper bound, if not by much.
        """
        chunk = StepLoad().with_chunk(max(1, step_tokens), context_tokens // 2)
        at_once = max(1, num_at_once)
        decodes = StepLoad(num_decodes=at_once, num_decode_kv_tokens=at_once * context_tokens)
        prefill_s = num_prefill_tokens * self.predict_s(chunk) / chunk.num_prefill_tokens
        return prefill_s + num_output_tokens * self.predict_s(decodes) / at_once

    # measurements

    @property
    def error(self) -> float:
        """Mean of |predicted - measured| / measured over the last 64 steps; 0 before the first."""
        return sum(self._errors) / len(self._errors) if self._errors else 0.0

    @property
    def overrun(self) -> float:
        """How many times their prediction steps that both decode and prefill may take, 1.05 to 1.5: all but the worst
        one of the last 64 stayed within it. 1.2 before eight were seen."""
        ratios = sorted(self._mixed_ratios)
        if len(ratios) < _ENOUGH_STEPS:
            return _FIRST_OVERRUN
        return min(max(ratios[-2], _LEAST_OVERRUN), _MAX_OVERRUN)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step took so long. Steps that only decode for the same number of sequences are learnt from eight at a
        time, so that a steady one costs next to nothing; any other costs some thirty microseconds."""
        if not (isfinite(seconds) and seconds > 0):
            return
        alike = self._alike
        if alike.num_steps and (load.num_prefill_tokens or load.num_decodes != alike.num_decodes):
            self._learn(alike.mean_load, alike.seconds / alike.num_steps, alike.num_steps)
            alike.num_steps = 0
        if load.num_prefill_tokens:
            self._learn(load, seconds, 1)
            return
        if not alike.num_steps:
            alike.num_decodes, alike.num_kv_tokens, alike.seconds = load.num_decodes, 0, 0.0
        alike.num_steps += 1
        alike.num_kv_tokens += load.num_decode_kv_tokens
        alike.seconds += seconds
        # What is not known at all is learnt at once.
        if alike.num_steps == _ALIKE_STEPS or not self._known[_DECODES]:
            self._learn(alike.mean_load, alike.seconds / alike.num_steps, alike.num_steps)
            alike.num_steps = 0

    def _learn(self, load: StepLoad, seconds: float, num_steps: int) -> None:
        """Correct the coefficients by the mean time of num_steps steps."""
        amounts = self._terms(load)
        active = [i for i, amount in enumerate(amounts) if amount]
        coefficients, covariance = self._coefficients, self._covariance
        predicted_s = sum([coefficients[i] * amounts[i] for i in active])
        self._errors.append(abs(predicted_s - seconds) / seconds)
        if predicted_s and load.num_prefill_tokens and load.num_decodes:
            self._mixed_ratios.append(seconds / predicted_s)
        self._max_tokens = max(self._max_tokens, load.num_prefill_tokens + load.num_decodes)
        is_new = self._meet(amounts, active, seconds)
        # What is in doubt already drifts no further, or whatever was not measured for long would follow any one step.
        drifting = [
            weight if row[i] < (_MOST_DOUBT * weight) ** 2 else 0.0
            for i, (weight, row) in enumerate(zip(coefficients, covariance, strict=True))
        ]
        for i in active:
            covariance[i][i] += num_steps * (_OWN_DRIFT * drifting[i]) ** 2
        spread = [sum([row[i] * amounts[i] for i in active]) for row in covariance]
        variance = max(0.0, sum([spread[i] * amounts[i] for i in active]))
        limit_s = inf if is_new else max(_MAX_SURPRISE * predicted_s, min(3 * sqrt(variance), predicted_s))
        surprise_s = min(max(seconds - predicted_s, -limit_s), limit_s)
        total = variance + (_NOISE * (predicted_s or seconds)) ** 2 / num_steps
        gains = [value / total for value in spread]
        drifts = [num_steps * _COMMON_DRIFT**2 * weight for weight in drifting]
        self._covariance = [
            [value - gain * other + drift * weight for value, other, weight in zip(row, spread, drifting, strict=True)]
            for row, gain, drift in zip(covariance, gains, drifts, strict=True)
        ]
        self._coefficients = [
            max(0.0, weight + gain * surprise_s) for weight, gain in zip(coefficients, gains, strict=True)
        ]
        for i in _TOKENS[1:]:
            if not self._known[i]:  # a token beyond a knee that no step has passed is priced as one before it
                self._coefficients[i] = self._coefficients[i - 1]

    def observe_transfer(self, num_bytes: int, elapsed_s: float) -> None:
        """A copy between device and host memory took so long. Short copies weigh less than long ones."""
        if num_bytes <= 0 or not (isfinite(elapsed_s) and elapsed_s > 0):
            return
        if self._transfer_bytes:
            # As for steps: one that was held up counts for little.
            expected_s = num_bytes * self._transfer_s / self._transfer_bytes
            elapsed_s = min(max(elapsed_s, expected_s / 2), expected_s * 2)
        self._transfer_s = self._transfer_s * _TRANSFER_MEMORY + elapsed_s
        self._transfer_bytes = self._transfer_bytes * _TRANSFER_MEMORY + num_bytes

    # the terms

    def _terms(self, load: StepLoad) -> list[float]:
        """The amounts that the coefficients stand for. A prompt's tokens are those that the device computes, padding
        and all, so that a chunk is sized to leave none."""
        num_tokens = load.num_prefill_tokens + load.num_decodes
        if load.num_prefill_tokens and self._token_buckets and num_tokens < self._token_buckets[-1]:
            num_tokens = self._token_buckets[bisect_left(self._token_buckets, num_tokens)]
        first, second = _KNEES
        return [
            1.0,
            min(num_tokens, first),
            min(max(num_tokens - first, 0), second - first),
            max(num_tokens - second, 0),
            load.num_prefill_pairs,
            load.num_prefill_kv_tokens,
            load.num_decodes,
            load.num_decode_kv_tokens,
        ]

    # the fit

    def _fit(self, samples: list[tuple[StepLoad, float]]) -> None:
        """Coefficients, what is known of them, and how far they are to be doubted, from measured steps."""
        rows = [[amount / seconds for amount in self._terms(load)] for load, seconds in samples]
        wishes = [1.0] * len(rows)
        scale = _SMOOTHING * _KNEES[0] * len(samples) / sum([seconds for _, seconds in samples])
        for i in _TOKENS[:-1]:
            row = [0.0] * _NUM_TERMS
            row[i], row[i + 1] = scale, -scale
            rows.append(row)
            wishes.append(0.0)
        self._coefficients = _non_negative_least_squares(rows, wishes)
        for i in range(_NUM_TERMS):
            most = max([row[i] for row in rows[: len(samples)]])
            self._known[i] = most > 0
            doubt = max(_OWN_DOUBT * self._coefficients[i], _LEAST_SHARE / most if most else 0.0)
            for j in range(_NUM_TERMS):
                common = _COMMON_DOUBT**2 * self._coefficients[i] * self._coefficients[j]
                self._covariance[i][j] = common + (doubt**2 if i == j else 0.0)
        self._max_tokens = max([load.num_prefill_tokens + load.num_decodes for load, _ in samples])

    def _meet(self, amounts: list[float], active: list[int], seconds: float) -> bool:
        """Terms that no step had before may explain all of this one's time, until others tell more. Whether there are
        any."""
        new = [i for i in active if not self._known[i]]
        for i in new:
            self._known[i] = True
            self._covariance[i][i] += (seconds / amounts[i]) ** 2
        return bool(new)


def _non_negative_least_squares(rows: list[list[float]], wishes: list[float]) -> list[float]:
    """x >= 0 that makes the squares of rows @ x - wishes least. Columns of zeros get 0."""
    num_columns = len(rows[0])
    norms = [sqrt(sum([row[i] ** 2 for row in rows])) for i in range(num_columns)]
    scaled = [[value / norm if norm else 0.0 for value, norm in zip(row, norms, strict=True)] for row in rows]
    gram = [[sum([row[i] * row[j] for row in scaled]) for j in range(num_columns)] for i in range(num_columns)]
    gradient = [-sum([row[i] * wish for row, wish in zip(scaled, wishes, strict=True)]) for i in range(num_columns)]
    solution = [0.0] * num_columns
    for _ in range(_MAX_SWEEPS):
        moved = 0.0
        for i in range(num_columns):
            if not norms[i]:
                continue
            change = max(-solution[i], -gradient[i])  # the diagonal of `gram` is 1
            if change:
                solution[i] += change
                moved = max(moved, abs(change))
                gradient = [value + change * other for value, other in zip(gradient, gram[i], strict=True)]
        if moved < _FIT_TOLERANCE:
            break
    return [value / norm if norm else 0.0 for value, norm in zip(solution, norms, strict=True)]
