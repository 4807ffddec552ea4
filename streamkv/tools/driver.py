"""Sends a workload's requests to an OpenAI-compatible server, from one process or several, and records their fate."""

import asyncio
import multiprocessing
import re
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol

import aiohttp
import msgspec

from streamkv.client import api_url, error_text
from streamkv.errors import StreamKVError
from streamkv.tools import workloads
from streamkv.tools.report import Record
from streamkv.tools.workloads import Builder, Request, Shape, Workload

PATHS: Final = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

# An event carries output when it has text, or when its text is empty because a token's characters are incomplete.
_OUTPUT = re.compile(
    rb'"(?:text|content|reasoning_content)"\s*:\s*"[^"]|"text"\s*:\s*""[^\n]*?"finish_reason"\s*:\s*null'
)
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')
_OUTPUT_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_FINISH_REASON = re.compile(rb'"finish_reason"\s*:\s*"(\w+)"')
_ERROR_EVENT = re.compile(rb'^data:\s*(\{\s*"error".*)$', re.MULTILINE)
_TAIL_BYTES: Final = 8192
BEFORE_INJECTED_S: Final = 2.0
"""From the first token of the last stream of `stall` to its first long prompt."""
BETWEEN_INJECTED_S: Final = 1.0
"""What is kept of a stream's end, where usage, finish reason and errors stand."""

# Frequent English words, each about one token of most vocabularies: prompts for servers that take no token ids.
_TEXT: Final = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were her all she there would their we him been has when who will more no if out so said what up its "
    "about into than them can only other new some could time these two may then do first any my now such like our "
    "over man me even most made after also did many before must through back years where much your way well down "
    "should because each just those people how too little state good very make world still own see men work long "
    "get here between both life being under never day same another know while last might us great old year off come"
)
WORDS: Final = tuple(_TEXT.split())


class BenchError(StreamKVError):
    """The run could not be started."""


class Options(msgspec.Struct, frozen=True):
    """How requests are sent. What they are is the workload's."""

    base_url: str
    model: str
    api: str
    prompt_format: str
    tokenizer: str
    api_key: str
    extra: dict[str, object]
    timeout_s: float


class Decoder(Protocol):
    """Token ids → text."""

    def __call__(self, ids: list[int]) -> str: ...


def as_words(ids: list[int]) -> str:
    """Text of about as many tokens as there are ids."""
    return " ".join(WORDS[token % len(WORDS)] for token in ids)


def decoder(tokenizer: str) -> Decoder:
    """Ids → their text by a tokenizer.json (or its folder); without one, words. Raises BenchError."""
    if not tokenizer:
        return as_words
    from tokenizers import Tokenizer  # loaded only here: most runs send ids

    path = Path(tokenizer)
    try:
        loaded = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
    except Exception as error:  # the library raises plain Exception
        raise BenchError(f"--tokenizer: cannot read {tokenizer}: {error}") from error
    return lambda ids: str(loaded.decode(ids, skip_special_tokens=False))


def body(options: Options, request: Request, decode: Decoder) -> bytes:
    """A request's JSON. A null among the extra fields takes that field out."""
    text = options.prompt_format == "text" or options.api == "chat"
    prompt = decode(request.prompt) if text else request.prompt
    fields: dict[str, object] = {
        "model": options.model,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"messages": [{"role": "user", "content": prompt}]} if options.api == "chat" else {"prompt": prompt}),
        **options.extra,
    }
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


class Sender:
    """Sends requests over one session, and makes a record of each."""

    def __init__(self, session: aiohttp.ClientSession, options: Options, clock: Callable[[], float]) -> None:
        self._session = session
        self._url = api_url(options.base_url, PATHS[options.api])
        self._clock = clock

    async def send(self, index: int, request: Request, data: bytes, on_first: Callable[[], None]) -> Record:
        """One request to its end. `on_first` is called once: at its first output, or at its end without any."""
        record = Record(index, request.output_tokens, len(request.prompt), request.injected, self._clock())
        record.output_times_s = []
        try:
            async with self._session.post(self._url, data=data) as response:
                if response.status != 200:
                    record.error = f"HTTP {response.status}: {error_text(await response.read())}"[:300]
                else:
                    tail, num_events = await self._read(response.content, record, on_first)
                    _conclude(record, tail, num_events)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            record.error = f"{type(error).__name__}: {error}"[:300]
        record.end_s = self._clock()
        if not record.output_times_s:
            on_first()
        return record

    async def _read(
        self, content: aiohttp.StreamReader, record: Record, on_first: Callable[[], None]
    ) -> tuple[bytes, int]:
        """The end of the stream, and how many events carried output. No event is parsed: at full load that would
        measure this program and not the server."""
        pending = tail = b""
        num_events = 0
        while piece := await content.readany():
            now_s = self._clock()
            pending += piece
            cut = max(pending.rfind(b"\n\n"), pending.rfind(b"\n\r\n"))
            if cut < 0:
                continue
            events, pending = pending[:cut], pending[cut:]
            if found := len(_OUTPUT.findall(events)):
                num_events += found
                record.output_times_s.append(now_s)
                if len(record.output_times_s) == 1:
                    on_first()
            tail = (tail + events)[-_TAIL_BYTES:]
        return tail + pending, num_events


def _conclude(record: Record, tail: bytes, num_events: int) -> None:
    """Counts and errors from the end of a stream."""
    prompt, output = _PROMPT_TOKENS.findall(tail), _OUTPUT_TOKENS.findall(tail)
    record.counted_by_server = bool(output)
    record.output_tokens = int(output[-1]) if output else num_events
    record.prompt_tokens = int(prompt[-1]) if prompt else record.prompt_tokens
    reasons = _FINISH_REASON.findall(tail)
    if error := _ERROR_EVENT.search(tail):
        record.error = f"error event: {error_text(error[1])}"[:300]
    elif not reasons:
        record.error = "stream broke off without a finish reason"
    elif reasons[-1] in (b"abort", b"error"):
        record.error = f"finish reason {reasons[-1].decode()}"
    elif not record.output_tokens:
        record.error = "answer without output"


