"""`streamkv chat`: answers as they come, the history, stopping one answer, and piped questions."""

import asyncio
import io
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamkv.client import Client, Delta, Usage
from streamkv.tools.chat import Answer, Conversation, Terminal, printable
from tests.support.openai_server import OpenAIServer, chat_events, event, serving

ROOT = Path(__file__).resolve().parents[3]


class Dialogue:
    """A terminal whose user types given lines; a line may be a function that acts and returns the line."""

    def __init__(self, runner: asyncio.Runner, client: Client) -> None:
        self.out, self.notes = io.StringIO(), io.StringIO()
        self.conversation = Conversation({"model": "small"})
        self._runner = runner
        self._terminal = Terminal(client, self.conversation, self.out, self.notes)

    def type(self, *lines: str) -> int:
        left = iter(lines)

        def read_line(_prompt: str) -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        return self._terminal.run(self._runner, read_line)


@pytest.fixture
def dialogue() -> Iterator[tuple[Dialogue, OpenAIServer]]:
    with asyncio.Runner() as runner:
        context = serving()
        server = runner.run(context.__aenter__())
        client = runner.run(Client(server.url).__aenter__())
        yield Dialogue(runner, client), server
        runner.run(client.__aexit__(None, None, None))
        runner.run(context.__aexit__(None, None, None))


def messages(server: OpenAIServer, number: int) -> list[tuple[str, str]]:
    sent = server.bodies[number]["messages"]
    assert isinstance(sent, list)
    return [(message["role"], message["content"]) for message in sent]


def test_the_history_goes_along_until_reset(dialogue: tuple[Dialogue, OpenAIServer]) -> None:
    user, server = dialogue
    server.script = chat_events(["Hello", " you"])
    assert user.type("hi", "again", "/reset", "new", "/quit", "never read") == 0
    assert user.out.getvalue() == "Hello you\n" * 3
    assert messages(server, 1) == [("user", "hi"), ("assistant", "Hello you"), ("user", "again")]
    assert messages(server, 2) == [("user", "new")]
    assert "2 tokens, first after 0." in user.notes.getvalue()


def test_a_system_message_leads_every_conversation(dialogue: tuple[Dialogue, OpenAIServer]) -> None:
    user, server = dialogue
    server.script = chat_events(["ok"])
    user.type("/system Be brief.", "hi", "/system", "/reset", "there")
    assert messages(server, 0) == [("system", "Be brief."), ("user", "hi")]
    assert messages(server, 1) == [("system", "Be brief."), ("user", "there")]
    assert "(system message: Be brief.)" in user.notes.getvalue()


def test_unknown_commands_and_empty_lines_send_nothing(dialogue: tuple[Dialogue, OpenAIServer]) -> None:
    user, server = dialogue
    user.type("/rest", "", "   ", "/help")
    assert server.bodies == [] and "no such command: /rest" in user.notes.getvalue()


def test_a_failure_is_said_and_the_dialogue_goes_on(dialogue: tuple[Dialogue, OpenAIServer]) -> None:
    user, server = dialogue
    server.status, server.failure = 503, ({"error": {"message": "loading weights"}}, {"Retry-After": "5"})
    assert user.type("hi", "hi again") == 0
    assert user.notes.getvalue().count("error: HTTP 503: loading weights") == 2
    assert "try again in 5 s" in user.notes.getvalue()
    assert messages(server, 1) == [("user", "hi again")]  # the question without an answer is not kept


