"""The engine's process: started, restarted with back-off, stopped; with small children instead of an engine."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gateway import supervisor
from gateway.supervisor import ChildFailed, Supervisor, describe_exit
from streamkv.process import EXIT_UNUSABLE
from tests.support.running_gateway import eventually


def child(code: str) -> list[str]:
    return [sys.executable, "-c", code]


SLEEPER = child("import time; time.sleep(60)")
STUBBORN = child(
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('set', flush=True); time.sleep(60)"
)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextlib.asynccontextmanager
async def running(watched: Supervisor):  # type: ignore[no-untyped-def]
    task = asyncio.create_task(watched.run())
    try:
        await eventually(lambda: watched.pid is not None)
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ChildFailed):
            await task


async def test_a_killed_child_is_started_again() -> None:
    watched = Supervisor(SLEEPER)
    async with running(watched):
        first = watched.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: watched.pid not in (None, first))
        assert watched.num_restarts == 1


async def test_cancelling_stops_the_child_first() -> None:
    watched = Supervisor(SLEEPER)
    async with running(watched) as task:
        pid = watched.pid
        assert pid is not None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_alive(pid)


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    watched = Supervisor(STUBBORN, stop_grace_s=0.3)
    async with running(watched) as task:
        pid = watched.pid
        assert pid is not None
        await asyncio.sleep(0.3)
        begun = time.perf_counter()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not is_alive(pid) and 0.25 < time.perf_counter() - begun < 5


async def test_a_child_that_cannot_run_is_not_tried_again() -> None:
    watched = Supervisor(child(f"raise SystemExit({EXIT_UNUSABLE})"))
    with pytest.raises(ChildFailed) as caught:
        await asyncio.wait_for(watched.run(), 10)
    assert caught.value.exit_code == EXIT_UNUSABLE and watched.num_restarts == 0


async def test_what_has_worked_once_is_tried_again_though_it_says_that_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may be full for a moment, say. It is given up like any other that fails to start again and again."""
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.01)
    begun = tmp_path / "begun"
    code = f"""
        import pathlib, sys, time
        begun = pathlib.Path({str(begun)!r})
        if begun.exists():
            sys.exit({EXIT_UNUSABLE})
        begun.touch()
        time.sleep(60)
    """
    watched = Supervisor(child(textwrap.dedent(code)))
    task = asyncio.create_task(watched.run())
    await eventually(begun.exists)
    watched.note_ready()
    assert watched.pid is not None
    os.kill(watched.pid, signal.SIGKILL)
    with pytest.raises(ChildFailed, match=f"{supervisor.MAX_FAILED_STARTS} times"):
        await asyncio.wait_for(task, 20)
    assert watched.num_restarts == supervisor.MAX_FAILED_STARTS


async def test_a_child_that_never_gets_ready_is_given_up_with_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.05)
    watched = Supervisor(child("raise SystemExit(1)"))
    begun = time.perf_counter()
    with pytest.raises(ChildFailed, match="exit code 1") as caught:
        await asyncio.wait_for(watched.run(), 20)
    assert caught.value.exit_code == 1
    assert watched.num_restarts == supervisor.MAX_FAILED_STARTS - 1
    assert time.perf_counter() - begun > 0.05 * (1 + 2 + 4 + 8)


async def test_one_that_was_ready_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor, "MAX_BACKOFF_S", 0.01)
    watched = Supervisor(SLEEPER)
    async with running(watched):
        for _ in range(supervisor.MAX_FAILED_STARTS + 2):
            await eventually(lambda: watched.pid is not None)
            watched.note_ready()
            pid = watched.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda pid=pid: watched.pid not in (None, pid))  # type: ignore[misc]


async def test_the_child_is_told_to_end_with_its_parent(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = f"import os, time; open({str(seen)!r}, 'w').write(os.environ['STREAMKV_EXIT_WITH_PARENT']); time.sleep(60)"
    async with running(Supervisor(child(code))):
        await eventually(lambda: seen.exists() and seen.read_text() == str(os.getpid()))


async def test_a_child_that_was_started_early_is_the_first_and_the_next_are_as_ever(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    watched = Supervisor(child(f"import os, time; print(os.getsid(0), file=open({str(seen)!r}, 'a')); time.sleep(60)"))
    watched.start_early()
    first = watched.pid
    assert first is not None and is_alive(first)
    async with running(watched):
        await eventually(lambda: seen.exists() and seen.read_text() == f"{first}\n")
        assert watched.pid == first
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: watched.pid not in (None, first))
        assert watched.num_restarts == 1
    assert watched.pid is None and not is_alive(first)


@pytest.mark.parametrize("command", [SLEEPER, STUBBORN])
async def test_a_child_that_was_started_early_is_stopped_as_others_are(command: list[str]) -> None:
    watched = Supervisor(command, stop_grace_s=0.3)
    watched.start_early()
    pid = watched.pid
    assert pid is not None
    async with running(watched):
        await asyncio.sleep(0.3)
    assert not is_alive(pid)


async def test_an_early_child_that_has_ended_before_the_loop_is_told_apart_by_its_status() -> None:
    watched = Supervisor(child(f"raise SystemExit({EXIT_UNUSABLE})"))
    watched.start_early()
    await eventually(lambda: watched.pid is None)
    with pytest.raises(ChildFailed, match="refused its settings") as failed:
        await watched.run()
    assert failed.value.exit_code == EXIT_UNUSABLE


def test_an_early_child_whose_supervisor_never_ran_can_be_ended() -> None:
    watched = Supervisor(SLEEPER)
    watched.start_early()
    pid = watched.pid
    assert pid is not None
    watched.end_early()
    assert watched.pid is None and not is_alive(pid)


async def test_an_early_child_is_looked_after_where_there_are_no_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, "not here")

    watched = Supervisor(SLEEPER)
    watched.start_early()
    first = watched.pid
    assert first is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", refuse)
        task = asyncio.create_task(watched.run())
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: watched.pid is None)
    await eventually(lambda: watched.pid not in (None, first))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "killed by SIGKILL"


def test_a_first_process_reaps_what_nobody_waits_for_and_leaves_the_engine_to_its_owner() -> None:
    code = """
import os, time
from pathlib import Path
from gateway.supervised_engine import _reap_orphans

def child(seconds):
    pid = os.fork()
    if not pid:
        time.sleep(seconds)
        os._exit(0)
    return pid

def state(pid):
    path = Path(f"/proc/{pid}/stat")
    return path.read_text().rpartition(")")[2].split()[0] if path.exists() else "gone"

engine, orphan, living = child(0), child(0), child(600)
while state(engine) != "Z" or state(orphan) != "Z":
    time.sleep(0.01)
_reap_orphans(engine)
print(state(engine), state(orphan), state(living) in "SRD")
os.kill(living, 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "Z gone True\n", done.stderr
