"""One gateway worker with thousands of streams, and while giant prompts are tokenised.

    python tests/bench/gateway_scale.py [--idle 2000] [--live 1000] [--tokens-per-s 20] [--seconds 20] [--part all]

Processes: an engine without a model that gives each live stream one token per step and each idle one a single token
and then none; the gateway, with the built-in model's real tokenizer; a client that reads every stream; and as yardstick
bare aiohttp handlers that send the same events to as many streams. `/health` is asked every 10 ms on a connection of
its own, of the gateway and of the yardstick, while each of them does its work. Memory is the gateway's resident set;
what the kernel keeps for sockets is not in it. CPU time is the whole process's, from /proc.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[2]))

from gateway.answers import AnswerForm, EventParts
from gateway.app import Server, make_app
from gateway.tokenizer import Tokenizer
from streamkv.config import GatewayConfig
from streamkv.model_files import resolve
from streamkv.protocol import (
    WIRE_VERSION,
    Abort,
    Finished,
    GetStats,
    Hello,
    ModelFacts,
    Ready,
    Stats,
    StepOutput,
    Submit,
    decode_from_gateway,
    encode,
    pack_ids,
)
from streamkv.transport import EngineSocket
from tests.support.scripted_engine import free_endpoint

MODEL = ModelFacts("metronome", vocab_size=49152, max_model_len=1 << 21, eos_token_ids=[2])
TOKEN = 260
IDLE, LIVE, PROMPT = 1, 2, 3
"""A request says by its seed what it wants: one token and nothing more, tokens without end, one token and its end."""
MAX_BODY_BYTES = 64 * 1024 * 1024
PROMPT_CHARS = 1_000_000
NUM_AT_ONCE = 4
NUM_WATCHED = 50
"""Live streams while prompts are tokenised."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run_engine(endpoint: str, steps_per_s: float) -> None:
    """Until it is killed."""
    engine = EngineSocket(endpoint)
    ready = Ready(WIRE_VERSION, secrets.randbits(62) + 1, MODEL, 16, 1 << 16, 1 << 14, 8192)
    live: dict[bytes, list[int]] = {}
    step, next_step_s = 0, 0.0
    while True:
        engine.wait(max(0.0, next_step_s - time.monotonic()))
        while (received := engine.receive()) is not None:
            sender, frame = received
            match decode_from_gateway(frame):
                case Hello():
                    engine.send(sender, encode(ready))
                case Submit() as submit:
                    if submit.sampling.seed == LIVE:
                        live.setdefault(sender, []).append(submit.request_id)
                    else:
                        step += 1
                        ends = [Finished(submit.request_id, 0, "length")] if submit.sampling.seed == PROMPT else []
                        ids = pack_ids([submit.request_id]), pack_ids([TOKEN])
                        engine.send(sender, encode(StepOutput(step, *ids, finished=ends)))
                case Abort() as abort:
                    with contextlib.suppress(KeyError, ValueError):
                        live[sender].remove(abort.request_id)
                    end = Finished(abort.request_id, 0, "abort", abort.cause)
                    engine.send(sender, encode(StepOutput(step, b"", b"", finished=[end])))
                case GetStats() as query:
                    engine.send(sender, encode(Stats(query.query_id, {}, {})))
                case _:
                    pass
        now_s = time.monotonic()
        if now_s >= next_step_s:
            next_step_s = max(next_step_s + 1.0 / steps_per_s, now_s)
            for sender, request_ids in live.items():
                step += 1
                tokens = pack_ids([TOKEN] * len(request_ids))
                engine.send(sender, encode(StepOutput(step, pack_ids(request_ids), tokens)))


