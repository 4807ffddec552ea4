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

from streamkv.config import EngineConfig
from streamkv.errors import ConfigError
from streamkv.process import HAND_OVER_SIGNAL
from streamkv.protocol import Ready
from tests.support.scripted_engine import free_endpoint
from tests.support.wire_gateway import WireGateway, submission

ROOT = Path(__file__).resolve().parents[2]
CODE = """
    import os, sys, types
    from tests.support.scripted_executor import ScriptedExecutor
    fail_at_step = int(os.environ.get("FAIL_AT_STEP", "-1"))
    runner = types.ModuleType("engine.execution.runner")  # in the place of the one that takes seconds to import torch
    class Runner(ScriptedExecutor):
        def load(self, report):
            if "COMPILES" in os.environ:
                from tests.support.compiled_kernel import compile_one
                compile_one()
            return super().load(report)
    runner.CpuRunner = lambda config: Runner(step_s=0.01, fail_at_step=fail_at_step)
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, HAND_OVER_SIGNAL])
def test_each_signal_ends_an_engine_that_has_compiled_kernels(
    number: signal.Signals, endpoint: str, tmp_path: Path
) -> None:
    """The compiler's library puts handlers of its own over those of old signals, and keeps SIGUSR1 for itself."""
    pytest.importorskip("triton")
    process = start(endpoint, COMPILES="1", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    try:
        with WireGateway(endpoint) as gateway:
            gateway.wait_for(Ready, 120.0)
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
            assert caught >> (signal.SIGUSR1 - 1) & 1, "nobody has put handlers there: then this test shows nothing"
            process.send_signal(number)
            assert process.wait(10.0) == 0
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
        import os, subprocess, sys, time
        os.environ["STREAMKV_EXIT_WITH_PARENT"] = str(os.getpid())
        child = subprocess.Popen([sys.executable, "-c", {textwrap.dedent(CODE)!r}, "--endpoint", {endpoint!r}])
        print(child.pid, flush=True)
        time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
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


def test_an_engine_whose_parent_went_while_it_was_loading_ends(endpoint: str) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environ = {**os.environ, "STREAMKV_EXIT_WITH_PARENT": str(gone.pid)}
    command = [sys.executable, "-c", textwrap.dedent(CODE), "--endpoint", endpoint]
    assert subprocess.run(command, cwd=ROOT, env=environ, stderr=subprocess.DEVNULL, timeout=60).returncode == 0
    environ["STREAMKV_EXIT_WITH_PARENT"] = "1"  # lives, but is not its parent, which would be the case of an orphan
    assert subprocess.run(command, cwd=ROOT, env=environ, stderr=subprocess.DEVNULL, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("said", "is_taken"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be reported", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("CUDA error: unknown error", False),
    ],
)
def test_a_gpu_that_others_have_taken_names_the_device(
    said: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else it says may pass, so it is no matter of settings."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from engine.__main__ import make_executor

    def ask() -> int:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", ask)
    with pytest.raises(ConfigError if is_taken else RuntimeError) as raised:
        make_executor(EngineConfig(device="cuda"))
    assert said.partition("\n")[0] in str(raised.value) and "errors might" not in str(raised.value)
    assert isinstance(raised.value, ConfigError) == is_taken
