"""What `streamkv bench` sends: named workloads, and recorded traces. Everything follows from the seed.

decode1      3 requests one after another, prompt 128, output 256
batch256     256 requests at once, prompt 512, output 256
mixed        768 requests, 256 at a time; prompts lognormal (median 200, sigma 0.9, 16 to 2048), outputs lognormal
             (median 150, sigma 0.8, 8 to 1024)
long         16 requests, 4 at a time, prompt 8192, output 32
prefix       256 requests, 64 at a time: a shared prefix of 2048 tokens and 64 own ones, output 64
prefix-cold  the same, each with a prefix of its own
online       Poisson arrivals at --rate for --duration, lengths as mixed
stall        32 streams (prompt 64, output --stall-out); 2 s after all have started, 4 prompts of 16384 tokens
             (output 8), 1 s apart: what do the streams notice?
cpu-small    32 requests, 8 at a time, prompt 64 to 192, output 64
"""

import csv
import gzip
import io
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from streamkv.errors import StreamKVError
from streamkv.lengths import mixed

TRACE_BLOCK_TOKENS: Final = 512
"""One of a trace's hash ids stands for this many tokens."""
STALL_PROMPTS: Final = 4


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a run. Token ids are uniform, so that no prompt is in a cache by accident."""

    prompt: list[int]
    output_tokens: int
    at_s: float = 0.0
    """When it is sent, from the start of the run; only where `concurrency` is 0."""
    injected: bool = False
    """One of the long prompts of `stall`."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run, and how they are sent: `concurrency` at a time, or at their own times when it is 0."""

    name: str
    requests: list[Request]
    concurrency: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What the options change about a workload. 0 keeps the workload's own number."""

    seed: int = 0
    vocab: range = range(1000, 30000)
    scale: float = 1.0
    """Factor for the numbers of requests and of those at a time."""
    len_scale: float = 1.0
    """Factor for the lengths of prompts and outputs."""
    requests: int = 0
    concurrency: int = 0
    rate: float = 4.0
    duration_s: float = 0.0
    stall_out: int = 512
    time_scale: float = 1.0
    """Factor for the times of a trace: 0.5 replays it twice as fast."""
    max_prompt: int = 0
    max_output: int = 0


class TraceError(StreamKVError):
    """A trace file cannot be read."""


class Builder:
    """Makes the workloads of one shape. Equal shapes give equal requests."""

    def __init__(self, name: str, shape: Shape) -> None:
        self._name = name
        self._shape = shape
        self._random = random.Random(f"{shape.seed} {name}")

    def build(self) -> Workload:
        """The named workload. Raises KeyError for a name that is none."""
        return Workload(self._name, *BUILDERS[self._name](self))

    def decode1(self) -> tuple[list[Request], int]:
        return self._equal(self._count(3), 128, 256), 1

    def batch256(self) -> tuple[list[Request], int]:
        requests = self._equal(self._count(256), 512, 256)
        return requests, self._shape.concurrency or len(requests)

    def mixed(self) -> tuple[list[Request], int]:
        return [self._mixed_request() for _ in range(self._count(768))], self._at_a_time(256)

    def long(self) -> tuple[list[Request], int]:
        return self._equal(self._count(16), 8192, 32), self._at_a_time(4)

    def prefix(self) -> tuple[list[Request], int]:
        shared = self.ids(2048)
        return [Request(shared + self.ids(64), self._size(64)) for _ in range(self._count(256))], self._at_a_time(64)

    def prefix_cold(self) -> tuple[list[Request], int]:
        requests = [Request(self.ids(2048) + self.ids(64), self._size(64)) for _ in range(self._count(256))]
        return requests, self._at_a_time(64)

    def online(self) -> tuple[list[Request], int]:
        requests: list[Request] = []
        at_s = self._random.expovariate(self._shape.rate)
        while at_s < (self._shape.duration_s or 45.0):
            requests.append(self._mixed_request(at_s))
            at_s += self._random.expovariate(self._shape.rate)
        return requests, 0

    def stall(self) -> tuple[list[Request], int]:
        streams = self._equal(self._count(32), 64, self._shape.stall_out)
        injected = [Request(self.ids(16384), self._size(8), injected=True) for _ in range(STALL_PROMPTS)]
        return streams + injected, len(streams)

    def cpu_small(self) -> tuple[list[Request], int]:
        requests = [Request(self.ids(self._random.randint(64, 192)), self._size(64)) for _ in range(self._count(32))]
        return requests, self._at_a_time(8)

    def _count(self, usual: int) -> int:
        return max(1, round((self._shape.requests or usual) * self._shape.scale))

    def _at_a_time(self, usual: int) -> int:
        return max(1, round((self._shape.concurrency or usual) * self._shape.scale))

    def _size(self, tokens: int) -> int:
        return max(2, round(tokens * self._shape.len_scale))

    def ids(self, tokens: int) -> list[int]:
        return self._random.choices(self._shape.vocab, k=self._size(tokens))

    def _equal(self, count: int, prompt: int, output: int) -> list[Request]:
        return [Request(self.ids(prompt), self._size(output)) for _ in range(count)]

    def _mixed_request(self, at_s: float = 0.0) -> Request:
        prompt, output = mixed(self._random)
        return Request(self.ids(prompt), self._size(output), at_s)


