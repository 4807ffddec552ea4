"""`streamkv health`: ready, loading and broken are three answers, so that a container that loads is not restarted."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from gateway import keys
from streamkv.protocol import WireError, encode
from streamkv.tools.health import LOADING, ask_engine, ask_gateway
from streamkv.transport import EngineSocket
from tests.support.running_gateway import VOCAB_SIZE, eventually_async, running_gateway
from tests.support.scripted_engine import RunningEngine, free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor

LONG_S = 20.0
"""For an answer that comes at once."""


@contextlib.contextmanager
def loading_engine() -> Iterator[tuple[RunningEngine, threading.Event]]:
    """An engine that is half loaded until the event is set."""
    has_loaded = threading.Event()
    executor = ScriptedExecutor(vocab_size=VOCAB_SIZE, load_s=120.0, sleep=lambda seconds: has_loaded.wait(seconds))
    with serving(executor) as engine:
        try:
            yield engine, has_loaded
        finally:
            has_loaded.set()


def test_an_engine_takes_work_or_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ScriptedExecutor()) as engine:
        while (status := ask_engine(engine.endpoint, LONG_S)) == LOADING:
            pass
        assert status == 0
        told = capsys.readouterr().out.splitlines()
    assert told[-1] == "ready"
    assert ask_engine(engine.endpoint, 0.2) == 1
    assert ask_engine("tcp://127.0.0.1:1", LONG_S) == 1
    no_answer, no_ipc = capsys.readouterr().out.splitlines()
    assert no_answer.startswith("no answer") and "ipc" in no_ipc


def test_an_engine_that_loads_is_not_broken_and_the_command_s_status_says_so() -> None:
    with loading_engine() as (engine, has_loaded):

        def ask() -> "subprocess.CompletedProcess[str]":
            command = [sys.executable, "-m", "streamkv", "health", "--engine", "--timeout-s=30"]
            environment = {**os.environ, "STREAMKV_ENDPOINT": engine.endpoint}
            return subprocess.run(command, env=environment, capture_output=True, text=True)

        while (told := ask()).stdout == "loading: starting, 0 %\n":  # its loading thread has not begun yet
            pass
        assert (told.returncode, told.stdout) == (LOADING, "loading: loading weights, 0 %\n")
        has_loaded.set()
        while (told := ask()).returncode == LOADING:
            pass
        assert (told.returncode, told.stdout) == (0, "ready\n")


def test_an_engine_of_another_version_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with free_endpoint() as endpoint:
        socket = EngineSocket(endpoint)

        def answer() -> None:
            while True:
                socket.wait(LONG_S)
                if (received := socket.receive()) is not None:
                    socket.send(received[0], encode(WireError("wire_version", "another")))
                    return

        answering = threading.Thread(target=answer)
        answering.start()
        assert ask_engine(endpoint, LONG_S) == 1
        answering.join()
        socket.close()


async def test_a_gateway_says_what_its_engine_does() -> None:
    with loading_engine() as (engine, has_loaded):
        async with running_gateway(engine.endpoint, is_ready=False) as gateway:

            async def asks(status: int) -> bool:
                return await asyncio.to_thread(ask_gateway, gateway.url + "/", LONG_S) == status

            await eventually_async(lambda: asks(LOADING))
            has_loaded.set()
            await eventually_async(lambda: asks(0))
            gateway.app[keys.ADMISSION].is_draining = True
            assert await asks(1)
        assert await asks(1), "nobody answers"
