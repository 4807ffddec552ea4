"""The firehose of the wire benchmark keeps the promises that the benchmark rests on."""

from streamkv.protocol import Abort, Ready
from tests.support.scripted_engine import firehose
from tests.support.wire_gateway import WireGateway, submission


def test_every_stream_gets_its_tokens_batch_after_batch() -> None:
    with firehose(8, token_ids=[5, 6, 7]) as endpoint, WireGateway(endpoint) as gateway:
        gateway.wait_for(Ready)
        for batch in (0, 8):
            for request_id in range(batch, batch + 8):
                gateway.send(submission(request_id, [1], 4 + request_id - batch))
            for request_id in range(batch, batch + 8):
                received = gateway.wait_end(request_id)
                assert received.tokens[0] == ([5, 6, 7] * 4)[: 4 + request_id - batch]
                assert received.finished[0].finish_reason == "length"


def test_unacknowledged_bytes_stop_it() -> None:
    with firehose(4, max_unacked_bytes=4096) as endpoint, WireGateway(endpoint, auto_acknowledge=False) as gateway:
        gateway.wait_for(Ready)
        for request_id in range(4):
            gateway.send(submission(request_id, [1], 2000))
        gateway.pump_for(0.5)
        assert 4096 <= gateway.num_bytes < 4096 + 100
        gateway.auto_acknowledge = True
        gateway.acknowledge()
        assert all(len(gateway.wait_end(request_id).tokens[0]) == 2000 for request_id in range(4))


def test_an_abort_is_answered() -> None:
    with firehose(2) as endpoint, WireGateway(endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, [1], 4))
        gateway.send(Abort(1, "timeout"))
        end = gateway.wait_end(1).finished[0]
        assert (end.finish_reason, end.cause) == ("abort", "timeout")
