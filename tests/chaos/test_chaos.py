"""Two minutes of everything at once, with the real model; `python -m tests.chaos` goes on for longer."""

import pytest

from tests.chaos.report import Report
from tests.chaos.run import run


@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_two_minutes_of_chaos_lose_and_double_nothing() -> None:
    report = await run(seed=7, seconds=120, num_streams=64)
    print(report)
    assert report.is_good, str(report)
    assert report.num_tokens > 0 and report.ended["finished"] > 0
    kinds = (
        "engine",
        "gateway killed",
        "cut off by their gateway's death",
        "reset, then attached again",
        "nonsense over HTTP",
        "nonsense over WebSocket",
        "nonsense over Z",
    )
    for kind in kinds:
        assert any(found.startswith(kind) for found in report.faults), f"nothing was injected of: {kind}"


@pytest.mark.parametrize(
    ("token_ids", "lost", "doubled", "wrong"),
    [([1, 2, 3], 0, 0, 0), ([1, 3], 1, 0, 0), ([1, 2, 2, 3], 0, 1, 0), ([1, 9, 3], 0, 0, 1)],
)
def test_the_report_tells_lost_doubled_and_wrong_tokens(
    token_ids: list[int], lost: int, doubled: int, wrong: int
) -> None:
    report = Report(seed=1, num_streams=1, leaked_blocks=0.0)
    report.compare(token_ids, [1, 2, 3], "a stream", is_sampled=False)
    assert (report.num_lost, report.num_doubled, report.num_wrong) == (lost, doubled, wrong)
    assert report.is_good is (token_ids == [1, 2, 3])