def _nothing() -> None:
    """For requests whose first output nobody waits for."""


class Driver:
    """Sends one process's share of a workload in the workload's manner."""

    def __init__(self, sender: Sender, load: Workload, bodies: dict[int, bytes]) -> None:
        """bodies: by the index in load.requests; only those are sent."""
        self._sender = sender
        self._load = load
        self._bodies = bodies

    async def run(self, concurrency: int) -> list[Record]:
        """Send all. concurrency: of this process, 0 where each request has its own time."""
        if any(request.injected for request in self._load.requests):
            return await self._with_injected()
        if self._load.concurrency == 0:
            return await self._at_their_times()
        return await self._some_at_a_time(concurrency)

    def _send(self, index: int, on_first: Callable[[], None] = _nothing) -> Coroutine[None, None, Record]:
        return self._sender.send(index, self._load.requests[index], self._bodies[index], on_first)

    async def _some_at_a_time(self, concurrency: int) -> list[Record]:
        waiting = iter(self._bodies)

        async def work() -> list[Record]:
            return [await self._send(index) for index in waiting]

        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(work()) for _ in range(concurrency)]
        return [record for worker in workers for record in worker.result()]

    async def _at_their_times(self) -> list[Record]:
        start_s = time.monotonic()

        async def at_its_time(index: int) -> Record:
            await asyncio.sleep(start_s + self._load.requests[index].at_s - time.monotonic())
            return await self._send(index)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(at_its_time(index)) for index in self._bodies]
        return [task.result() for task in tasks]

    async def _with_injected(self) -> list[Record]:
        streams = [index for index in self._bodies if not self._load.requests[index].injected]
        started = asyncio.Event()
        left = len(streams)

        def on_first() -> None:
            nonlocal left
            left -= 1
            if not left:
                started.set()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._send(index, on_first)) for index in streams]
            await started.wait()
            await asyncio.sleep(BEFORE_INJECTED_S)
            for index in self._bodies:
                if self._load.requests[index].injected:
                    tasks.append(group.create_task(self._send(index)))
                    await asyncio.sleep(BETWEEN_INJECTED_S)
        return [task.result() for task in tasks]


class Share(msgspec.Struct, frozen=True):
    """Which part of a run one client process does: every `num`-th request from `rank`."""

    rank: int = 0
    num: int = 1


def _session(options: Options) -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=options.timeout_s),
        headers=headers,
        read_bufsize=1 << 18,
    )


async def drive(
    options: Options, load: Workload, share: Share, start: Callable[[], object]
) -> tuple[list[Record], float]:
    """One process's records and CPU seconds. `start` returns when all processes are prepared."""
    decode = decoder(options.tokenizer)
    mine = range(share.rank, len(load.requests), share.num)
    bodies = {index: body(options, load.requests[index], decode) for index in mine}
    concurrency = len(range(share.rank, min(load.concurrency, len(load.requests)), share.num))
    async with _session(options) as session:
        start()
        cpu_s = time.process_time()
        records = await Driver(Sender(session, options, time.monotonic), load, bodies).run(concurrency)
        return records, time.process_time() - cpu_s


class Run(msgspec.Struct, frozen=True):
    """All that a client process needs to make its share. The workload is made again in each, which is less than
    sending it."""

    options: Options
    workload: str
    trace: str
    shape: Shape

    def load(self) -> Workload:
        """Its requests. Raises TraceError."""
        if self.trace:
            return workloads.replay(Path(self.trace), self.shape)
        return Builder(self.workload, self.shape).build()


def _client_process(run: Run, share: Share, start: Callable[[], object], results: Connection) -> None:
    results.send(asyncio.run(drive(run.options, run.load(), share, start)))
    results.close()


def run_load(run: Run, load: Workload, num_processes: int) -> tuple[list[Record], float]:
    """Records and CPU seconds of all client processes. Raises BenchError when one of them died."""
    if num_processes == 1:
        return asyncio.run(drive(run.options, load, Share(), _nothing))
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_processes)
    ends: list[Connection] = []
    processes = []
    for rank in range(num_processes):
        receiver, sender = context.Pipe(duplex=False)
        arguments = (run, Share(rank, num_processes), barrier.wait, sender)
        process = context.Process(target=_client_process, args=arguments, daemon=True)
        process.start()
        sender.close()
        ends.append(receiver)
        processes.append(process)
    records: list[Record] = []
    cpu_s = 0.0
    try:
        for end in ends:
            of_process, its_cpu_s = end.recv()
            records += of_process
            cpu_s += its_cpu_s
    except EOFError as error:
        raise BenchError("a client process died; its message stands above") from error
    for process in processes:
        process.join()
    return records, cpu_s


async def warm_up(options: Options, shape: Shape, count: int) -> None:
    """A few small requests, so that the run sees no first connection and no lazy start. Raises BenchError."""
    decode = decoder(options.tokenizer)
    async with _session(options) as session:
        sender = Sender(session, options, time.monotonic)
        for index in range(count):
            small = Shape(seed=shape.seed + index, vocab=shape.vocab, requests=1, len_scale=0.1)
            request = Request(Builder("warm-up", small).ids(160), 4)
            record = await sender.send(index, request, body(options, request, decode), _nothing)
            if record.error:
                raise BenchError(f"the first request to {options.base_url} failed: {record.error}")
