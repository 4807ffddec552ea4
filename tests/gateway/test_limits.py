"""The ledger: who is let in, when to come again, and that the told time is enough and no more than needed."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits import (
    BUSY_RETRY_S,
    Allowance,
    Ledger,
    OwnBooks,
    Permit,
    RateLimited,
    Standing,
    format_seconds,
    rate_limit_headers,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    return Ledger(clock)


def test_a_minute_s_requests_are_let_in_at_once_and_then_one_by_one(ledger: Ledger, clock: Clock) -> None:
    allowance = Allowance(requests_per_minute=6)
    assert [ledger.admit("a", allowance).refused_by for _ in range(7)] == [""] * 6 + ["requests"]
    assert ledger.admit("a", allowance).retry_after_s == pytest.approx(10.0)
    clock.now_s += 9.9
    assert ledger.admit("a", allowance).refused_by == "requests"
    clock.now_s += 0.1
    assert ledger.admit("a", allowance).refused_by == ""
    assert ledger.admit("a", allowance).refused_by == "requests"
    clock.now_s += 3600.0
    assert ledger.look("a", allowance).num_requests == 6.0, "a bucket holds no more than a minute's worth"


def test_a_refused_request_costs_nothing(ledger: Ledger) -> None:
    allowance = Allowance(requests_per_minute=1, max_concurrent=5)
    ledger.admit("a", allowance)
    for _ in range(100):
        verdict = ledger.admit("a", allowance)
        assert verdict.refused_by == "requests" and verdict.standing.num_live == 1
    assert verdict.retry_after_s <= 60.0


def test_tokens_beyond_the_bucket_are_a_debt_that_fills_up_first(ledger: Ledger, clock: Clock) -> None:
    allowance = Allowance(tokens_per_minute=60)
    assert ledger.admit("a", allowance).refused_by == ""
    ledger.charge("a", 160)
    verdict = ledger.admit("a", allowance)
    assert (verdict.refused_by, verdict.standing.num_tokens) == ("tokens", -100.0)
    assert verdict.retry_after_s == pytest.approx(101.0)
    clock.now_s += 101.0
    assert ledger.admit("a", allowance).refused_by == ""


def test_the_longest_wait_is_the_one_that_is_told(ledger: Ledger) -> None:
    allowance = Allowance(requests_per_minute=60, tokens_per_minute=60, max_concurrent=60)
    for _ in range(60):
        ledger.admit("a", allowance)
    assert ledger.admit("a", allowance).refused_by in ("requests", "concurrency")
    ledger.charge("a", 120)
    verdict = ledger.admit("a", allowance)
    assert (verdict.refused_by, verdict.retry_after_s) == ("tokens", pytest.approx(61.0))


def test_places_are_taken_until_they_are_given_back(ledger: Ledger) -> None:
    allowance = Allowance(max_concurrent=2)
    ledger.admit("a", allowance)
    ledger.join("a", allowance)
    verdict = ledger.admit("a", allowance)
    assert (verdict.refused_by, verdict.retry_after_s) == ("concurrency", BUSY_RETRY_S)
    ledger.release("a")
    assert ledger.admit("a", allowance).refused_by == ""
    ledger.join("a", allowance)
    assert ledger.look("a", allowance).num_live == 3, "what goes on is never refused"
    for _ in range(9):
        ledger.release("a")
    assert ledger.look("a", allowance).num_live == 0


def test_callers_do_not_share(ledger: Ledger) -> None:
    allowance = Allowance(1, 10, 1)
    ledger.admit("a", allowance)
    ledger.charge("a", 100)
    assert ledger.admit("a", allowance).refused_by
    assert ledger.admit("b", allowance).refused_by == ""


def test_without_a_limit_nothing_is_refused(ledger: Ledger) -> None:
    allowance = Allowance()
    assert not allowance.is_limited
    for _ in range(1000):
        assert ledger.admit("a", allowance).refused_by == ""
        ledger.charge("a", 10**9)
    assert rate_limit_headers(ledger.look("a", allowance)) == {}


def test_new_limits_hold_from_now_on(ledger: Ledger, clock: Clock) -> None:
    for _ in range(10):
        ledger.admit("a", Allowance(requests_per_minute=10))
    assert ledger.admit("a", Allowance(requests_per_minute=60)).retry_after_s == pytest.approx(1.0)
    clock.now_s += 60.0
    assert ledger.look("a", Allowance(requests_per_minute=5)).num_requests == 5.0
    assert ledger.look("a", Allowance(tokens_per_minute=7)).num_tokens == 7.0, "a new limit begins full"


def test_who_is_gone_is_forgotten_but_for_what_lives(ledger: Ledger) -> None:
    allowance = Allowance(requests_per_minute=1, max_concurrent=9)
    for name in ("idle", "live", "stays"):
        ledger.admit(name, allowance)
    ledger.release("idle")
    ledger.release("stays")
    ledger.keep({"stays"})
    assert ledger.look("idle", allowance).num_requests == 1.0
    assert ledger.look("live", allowance).num_live == 1
    assert ledger.look("stays", allowance).num_requests < 1.0
    ledger.charge("nobody", 5)
    ledger.release("nobody")


ALLOWANCES = st.builds(Allowance, st.integers(0, 90), st.integers(0, 500), st.integers(0, 4))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.just(0.0)),
        st.tuples(st.just("charge"), st.integers(0, 400).map(float)),
        st.tuples(st.just("release"), st.just(0.0)),
        st.tuples(st.just("wait"), st.floats(0.0, 90.0)),
    ),
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(ALLOWANCES, STEPS)
def test_the_told_time_is_enough_and_no_less_is(allowance: Allowance, steps: list[tuple[str, float]]) -> None:
    clock = Clock()
    ledger = Ledger(clock)
    num_live = 0
    for what, amount in steps:
        if what == "wait":
            clock.now_s += amount
        elif what == "charge":
            ledger.charge("a", int(amount))
        elif what == "release":
            ledger.release("a")
            num_live = max(0, num_live - 1)
        else:
            verdict = ledger.admit("a", allowance)
            if not verdict.refused_by:
                num_live += 1
                assert not allowance.max_concurrent or num_live <= allowance.max_concurrent
            elif verdict.refused_by != "concurrency":
                early, late = Ledger(clock), Ledger(clock)
                for twin, at_s in ((early, 0.9 * verdict.retry_after_s), (late, verdict.retry_after_s)):
                    twin.admit("a", allowance)  # opens the account
                    twin.release("a")
                    account = twin._accounts["a"]
                    account.requests.level = verdict.standing.num_requests
                    account.tokens.level = verdict.standing.num_tokens
                    clock.now_s += at_s
                    is_in = twin.admit("a", allowance).refused_by == ""
                    clock.now_s -= at_s
                    assert is_in == (twin is late)
        standing = ledger.look("a", allowance)
        assert standing.num_live == num_live
        assert standing.num_requests <= allowance.requests_per_minute
        assert standing.num_tokens <= max(allowance.tokens_per_minute, 0)


async def test_a_permit_is_given_back_once_by_its_last_holder(clock: Clock) -> None:
    ledger = Ledger(clock)
    books = OwnBooks(ledger)
    allowance = Allowance(tokens_per_minute=100, max_concurrent=1)
    permit = Permit(books, "a", (await books.admit("a", allowance)).standing)
    permit.hold()
    permit.charge(30)
    permit.drop()
    assert (await books.admit("a", allowance)).refused_by == "concurrency"
    permit.charge(5)
    permit.drop()
    standing = await books.look("a", allowance)
    assert (standing.num_live, standing.num_tokens) == (0, 65.0)
    assert permit.standing.num_tokens == 65.0


def test_what_a_refusal_says() -> None:
    ledger = Ledger(Clock())
    for allowance, said in (
        (Allowance(requests_per_minute=1), r"limit of 1 requests per minute is reached; try again in 1m0s"),
        (Allowance(max_concurrent=1), r"1 requests of this API key run, which is the most at once; try again in 1s"),
    ):
        ledger.admit(said, allowance)
        error = RateLimited(ledger.admit(said, allowance))
        assert re.search(said, str(error)), str(error)


def test_headers_are_those_of_the_budgets_that_have_a_limit() -> None:
    standing = Standing(Allowance(60, 6000, 3), num_requests=58.4, num_tokens=-50.0, num_live=2)
    assert rate_limit_headers(standing) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "58",
        "x-ratelimit-reset-requests": "1.6s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m1s",
    }
    only = rate_limit_headers(Standing(Allowance(tokens_per_minute=10), num_tokens=10.0))
    assert only == {
        "x-ratelimit-limit-tokens": "10",
        "x-ratelimit-remaining-tokens": "10",
        "x-ratelimit-reset-tokens": "0ms",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (1.0, "1s"),
        (7.651, "7.66s"),
        (59.995, "1m0s"),
        (60.0, "1m0s"),
        (150.2, "2m31s"),
        (3725.0, "1h2m5s"),
    ],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(0.0, 1e6))
def test_a_written_time_is_never_less(seconds: float) -> None:
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:(\d+)ms)?", format_seconds(seconds))
    assert parts is not None
    hours, minutes, whole, thousandths = (float(part or 0) for part in parts.groups())
    total = 3600 * hours + 60 * minutes + whole + thousandths / 1000
    assert seconds - 1e-5 <= total <= seconds + max(1.0, 0.011) and math.isfinite(total)
