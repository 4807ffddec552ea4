"""What a supervisor and its engine's process agree on."""

import signal

import pytest

from streamkv.process import end_signals


@pytest.mark.parametrize(("handler", "is_heeded"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_closed_terminal_ends_a_server_unless_it_was_started_by_nohup(
    handler: signal.Handlers, is_heeded: bool
) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in end_signals()) == is_heeded
        assert {signal.SIGTERM, signal.SIGINT} <= set(end_signals())
    finally:
        signal.signal(signal.SIGHUP, before)
