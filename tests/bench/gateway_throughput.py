"""Tokens per second through the gateway over SSE, and what a token costs it.

    python tests/bench/gateway_throughput.py [--streams 64,256,512] [--tokens 2000] [--steps-per-s 0] [--profile FILE]

Four processes: a firehose that publishes one token per stream and step as fast as it is acknowledged, the gateway, a
client that counts events on raw sockets, and as yardstick bare aiohttp handlers that write the same bytes from memory,
timed in the same run: `in a row` each handler writes its whole stream at once, which the kernel likes best; `by step`
one task writes an event to every stream in turn, which is the order in which tokens come. The CPU time is the whole
process's, from /proc: on a machine with fewer cores than processes it says more than the tokens per second do.
"""

import argparse
import asyncio
import cProfile
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import tokenizers
import uvloop
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[2]))

from gateway.answers import AnswerForm, EventParts
from gateway.app import Server, make_app
from gateway.tokenizer import Tokenizer
from streamkv.config import GatewayConfig
from tests.support.scripted_engine import firehose

WORDS = [" the", " cat", " sat", " on", " a", " mat", ".", " And", " then", ",", " it", " went", "\n", " away"]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def make_tokenizer() -> Tokenizer:
    """Byte-level, with one token for each of WORDS behind the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    merges = []
    for word in WORDS:
        text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(word)[0][0]
        for end in range(2, len(text) + 1):
            if text[:end] not in vocabulary:
                vocabulary[text[:end]] = len(vocabulary)
                merges.append((text[: end - 1], text[end - 1]))
    made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return Tokenizer(made, named_tokens={}, eos_token_ids=[2], chat_template="", min_vocab_size=49152)


def word_ids() -> list[int]:
    """The ids of WORDS."""
    tokenizer = make_tokenizer()
    return [tokenizer.encode(word)[-1] for word in WORDS]


def run_gateway(endpoint: str, to_parent: Connection, profile: str) -> None:
    """The gateway's process; ends at SIGTERM."""

    async def serve() -> None:
        config = GatewayConfig(port=0)
        server = Server(make_app(config, make_tokenizer, endpoint=endpoint))
        await server.start("127.0.0.1", 0)
        to_parent.send(server.url)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
        await server.close()

    profiler = cProfile.Profile() if profile else None
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if profiler is not None:
            profiler.enable()
        runner.run(serve())
        if profiler is not None:
            profiler.disable()
            profiler.dump_stats(profile)


def run_yardstick(num_streams: int, num_tokens: int, to_parent: Connection) -> None:
    """Handlers with nothing behind them: the same events, encoded beforehand, one write each."""
    parts = EventParts(AnswerForm(False, "cmpl-" + "0" * 32, int(time.time()), "firehose", 3))
    events = [parts.text_head(0) + msgspec.json.encode(word)[1:-1] + parts.text_tail for word in WORDS]

    waiting: list[tuple[web.StreamResponse, asyncio.Event]] = []

    async def begin(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response

    async def end(response: web.StreamResponse) -> web.StreamResponse:
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def in_a_row(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        for index in range(num_tokens):
            await response.write(events[index % len(events)])
        return await end(response)

    async def by_step(request: web.Request) -> web.StreamResponse:
        response, done = await begin(request), asyncio.Event()
        waiting.append((response, done))
        if len(waiting) == num_streams:
            streams, waiting[:] = waiting[:], []
            for index in range(num_tokens):
                for stream, _ in streams:
                    await stream.write(events[index % len(events)])
                await asyncio.sleep(0)
            for _, event in streams:
                event.set()
        await done.wait()
        return await end(response)

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/row/v1/completions", in_a_row)
        app.router.add_post("/step/v1/completions", by_step)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        await web.SockSite(runner, listener).start()
        to_parent.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def run_client(url: str, num_streams: int, num_tokens: int, to_parent: Connection) -> None:
    """Opens every stream, counts its events, sends (events, seconds from the first to the last)."""
    address, _, path = url.removeprefix("http://").partition("/")
    host, _, port = address.rpartition(":")
    body = msgspec.json.encode({"prompt": [11, 12, 13], "max_tokens": num_tokens, "ignore_eos": True, "stream": True})
    head = f"POST /{path}v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    num_events = num_open = 0
    num_open = num_streams
    first = 0.0
    buffer = bytearray(1 << 20)
    view = memoryview(buffer)
    tails: dict[int, bytes] = {}
    while num_open:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            size = connection.recv_into(view)
            if not first:
                first = time.perf_counter()
            data = tails.get(key.fd, b"") + bytes(view[:size])
            num_events += data.count(b'"finish_reason":null')
            tails[key.fd] = data[-19:]
            if b"[DONE]" in data or not size:
                selector.unregister(connection)
                connection.close()
                num_open -= 1
    to_parent.send((num_events, time.perf_counter() - first))


def cpu_s(pid: int) -> tuple[float, float]:
    """User and system seconds of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / TICKS_PER_S, int(fields[12]) / TICKS_PER_S


@dataclass(frozen=True, slots=True)
class Figure:
    num_tokens: int
    seconds: float
    user_s: float
    system_s: float

    def __str__(self) -> str:
        rate = self.num_tokens / self.seconds
        user, system = (1e6 * part / self.num_tokens for part in (self.user_s, self.system_s))
        total = user + system
        return (
            f"{rate:10,.0f} tokens/s {total:7.2f} µs CPU/token ({user:.2f} user, {system:.2f} system): "
            f"{1e6 / total:9,.0f} tokens/s per core"
        )


def measure(url: str, pid: int, num_streams: int, num_tokens: int) -> Figure:
    """One batch of streams through the server at `url`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    before = cpu_s(pid)
    client = context.Process(target=run_client, args=(url, num_streams, num_tokens, there), daemon=True)
    client.start()
    num_events, seconds = here.recv()
    client.join()
    after = cpu_s(pid)
    return Figure(num_events, seconds, after[0] - before[0], after[1] - before[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", default="64,256,512")
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument(
        "--steps-per-s", type=float, default=0.0, help="pace of the firehose; 0: flat out, and the gateway joins steps"
    )
    parser.add_argument("--profile", default="", help="write the gateway's cProfile statistics to this file")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ids = word_ids()
    for num_streams in map(int, args.streams.split(",")):
        here, there = context.Pipe()
        yardstick = context.Process(target=run_yardstick, args=(num_streams, args.tokens, there), daemon=True)
        yardstick.start()
        bare_url = here.recv()
        with firehose(num_streams, steps_per_s=args.steps_per_s, token_ids=ids) as endpoint:
            gateway = context.Process(target=run_gateway, args=(endpoint, there, args.profile), daemon=True)
            gateway.start()
            url = here.recv()
            assert gateway.pid is not None and yardstick.pid is not None
            measure(url + "/", gateway.pid, num_streams, 20)
            for name, target, pid in (
                ("gateway", url + "/", gateway.pid),
                ("bare aiohttp, by step", bare_url + "/step/", yardstick.pid),
                ("bare aiohttp, in a row", bare_url + "/row/", yardstick.pid),
            ):
                print(
                    f"{num_streams:4} streams  {name:<22} {measure(target, pid, num_streams, args.tokens)}", flush=True
                )
            gateway.terminate()
            gateway.join()
            yardstick.kill()
            yardstick.join()


if __name__ == "__main__":
    main()
