"""Times sampling on one GPU: python tests/bench/sampling.py. Checks its tokens against the CPU's first.

Each figure is the median of 20 replays of a CUDA graph that has one call for each of several sets of logits, together
larger than twice the second-level cache, divided by the number of calls; `in cache` is the same over one set, as when
the logits have just been written. Logits are flat, normal numbers as of a model of random weights, or peaked, where a
few hundred tokens stand out, as of a real one.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import triton

from engine.execution.device_sampler import DeviceSampler
from engine.execution.sampler import SampledRow, sample
from engine.kernels.likeliest import likeliest, tile_sums
from engine.plan import NewSequence
from streamkv.sampling import SamplingParams

DEVICE = torch.device("cuda")
BYTES_TOGETHER = 300e6
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_k 1000": {"top_k": 1000},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "all three": {"temperature": 0.8, "top_k": 3000, "top_p": 0.9, "min_p": 0.001},
}


def graph_us(calls: list[Callable[[], object]], num_replays: int = 20) -> float:
    """Microseconds a call."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(num_replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def timed(call: Callable[[torch.Tensor], None], every: list[torch.Tensor]) -> str:
    return f"{graph_us([partial(call, logits) for logits in every]):.1f}"


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def make_logits(num_rows: int, vocab_size: int, is_peaked: bool, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, device=DEVICE, generator=generator)
    if is_peaked:
        logits *= 2.5
        ids = torch.randint(0, vocab_size, (num_rows, 300), device=DEVICE, generator=generator)
        ranks = torch.arange(300, device=DEVICE, dtype=torch.float32).expand(num_rows, -1)
        logits.scatter_(1, ids, 22.0 - 2.0 * ranks**0.4)
    return logits


class Bench:
    """A sampler whose slots all have one kind of settings."""

    def __init__(self, num_rows: int, vocab_size: int, settings: dict[str, float]) -> None:
        self.sampler = DeviceSampler(num_rows, vocab_size, DEVICE)
        self.rows = []
        for i in range(num_rows):
            sampling = SamplingParams(seed=2**63 + i, max_tokens=1000, **settings)  # type: ignore[arg-type]
            self.rows.append(SampledRow(NewSequence(i, i % 3, sampling, 5, (), [1, 2, 3, 4, 5]), 100 + i))
            self.sampler.add(i, self.rows[-1].sequence, [])
        self.sampler.upload()
        self.seq_slots = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
        self.positions = torch.arange(100, 100 + num_rows, dtype=torch.int32, device=DEVICE)
        self.token_ids = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)

    def sample(self, logits: torch.Tensor) -> None:
        filters = self.sampler.has_filters
        self.sampler.sample(logits, self.seq_slots, self.positions, self.token_ids, self.last_tokens, filters=filters)

    def more(self, logits: torch.Tensor) -> None:
        self.sampler.sample_more(
            logits, self.rows, self.seq_slots, self.positions, self.token_ids, self.last_tokens, None
        )

    def penalise(self, logits: torch.Tensor) -> None:
        self.sampler._changes.penalise(logits, self.seq_slots, self.sampler._settings)


def tell(logits: torch.Tensor) -> None:
    """Log probabilities of a chosen token and twenty more, of each row."""
    rows = torch.arange(len(logits), dtype=torch.int32, device=DEVICE)
    sums = tile_sums(logits, rows)
    likeliest(logits, rows, sums.maxima, sums, rows, 20)


def check() -> None:
    """Raises AssertionError where more than rounding makes the tokens differ."""
    num_different = num_tokens = 0
    for vocab_size in (128256, 151936, 49152):
        for is_peaked in (False, True):
            logits = make_logits(24, vocab_size, is_peaked, vocab_size)
            for name, settings in KINDS.items():
                bench = Bench(24, vocab_size, settings)
                bench.sample(logits)
                got = bench.token_ids.tolist()
                wanted = sample(logits.cpu(), bench.rows)
                num_tokens += 24
                num_different += sum(a != b for a, b in zip(got, wanted, strict=True))
                if name == "greedy":
                    assert got == wanted, f"greedy tokens differ at {vocab_size}"
                alone = Bench(1, vocab_size, settings)
                alone.sampler.add(0, bench.rows[7].sequence, [])
                alone.sampler.upload()
                alone.positions.fill_(107)
                alone.sample(logits[7:8])
                assert alone.token_ids.tolist() == got[7:8], f"{name}: a row alone gets another token"
    print(f"{num_different} of {num_tokens} tokens are not those of the CPU")
    # A flat row's sums pass 100,000 borders, and the CPU's are of float32.
    assert num_different <= num_tokens // 50


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    start = time.perf_counter()
    DeviceSampler(256, 128256, DEVICE).compile()
    torch.cuda.synchronize()
    print(f"compiling: {time.perf_counter() - start:.1f} s")
    check()
    row("sampling, µs", "logits", "vocabulary", 1, "1, in cache", 16, 256)
    row(*["---"] * 7)
    for vocab_size in (128256, 151936):
        for is_peaked in (False, True):
            many = [make_logits(256, vocab_size, is_peaked, seed) for seed in range(3)]
            for name, settings in KINDS.items():
                if vocab_size == 151936 and name not in ("greedy", "temperature", "top_p 0.95"):
                    continue
                cells = []
                for num_rows in (1, -1, 16, 256):
                    bench = Bench(abs(num_rows), vocab_size, settings)
                    num_sets = max(2, min(64, int(BYTES_TOGETHER / (4 * vocab_size * abs(num_rows)))))
                    every = [part for logits in many for part in logits.split(abs(num_rows))][:num_sets]
                    if num_rows < 0:
                        every = every[:1] * 20
                    cells.append(timed(bench.sample, every))
                row(name, "peaked" if is_peaked else "flat", vocab_size, *cells)
    bench_more()


def bench_more() -> None:
    """What only some rows ask for, and what it costs the host."""
    vocab_size = 128256
    row("beside it, µs", "", "vocabulary", 1, "", 16, 256)
    row(*["---"] * 7)
    many = [make_logits(256, vocab_size, True, seed) for seed in range(3)]
    penalties: list[str] = []
    tops: list[str] = []
    for num_rows in (1, 16, 256):
        bench = Bench(num_rows, vocab_size, {"presence_penalty": 0.5, "repetition_penalty": 1.1})
        bench.more(many[0][:num_rows].clone())
        every = [part for logits in many for part in logits.split(num_rows)][:64]
        penalties.append(timed(bench.penalise, every))
        tops.append(timed(tell, every))
    row("penalties", "", vocab_size, penalties[0], "", *penalties[1:])
    row("log probabilities, top 20", "", vocab_size, tops[0], "", *tops[1:])
    for name, settings in {
        "host: plain": {"temperature": 0.0},
        "host: top_p": {"top_p": 0.9},
        "host: penalties": {"presence_penalty": 0.5},
        "host: log probabilities": {"logprobs": 5},
    }.items():
        cells = []
        for num_rows in (1, 16, 256):
            bench = Bench(num_rows, vocab_size, settings)
            logits = many[0][:num_rows].clone()
            call = bench.more if bench.sampler.needs_more(bench.rows) else bench.sample
            for _ in range(3):
                call(logits)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                call(logits)
            cells.append(f"{(time.perf_counter() - start) * 1e5:.0f}")
            torch.cuda.synchronize()
        row(name, "", vocab_size, cells[0], "", *cells[1:])


if __name__ == "__main__":
    main()
