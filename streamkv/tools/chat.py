"""`streamkv chat`: talk to a model in the terminal. Works with any OpenAI-compatible server."""

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final, TextIO

from streamkv.client import Client, Delta, Message, ServerError
from streamkv.tools.arguments import json_object

HELP: Final = """\
  /reset          forget the conversation
  /system TEXT    set the system message and forget the conversation; without TEXT: show it
  /help           this list
  /quit           leave (Ctrl-D too); Ctrl-C stops an answer"""


@dataclass
class Conversation:
    """What has been said, and how to go on. Kept across answers, also across one that was stopped."""

    options: dict[str, object]
    system: str = ""
    turns: list[Message] = field(default_factory=list)

    def asked(self, question: str) -> list[Message]:
        """Add the user's turn. Returns all that the server is to be sent."""
        self.turns.append(Message("user", question))
        return [Message("system", self.system), *self.turns] if self.system else list(self.turns)

    def answered(self, text: str) -> None:
        """Add the answer; a question without any is taken back, so that it can be asked again."""
        if text:
            self.turns.append(Message("assistant", text))
        else:
            self.turns.pop()


@dataclass
class Answer:
    """An answer as it comes in, with the times that its figures need."""

    started_s: float
    text: str = ""
    num_tokens: int = 0
    """The server's count; until that is there, the number of pieces with text."""
    first_s: float | None = None
    last_s: float = 0.0
    finish_reason: str = ""

    def add(self, delta: Delta, now_s: float) -> None:
        """Take in one piece."""
        if delta.text:
            self.text += delta.text
            self.num_tokens += 1
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
        if delta.usage:
            self.num_tokens = delta.usage.completion_tokens
        self.finish_reason = delta.finish_reason or self.finish_reason

    def figures(self) -> str:
        """One line: tokens, time to the first, tokens per second after it, and why it ended if not by itself."""
        if self.first_s is None:
            return f"no text{f', finish reason {self.finish_reason}' if self.finish_reason else ''}"
        parts = [f"{self.num_tokens} tokens", f"first after {self.first_s - self.started_s:.2f} s"]
        if self.num_tokens > 1 and self.last_s > self.first_s:
            parts.append(f"{(self.num_tokens - 1) / (self.last_s - self.first_s):.1f} tokens/s")
        if self.finish_reason not in ("", "stop"):
            parts.append({"length": "cut off at the token limit"}.get(self.finish_reason, self.finish_reason))
        return ", ".join(parts)


def printable(text: str) -> str:
    """Text without control characters, so that an answer cannot steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160))


async def show_answer(
    deltas: AsyncIterator[Delta], answer: Answer, write: Callable[[str], object], clock: Callable[[], float]
) -> None:
    """Write the pieces as they come. What came before an error or a Ctrl-C is in `answer`."""
    async for delta in deltas:
        answer.add(delta, clock())
        if delta.text:
            write(printable(delta.text))


class Terminal:
    """The dialogue: reads lines, runs commands, streams answers. Figures and errors go to `notes`."""

    def __init__(self, client: Client, conversation: Conversation, out: TextIO, notes: TextIO) -> None:
        self._client = client
        self._conversation = conversation
        self._out = out
        self._notes = notes

    def run(self, runner: asyncio.Runner, read_line: Callable[[str], str]) -> int:
        """Until /quit or the end of input. Returns the exit status."""
        self._note("Ask something; /help lists the commands.")
        while True:
            try:
                line = read_line("> ").strip()
            except EOFError:
                self._note("")
                return 0
            except KeyboardInterrupt:
                self._note("\n(/quit leaves)")
                continue
            if line == "/quit":
                return 0
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.ask(runner, line)

    def ask(self, runner: asyncio.Runner, question: str) -> bool:
        """One question and its answer. False when the server failed."""
        messages = self._conversation.asked(question)
        answer = Answer(started_s=time.monotonic())
        deltas = self._client.chat(messages, self._conversation.options)
        worked = True
        try:
            runner.run(show_answer(deltas, answer, self._write, time.monotonic))
        except KeyboardInterrupt:
            answer.finish_reason = "stopped"
        except ServerError as error:
            worked = False
            self._note(f"{chr(10) if answer.text else ''}error: {error}")
            if error.retry_after_s is not None:
                self._note(f"the server asks to try again in {error.retry_after_s:.0f} s")
        self._conversation.answered(answer.text)
        if answer.text:
            self._write("\n")
        if worked:
            self._note(f"[{answer.figures()}]")
        return worked

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name == "/reset":
            self._conversation.turns.clear()
            self._note("(a new conversation)")
        elif name == "/system" and argument.strip():
            self._conversation.system = argument.strip()
            self._conversation.turns.clear()
            self._note("(system message set, a new conversation)")
        elif name == "/system":
            self._note(f"(system message: {self._conversation.system or 'none'})")
        else:
            self._note(HELP if name == "/help" else f"no such command: {name}\n{HELP}")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _note(self, text: str) -> None:
        """A line that is not part of an answer; dimmed on a terminal."""
        line = f"\x1b[2m{text}\x1b[0m" if self._notes.isatty() and text else text
        print(line, file=self._notes, flush=True)


async def _open(options: argparse.Namespace) -> tuple[Client, str]:
    """A connected client and the model's name. Raises ServerError."""
    client = await Client(options.base_url, options.api_key).__aenter__()
    try:
        if options.model:
            return client, options.model
        models = await client.models()
        if not models:
            raise ServerError(f"{options.base_url} has no models")
        return client, models[0]
    except BaseException:
        await client.__aexit__(None, None, None)
        raise


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="streamkv chat",
        description="Talk to a model. Without a terminal on its input, all of the input is one question: "
        "echo 'Name three rivers.' | streamkv chat",
        epilog="In the dialogue:\n" + HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    key = os.environ.get("STREAMKV_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default: %(default)s")
    parser.add_argument("--model", default="", metavar="NAME", help="default: the first that the server lists")
    parser.add_argument(
        "--api-key", default=key, metavar="KEY", help="default: STREAMKV_API_KEY or OPENAI_API_KEY from the environment"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer; default: the server's")
    parser.add_argument("--temperature", type=float, metavar="X", help="default: the server's")
    parser.add_argument("--top-p", type=float, metavar="X", help="default: the server's")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument(
        "--extra",
        type=json_object,
        default={},
        metavar="JSON",
        help="""more fields for every request: '{"top_k": 40}'""",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 when the server cannot be reached, or a piped question failed."""
    options = parse(argv)
    fields = {name: getattr(options, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    with asyncio.Runner() as runner:
        try:
            client, model = runner.run(_open(options))
        except ServerError as error:
            print(f"streamkv chat: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        chosen = {name: value for name, value in fields.items() if value is not None}
        conversation = Conversation({"model": model, **chosen, **options.extra}, options.system)
        terminal = Terminal(client, conversation, sys.stdout, sys.stderr)
        try:
            if not sys.stdin.isatty():
                # Not by the locale: without one, Python would smuggle odd bytes through as lone surrogates.
                question = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
                if not question:
                    print("streamkv chat: no question on the input", file=sys.stderr)
                    return 2
                return 0 if terminal.ask(runner, question) else 1
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  input() then has line editing and a history
            print(f"{model} at {options.base_url}", file=sys.stderr)
            return terminal.run(runner, input)
        finally:
            runner.run(client.__aexit__(None, None, None))


if __name__ == "__main__":
    sys.exit(main())
