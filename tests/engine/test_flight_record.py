"""What a dead engine leaves of the steps in flight."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.flight_record import MAX_STREAMS, FlightRecord
from engine.sequence import Request, Sequence
from streamkv.protocol import Ready
from streamkv.sampling import SamplingParams
from streamkv.transport import flight_record_path
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.wire_gateway import WireGateway, submission


def sequences(*names: int) -> list[Sequence]:
    sampling = SamplingParams(0, 10)
    return [
        Sequence(i, Request(i, b"g", name.to_bytes(16, "big"), [1], sampling, 0.0), 0, [1], 1, 10)
        for i, name in enumerate(names)
    ]


def stream_ids(*names: int) -> list[bytes]:
    return [name.to_bytes(16, "big") for name in names]


def test_the_streams_of_the_steps_in_flight_are_the_next_life_s_suspects(tmp_path: Path) -> None:
    path = str(tmp_path / "flight")
    record = FlightRecord(path)
    assert record.suspects == {}
    first, second = sequences(1, 2, 2, 3), sequences(3, 4)
    record.launched(first)
    assert list(FlightRecord(path).suspects) == stream_ids(1, 2, 3)
    record.launched(first)
    record.collected()
    record.collected()
    assert FlightRecord(path).suspects == {}
    record.launched(first)  # the same again, which is not written again
    assert list(FlightRecord(path).suspects) == stream_ids(1, 2, 3)
    record.launched(second)
    assert list(FlightRecord(path).suspects) == stream_ids(1, 2, 3, 4)
    record.collected()
    record.launched(second)
    record.close()
    assert FlightRecord(path).suspects == {}


def test_of_ranked_choices_it_says_how_far_they_were_at_the_newest_step(tmp_path: Path) -> None:
    path = str(tmp_path / "flight")
    record = FlightRecord(path)
    plain, ranked = sequences(1, 2)
    ranked.request.sampling = SamplingParams(0, 10, best_of=2)
    ranked.request.sequences = [ranked, *sequences(2)]
    for num_tokens in range(3):
        ranked.token_ids = [1] * (1 + num_tokens)
        plain.token_ids.append(5)
        record.launched([plain, ranked])
        record.collected()
    record.launched([plain, ranked])
    assert FlightRecord(path).suspects == dict(zip(stream_ids(1, 2), (0, 2), strict=True))


def test_only_ranked_choices_that_the_steps_in_flight_compute_say_how_far_they_were(tmp_path: Path) -> None:
    path = str(tmp_path / "flight")
    record = FlightRecord(path)
    ended, preempted, late, last = sequences(1, 1, 1, 1)
    request = late.request
    request.sampling = SamplingParams(0, 200, best_of=4)
    request.sequences = [ended, preempted, late, last]
    for sequence, num_tokens in ((ended, 150), (preempted, 90), (late, 20), (last, 12)):
        sequence.request = request
        sequence.token_ids = [1] * (1 + num_tokens)
    for step, num_tokens in (([late, last], 20), ([last], 20), ([last], 12), ([ended, last], 150), ([last], 150)):
        record.launched(step)
        if step == [last]:
            record.collected()
        assert FlightRecord(path).suspects == {request.stream_id: num_tokens}


def test_it_knows_whether_an_engine_ran_before(tmp_path: Path) -> None:
    path = str(tmp_path / "flight")
    for is_successor in (False, True):
        record = FlightRecord(path)
        assert record.is_successor is is_successor
        record.close()
    assert not FlightRecord("").is_successor


def test_an_engine_that_ends_twice_before_a_step_suspects_nobody(tmp_path: Path) -> None:
    path = str(tmp_path / "flight")
    FlightRecord(path).launched(sequences(1))
    assert list(FlightRecord(path).suspects) == stream_ids(1)
    assert FlightRecord(path).suspects == {}


@pytest.mark.parametrize(
    "data", [b"", b"\x01", b"\x02\x00\x00\x00" + bytes(39), (MAX_STREAMS + 1).to_bytes(4, "little") + bytes(2**20)]
)
def test_what_is_no_record_names_nobody(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "flight"
    path.write_bytes(data)
    path.chmod(0o600)
    record = FlightRecord(str(path))
    assert record.suspects == {}
    record.launched(sequences(5))
    assert list(FlightRecord(str(path)).suspects) == stream_ids(5)


def test_a_file_of_others_is_not_read_and_no_record_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "flight"
    FlightRecord(str(path)).launched(sequences(1))
    path.chmod(0o666)
    (tmp_path / "link").symlink_to(path)
    for bad in (str(path), str(tmp_path / "link"), str(tmp_path), str(tmp_path / "none" / "flight"), ""):
        record = FlightRecord(bad)
        assert record.suspects == {}
        record.launched(sequences(2))
        record.collected()
        record.close()


CHILD = """
import sys
from tests.engine.test_flight_record import FlightRecord, sequences
record = FlightRecord(sys.argv[1])
record.launched(sequences(7, 8))
print("launched", flush=True)
import time
time.sleep(60)
"""


def test_it_outlives_a_killed_process(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    path = str(tmp_path / "flight")
    with subprocess.Popen([sys.executable, "-c", CHILD, path], stdout=subprocess.PIPE, cwd=root) as child:
        assert child.stdout is not None and child.stdout.readline() == b"launched\n"
        child.send_signal(signal.SIGKILL)
        child.wait(30)
    assert list(FlightRecord(path).suspects) == stream_ids(7, 8)


def test_an_engine_tells_whom_the_one_before_it_computed_when_it_failed() -> None:
    with free_endpoint() as endpoint:
        executor = ScriptedExecutor(fail_at_step=6)
        with serving(executor, endpoint) as engine, WireGateway(endpoint) as gateway:
            gateway.send(submission(1, [5, 6], 3))
            gateway.wait_end(1)
            gateway.send(submission(2, [5, 6], 50))
            assert engine.join() == 1
        with serving(ScriptedExecutor(), endpoint) as engine, WireGateway(endpoint) as gateway:
            ready = gateway.wait_for(Ready)
            assert ready.suspects == [submission(2, [5, 6], 50).stream_id]
        assert os.path.exists(flight_record_path(endpoint))
        with serving(ScriptedExecutor(), endpoint) as engine, WireGateway(endpoint) as gateway:
            assert gateway.wait_for(Ready).suspects == []
