"""The engine's process: signals, exit codes, and the end of its parent. A scripted device stands in for the model."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamkv.protocol import Ready
from tests.support.scripted_engine import free_endpoint
from tests.support.wire_gateway import WireGateway, submission

ROOT = Path(__file__).resolve().parents[2]
CODE = """
    import os, sys, types
    from tests.support.scripted_executor import ScriptedExecutor
    fail_at_step = int(os.environ.get("FAIL_AT_STEP", "-1"))
    runner = types.ModuleType("engine.execution.runner")  # in the place of the one that takes seconds to import torch
    runner.CpuRunner = lambda config: ScriptedExecutor(step_s=0.01, fail_at_step=fail_at_step)
    sys.modules[runner.__name__] = runner
    from engine.__main__ import main
    code = main(sys.argv[1:], os.environ)
    sys.stderr.flush()
    os._exit(code)
"""


def start(endpoint: str, *flags: str, **environ: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(CODE), "--endpoint", endpoint, *flags]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environ}, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with free_endpoint() as free:
        yield free


def test_sigterm_lets_streams_finish_and_a_second_one_does_not_wait(endpoint: str) -> None:
    process = start(endpoint)
    try:
        with WireGateway(endpoint) as gateway:
            gateway.wait_for(Ready, 60.0)
            gateway.send(submission(1, [1, 2, 3], 40))
            gateway.send(submission(2, [1, 2, 3], 1900))
            gateway.wait_tokens(2, 2)
            process.send_signal(signal.SIGTERM)
            assert gateway.wait_end(1).finished[0].finish_reason == "length"
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(5.0) == 0
            log_lines = process.stderr.read() if process.stderr else ""
            assert "event=draining" in log_lines and 'stage="loading weights"' in log_lines
            assert all(line.startswith("time=") for line in log_lines.splitlines())
    finally:
        process.kill()
        process.wait()


def test_sigint_ends_at_once_and_a_fault_is_told_by_the_exit_code(endpoint: str) -> None:
    quick, faulty = start(endpoint), start(endpoint + "2", FAIL_AT_STEP="3")
    try:
        with WireGateway(endpoint) as gateway, WireGateway(endpoint + "2") as other:
            gateway.wait_for(Ready, 60.0)
            gateway.send(submission(1, [1, 2, 3], 1900))
            gateway.wait_tokens(1, 1)
            quick.send_signal(signal.SIGINT)
            assert quick.wait(5.0) == 0
            other.wait_for(Ready, 60.0)
            other.send(submission(1, [1, 2, 3], 1900))
            assert faulty.wait(5.0) == 1
            assert faulty.stderr is not None and "InjectedFault" in faulty.stderr.read()
    finally:
        for process in (quick, faulty):
            process.kill()
            process.wait()


def test_wrong_settings_end_with_2_and_one_line_that_names_them(endpoint: str) -> None:
    process = start("tcp://0.0.0.0:5555")
    _, log_lines = process.communicate(timeout=60.0)
    assert process.returncode == 2
    assert log_lines.count("\n") == 1 and "endpoint" in log_lines and "CURVE" in log_lines


def test_with_the_flag_the_end_of_the_parent_ends_the_engine(endpoint: str) -> None:
    code = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", {textwrap.dedent(CODE)!r}, "--endpoint", {endpoint!r}])
        print(child.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environ = {**os.environ, "STREAMKV_EXIT_WITH_PARENT": "1"}
    parent = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    try:
        with WireGateway(endpoint) as gateway:
            gateway.wait_for(Ready, 60.0)
            parent.kill()
            parent.wait()
            until_s = time.monotonic() + 5.0
            while Path(f"/proc/{child_pid}").exists() and time.monotonic() < until_s:
                time.sleep(0.02)
            assert not Path(f"/proc/{child_pid}").exists() or "Z" in Path(f"/proc/{child_pid}/stat").read_text()
    finally:
        parent.kill()
        parent.wait()
        if Path(f"/proc/{child_pid}").exists():
            os.kill(child_pid, signal.SIGKILL)