@pytest.fixture
def takes_ctrl_c() -> Iterator[None]:
    """As on a terminal. A shell starts what runs in the background deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("takes_ctrl_c")
def test_ctrl_c_stops_the_answer_alone_and_keeps_what_came(dialogue: tuple[Dialogue, OpenAIServer]) -> None:
    user, server = dialogue
    server.script, server.gap_s = [*chat_events(["part "] * 500)], 0.02
    signals: list[Callable[[], None]] = [lambda: os.kill(os.getpid(), signal.SIGINT)]
    write = user.out.write

    def write_and_interrupt(text: str) -> int:
        if len(user.out.getvalue()) > 20 and signals:
            signals.pop()()
        return write(text)

    user.out.write = write_and_interrupt  # type: ignore[method-assign]
    user.type("tell me all")
    assert "stopped" in user.notes.getvalue()
    assert 20 < len(user.out.getvalue()) < 500
    server.script = chat_events(["ok"])
    user.type("go on")
    assert messages(server, 1)[1] == ("assistant", user.out.getvalue().split("\n")[0])


def test_figures_count_what_the_server_counts() -> None:
    answer = Answer(started_s=10.0)
    for now_s, delta in [(10.5, Delta("a")), (11.0, Delta("b")), (12.5, Delta(finish_reason="length"))]:
        answer.add(delta, now_s)
    assert answer.figures() == "2 tokens, first after 0.50 s, 2.0 tokens/s, cut off at the token limit"
    answer.add(Delta(usage=Usage(5, 6)), 13.0)
    assert answer.figures().startswith("6 tokens, first after 0.50 s, 10.0 tokens/s")
    assert Answer(0.0, finish_reason="abort").figures() == "no text, finish reason abort"


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x9b1m\tc\né") == "a[2Jb1m\tc\né"


def chat(url: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "streamkv", "chat", "--base-url", url, *words]


async def test_a_piped_question_is_answered_on_the_output_alone() -> None:
    async with serving() as server:
        server.script = chat_events(["Rhine", ", Elbe"])
        process = await asyncio.create_subprocess_exec(
            *chat(server.url, "--max-tokens", "7", "--system", "Brief."),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, notes = await process.communicate(b"Name\ntwo rivers.\n")
    assert (process.returncode, out) == (0, b"Rhine, Elbe\n")
    assert b"2 tokens" in notes
    assert server.bodies[0]["max_tokens"] == 7 and server.bodies[0]["model"] == "small"
    assert messages(server, 0) == [("system", "Brief."), ("user", "Name\ntwo rivers.")]


async def test_bytes_that_are_no_utf8_are_replaced_whatever_the_locale() -> None:
    async with serving() as server:
        server.script = chat_events(["Yes"])
        process = await asyncio.create_subprocess_exec(
            *chat(server.url),
            cwd=ROOT,
            env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, notes = await process.communicate(b"caf\xc3\xa9 \xff?")
    assert (process.returncode, out) == (0, b"Yes\n"), notes
    assert messages(server, 0) == [("user", "café \ufffd?")]


async def test_a_piped_question_that_fails_ends_with_status_1() -> None:
    async with serving() as server:
        server.script = [event({"error": {"message": "engine lost"}})]
        process = await asyncio.create_subprocess_exec(
            *chat(server.url), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, notes = await process.communicate(b"Hi")
    assert (process.returncode, out) == (1, b"") and b"error: engine lost" in notes


async def test_an_absent_server_is_one_line() -> None:
    process = await asyncio.create_subprocess_exec(
        *chat("http://127.0.0.1:9"), cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, notes = await process.communicate()
    assert process.returncode == 1 and notes.startswith(b"streamkv chat: ") and notes.count(b"\n") == 1


async def test_on_a_terminal_answers_stream_and_quit_leaves() -> None:
    async with serving() as server:
        server.script, server.gap_s = chat_events(["one", " two"]), 0.05
        ours, theirs = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            *chat(server.url), cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        screen = b""
        typed = [b"hi\n", b"/quit\n"]
        deadline_s = time.monotonic() + 20
        while process.returncode is None and time.monotonic() < deadline_s:
            try:
                screen += os.read(ours, 4096)
            except OSError:
                await asyncio.sleep(0.02)
            if typed and screen.count(b"> ") > 2 - len(typed):
                os.write(ours, typed.pop(0))
        os.close(ours)
        assert await process.wait() == 0
    assert b"one two" in screen and b"2 tokens" in screen