def run_gateway(endpoint: str, to_parent: Connection) -> None:
    """The gateway's process; ends at SIGTERM."""

    def load() -> Tokenizer:
        return Tokenizer.load(resolve("default", lambda stage, percent: None))

    async def serve() -> None:
        config = GatewayConfig(port=0, max_body_bytes=MAX_BODY_BYTES, log_level="warning", request_timeout_s=3600.0)
        server = Server(make_app(config, load, endpoint=endpoint))
        await server.start("127.0.0.1", 0)
        to_parent.send(server.url)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
        await server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def run_yardstick(steps_per_s: float, to_parent: Connection) -> None:
    """Handlers with nothing behind them: one task writes the same event to every live stream, step by step."""
    parts = EventParts(AnswerForm(False, "cmpl-" + "0" * 32, int(time.time()), "metronome", 3))
    event = parts.text_head(0) + b" the" + parts.text_tail
    live: list[web.StreamResponse] = []

    async def stream(request: web.Request) -> web.StreamResponse:
        seed = msgspec.json.decode(await request.read())["seed"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event)
        if seed == LIVE:
            live.append(response)
        await asyncio.Event().wait()
        return response

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def beat() -> None:
        next_s = time.monotonic()
        while True:
            for response in list(live):
                try:
                    await response.write(event)
                except ConnectionResetError:
                    live.remove(response)
            next_s = max(next_s + 1.0 / steps_per_s, time.monotonic())
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def serve() -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", stream)
        app.router.add_get("/health", health)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        await web.SockSite(runner, listener, backlog=1024).start()
        to_parent.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await beat()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def post(url: str, path: str, body: dict[str, object]) -> socket.socket:
    """A connection on which this was asked for."""
    data = msgspec.json.encode(body)
    connection = socket.create_connection(address_of(url))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def run_client(url: str, num_streams: int, seed: int, commands: Connection) -> None:
    """Opens the streams and says so with the first bytes of the last; then answers each command `reset` with
    (bytes, largest gap of a stream in seconds) since the one before."""
    selector = selectors.DefaultSelector()
    begun: set[int] = set()
    for _ in range(num_streams):
        body = {"prompt": [11, 12, 13], "max_tokens": 1_000_000, "seed": seed, "stream": True, "ignore_eos": True}
        connection = post(url, "/v1/completions", body)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    selector.register(commands, selectors.EVENT_READ)
    buffer = memoryview(bytearray(1 << 18))
    last_s: dict[int, float] = {}
    num_bytes, largest_s = 0, 0.0
    while True:
        for key, _ in selector.select():
            if key.fileobj is commands:
                if commands.recv() == "end":
                    return
                commands.send((num_bytes, largest_s))
                num_bytes, largest_s = 0, 0.0
                last_s = dict.fromkeys(last_s, time.monotonic())
                continue
            assert isinstance(key.fileobj, socket.socket)
            size = key.fileobj.recv_into(buffer)
            assert size, "a stream ended"
            num_bytes += size
            now_s = time.monotonic()
            largest_s = max(largest_s, now_s - last_s.get(key.fd, now_s))
            last_s[key.fd] = now_s
            if key.fd not in begun:
                begun.add(key.fd)
                if len(begun) == num_streams:
                    commands.send("open")


class Client:
    """run_client in a process of its own."""

    def __init__(self, url: str, num_streams: int, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=run_client, args=(url, num_streams, seed, there), daemon=True)
        self._process.start()
        assert self._pipe.poll(120) and self._pipe.recv() == "open"

    def read(self) -> tuple[int, float]:
        """(bytes, largest gap in seconds) since the last call."""
        self._pipe.send("reset")
        num_bytes, gap_s = self._pipe.recv()
        return num_bytes, gap_s

    def close(self) -> None:
        self._pipe.send("end")
        self._process.join()


@dataclass(frozen=True, slots=True)
class Latency:
    """Of /health, in ms."""

    num_asked: int
    p50: float
    p99: float
    largest: float

    def __str__(self) -> str:
        return f"/health p50 {self.p50:6.2f} p99 {self.p99:7.2f} max {self.largest:7.2f} ms ({self.num_asked} asked)"


def probe_health(url: str, is_over: Callable[[], bool]) -> Latency:
    """Ask every 10 ms until it is over."""
    times_s = []
    with socket.create_connection(address_of(url)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not is_over():
            begun_s = time.perf_counter()
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            times_s.append(time.perf_counter() - begun_s)
            time.sleep(max(0.0, 0.01 - times_s[-1]))
    ordered = sorted(1000 * each for each in times_s)
    return Latency(len(ordered), ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))], ordered[-1])