BUILDERS: Final[dict[str, Callable[[Builder], tuple[list[Request], int]]]] = {
    "decode1": Builder.decode1,
    "batch256": Builder.batch256,
    "mixed": Builder.mixed,
    "long": Builder.long,
    "prefix": Builder.prefix,
    "prefix-cold": Builder.prefix_cold,
    "online": Builder.online,
    "stall": Builder.stall,
    "cpu-small": Builder.cpu_small,
}


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request. `hash_ids`: equal ids are equal blocks of 512 tokens; empty where the trace has none."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: list[int]


def read_trace(path: Path) -> Iterator[TraceRow]:
    """The rows of a Mooncake .jsonl or an Azure .csv, either also as .gz, in their order.

    Raises TraceError, which says after how many rows.
    """
    name = path.name.removesuffix(".gz")
    if not name.endswith((".jsonl", ".csv")):
        raise TraceError(f"{path}: a trace is a .jsonl (Mooncake) or .csv (Azure) file, or one of these as .gz")
    num_good = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text = io.TextIOWrapper(file, encoding="utf-8")
            for row in _mooncake(text) if name.endswith(".jsonl") else _azure(text):
                if row.prompt_tokens < 1 or row.output_tokens < 0 or not math.isfinite(row.at_s):
                    raise ValueError(f"lengths and times cannot be {row}")
                yield row
                num_good += 1
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise TraceError(f"{path}, after {num_good} good rows: {type(error).__name__}: {error}") from error


def _mooncake(lines: Iterator[str]) -> Iterator[TraceRow]:
    for line in lines:
        row = json.loads(line)
        hash_ids = [int(block) for block in row.get("hash_ids", [])]
        yield TraceRow(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), hash_ids)


def _azure(lines: Iterator[str]) -> Iterator[TraceRow]:
    first: datetime | None = None
    for row in csv.DictReader(lines):
        stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])  # the seventh decimal of a second is more than it takes
        first = first or stamp
        seconds = (stamp - first).total_seconds()
        yield TraceRow(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]), [])


def replay(path: Path, shape: Shape) -> Workload:
    """A trace as a workload: at the recorded times, or `concurrency` at a time where that is set.

    Blocks with equal hash ids become equal tokens, so that a prefix cache finds what it would have found. Rows without
    output ask for one token. Raises TraceError.
    """
    requests: list[Request] = []
    start_s: float | None = None
    for row in read_trace(path):
        start_s = row.at_s if start_s is None else start_s
        at_s = (row.at_s - start_s) * shape.time_scale
        if (shape.requests and len(requests) >= shape.requests) or (shape.duration_s and at_s >= shape.duration_s):
            break
        prompt_tokens = _scaled(row.prompt_tokens, shape.len_scale, shape.max_prompt)
        output_tokens = _scaled(row.output_tokens, shape.len_scale, shape.max_output)
        requests.append(Request(_trace_prompt(row, prompt_tokens, len(requests), shape), output_tokens, at_s))
    if not requests:
        raise TraceError(f"{path}: no rows within the limits")
    return Workload(path.name, requests, shape.concurrency)


def _scaled(tokens: int, factor: float, limit: int) -> int:
    scaled = max(1, round(tokens * factor))
    return min(scaled, limit) if limit else scaled


def _trace_prompt(row: TraceRow, prompt_tokens: int, index: int, shape: Shape) -> list[int]:
    block_tokens = max(1, round(TRACE_BLOCK_TOKENS * shape.len_scale))
    prompt: list[int] = []
    for block in row.hash_ids:
        prompt += random.Random(f"{shape.seed} block {block}").choices(shape.vocab, k=block_tokens)
    short_by = max(0, prompt_tokens - len(prompt))
    own = random.Random(f"{shape.seed} row {index}").choices(shape.vocab, k=short_by)
    return (prompt + own)[:prompt_tokens]