def after(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= until_s


def cpu_s(pid: int) -> float:
    """User and system seconds of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def rss_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


def measure_streams(name: str, url: str, pid: int, args: argparse.Namespace) -> None:
    """Memory and CPU of idle and of live streams, and /health while they are there."""
    warm = Client(url, 100, IDLE)
    warm.close()
    time.sleep(2.0)
    at_start = rss_kib(pid)
    idle = Client(url, args.idle, IDLE)
    time.sleep(2.0)
    with_idle, before_s = rss_kib(pid), cpu_s(pid)
    latency = probe_health(url, after(args.seconds / 2))
    idle_cpu = (cpu_s(pid) - before_s) / (args.seconds / 2)
    per_idle = (with_idle - at_start) / args.idle
    print(f"{name}: {args.idle} idle: {per_idle:.1f} KiB each, {100 * idle_cpu:.1f} % of a core, {latency}", flush=True)
    live = Client(url, args.live, LIVE)
    time.sleep(3.0)
    live.read()
    before_s = cpu_s(pid)
    begun_s = time.monotonic()
    latency = probe_health(url, after(args.seconds))
    seconds, spent_s = time.monotonic() - begun_s, cpu_s(pid) - before_s
    with_live, (num_bytes, gap_s) = rss_kib(pid), live.read()
    num_tokens = args.live * args.tokens_per_s * seconds
    print(
        f"{name}: and {args.live} live at {args.tokens_per_s:g} tokens/s: "
        f"{(with_live - with_idle) / args.live:.1f} KiB each, {100 * spent_s / seconds:.0f} % of a core, "
        f"{1e6 * spent_s / num_tokens:.1f} µs a token, {latency}, "
        f"largest gap {1000 * gap_s:.0f} ms, {num_bytes / seconds / 1e6:.1f} MB/s read",
        flush=True,
    )
    live.close()
    idle.close()


def giant_prompts() -> dict[str, str]:
    """Texts of PROMPT_CHARS bytes or so, of kinds that cost a tokenizer differently."""
    draw = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(5000)]
    prose = " ".join(draw.choices(words, k=PROMPT_CHARS // 6))[:PROMPT_CHARS]
    code = "".join(f"    if value_{i} == {i}:\n        return [x for x in {i}]\n" for i in range(PROMPT_CHARS // 56))
    return {
        "words": prose,
        "code": code[:PROMPT_CHARS],
        "one long word": "".join(draw.choices(letters, k=PROMPT_CHARS)),
        "one letter": "a" * PROMPT_CHARS,
        "spaces": " " * PROMPT_CHARS,
        "newlines": "\n" * PROMPT_CHARS,
        "digits": "".join(draw.choices("0123456789", k=PROMPT_CHARS)),
        "one emoji": "\U0001f600" * (PROMPT_CHARS // 4),
        "Chinese": "".join(draw.choices("的一是在不了有和人这中大为上个国我以要他", k=PROMPT_CHARS // 3)),
        "special tokens": "<|im_end|>" * (PROMPT_CHARS // 10),
    }


def send_prompts(url: str, path: str, text: str, num: int) -> list[str]:
    """Status lines, all asked for at once."""
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    statuses: list[str] = []

    def send() -> None:
        with post(url, path, {"max_tokens": 1, "seed": PROMPT, **prompt}) as connection:
            statuses.append(connection.recv(4096).split(b"\r\n")[0].decode())

    threads = [threading.Thread(target=send) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def measure_prompts(url: str, pid: int, args: argparse.Namespace) -> None:
    """/health and the gaps of other streams while giant prompts are tokenised."""
    live = Client(url, NUM_WATCHED, LIVE)
    live.read()
    latency = probe_health(url, after(args.seconds / 2))
    print(f"no prompt: {latency}, largest gap {1000 * live.read()[1]:.0f} ms", flush=True)
    for name, text in giant_prompts().items():
        if args.kind and args.kind != name:
            continue
        for path in ("/v1/completions", "/v1/chat/completions"):
            statuses: list[str] = []
            sending = threading.Thread(
                target=lambda text=text, path=path, into=statuses: into.extend(
                    send_prompts(url, path, text, NUM_AT_ONCE)
                )
            )
            before_s, begun_s = cpu_s(pid), time.monotonic()
            live.read()
            sending.start()
            latency = probe_health(url, lambda sending=sending: not sending.is_alive())
            seconds = time.monotonic() - begun_s
            told = {status.partition(" ")[2] for status in statuses}
            print(
                f"{NUM_AT_ONCE} x 1 MB, {name:<15} {path:<21} {seconds:6.2f} s, CPU {cpu_s(pid) - before_s:6.2f} s: "
                f"{latency}, largest gap {1000 * live.read()[1]:.0f} ms, {', '.join(sorted(told))}",
                flush=True,
            )
            time.sleep(0.5)
    live.close()


@contextlib.contextmanager
def process(target: Callable[..., None], *args: object) -> Iterator[tuple[str, int]]:
    """(what it sends first, pid)."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    running = context.Process(target=target, args=(*args, there), daemon=True)
    running.start()
    assert running.pid is not None and here.poll(60)
    yield here.recv(), running.pid
    running.terminate()
    running.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--tokens-per-s", type=float, default=20.0, help="of each live stream")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--part", default="all", choices=["all", "streams", "prompts"])
    parser.add_argument("--kind", default="", help="only this kind of giant prompt")
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", flush=True)
    with free_endpoint() as endpoint:
        context = multiprocessing.get_context("spawn")
        engine = context.Process(target=run_engine, args=(endpoint, args.tokens_per_s), daemon=True)
        engine.start()
        with process(run_gateway, endpoint) as (url, pid):
            wait_ready(url)
            if args.part != "prompts":
                measure_streams("gateway", url, pid, args)
            if args.part != "streams":
                measure_prompts(url, pid, args)
        engine.kill()
    if args.part != "prompts":
        with process(run_yardstick, args.tokens_per_s) as (url, pid):
            measure_streams("bare aiohttp", url, pid, args)


def wait_ready(url: str) -> None:
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s:
        with socket.create_connection(address_of(url)) as connection:
            connection.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            if connection.recv(4096).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.2)
    raise TimeoutError("the gateway is not ready")


if __name__ == "__main__":
    main()
