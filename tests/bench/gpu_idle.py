"""How long the GPU of a served model has nothing to do: engine, gateway and clients as they are, under a profiler.

    python tests/bench/gpu_idle.py --loadgen LOADGEN.py --model FOLDER [--workload batch256] [--times 2]
        [-- flags of the engine]

Starts `streamkv gateway` and, in place of `streamkv engine`, this file with --engine: the same engine, which profiles
some steps when it is told to. LOADGEN.py is as in gpu_bars.py. The word is given when as many sequences run as are
allowed, none waits and the last prompts are through. Prints for each load the steps, their time, the prompt tokens that
came meanwhile, none in steady decode, and the share of the time in which no kernel and no copy ran. The profiler slows
the host, so that what it finds is an upper bound.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NUM_LEFT_OUT = 10
"""Steps at the beginning: the profiler's start lets the device run dry."""
NUM_PROFILED = 50
LIMIT_S = 150.0


class Profiled:
    """In the engine's process, on the loop's thread: profiles the launches behind the word, FOLDER/go."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._profile: Any = None
        self._left = 0

    def before_launch(self) -> None:
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self._stop()
        elif (self._folder / "go").exists():
            (self._folder / "go").unlink()
            self._start()

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile  # not in the process that starts the others

        self._left = NUM_LEFT_OUT + NUM_PROFILED
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._profile.start()

    def _stop(self) -> None:
        import torch

        torch.cuda.synchronize()
        profiled, self._profile = self._profile, None
        profiled.stop()
        threading.Thread(target=self._tell, args=(profiled,)).start()

    def _tell(self, profiled: Any) -> None:
        import torch

        spans = sorted(
            (event.time_range.start, event.time_range.end, event.name)
            for event in profiled.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        told = summary_of(spans)
        (self._folder / "written").write_text(json.dumps(told))
        (self._folder / "written").rename(self._folder / "idle.json")


def summary_of(spans: list[tuple[float, float, str]]) -> dict[str, Any]:
    """spans: (start, end, name) in us of what ran on the device, from a run that was warm after some steps."""
    ends = [end for _, end, name in spans if "_sample_kernel" in name]
    if len(ends) <= NUM_LEFT_OUT:
        return {"steps": 0, "launches": len(spans)}
    first, last = ends[NUM_LEFT_OUT - 1], ends[-1]
    busy_us, reached = 0.0, first
    times: Counter[str] = Counter()
    gaps: list[tuple[float, str]] = []
    for start, end, name in spans:
        if end <= first or end > last:
            continue
        if start > reached:
            gaps.append((round(start - reached, 1), name[:50]))
        busy_us += max(0.0, end - max(start, reached))
        times[name[:50]] += end - start
        reached = max(reached, end)
    steps = len(ends) - NUM_LEFT_OUT
    return {
        "steps": steps,
        "step_ms": round((last - first) / steps / 1e3, 3),
        "idle_percent": round(100 * (1 - busy_us / (last - first)), 2),
        "longest_gaps_us": sorted(gaps)[::-1][:4],
        "most_us": [(round(spent / steps), name) for name, spent in times.most_common(8)],
    }


def figure(metrics: str, name: str) -> float:
    found = re.search(rf"^streamkv_{name} (\S+)", metrics, re.MULTILINE)
    return float(found[1]) if found else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loadgen", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", default="batch256")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--port", type=int, default=8127)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="idle-", dir="/tmp"))
    url = f"http://127.0.0.1:{args.port}"
    endpoint = ["--endpoint", f"ipc://{folder}/engine"]
    engine = [
        sys.executable, __file__, "--engine", str(folder), "--model", args.model, "--load-format", "dummy",
        "--max-model-len", "20000", "--max-num-seqs", str(args.max_num_seqs), *endpoint, *args.flags,
    ]  # fmt: skip
    gateway = [
        sys.executable, "-m", "streamkv", "gateway", "--model", args.model, "--served-model-name", "m", "--port",
        str(args.port), *endpoint,
    ]  # fmt: skip
    until_s = time.monotonic() + LIMIT_S
    processes: list[subprocess.Popen[bytes]] = []

    def ask(path: str) -> str:
        try:
            with urllib.request.urlopen(url + path, timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return ""

    def wait_for(is_so: Callable[[], object], what: str) -> None:
        while not is_so():
            if time.monotonic() > until_s or any(process.poll() not in (None, 0) for process in processes):
                raise SystemExit(f"not in time: {what}; see {folder}")
            time.sleep(0.02)

    try:
        for name, command in (("engine", engine), ("gateway", gateway)):
            with (folder / f"{name}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ))
        wait_for(lambda: ask("/ready"), "ready")

        def is_full() -> bool:
            metrics = ask("/metrics")
            running = figure(metrics, "num_running_sequences")
            return running == args.max_num_seqs and figure(metrics, "num_waiting_sequences") == 0

        for number in range(args.times):
            with load(args, url, number):
                wait_for(is_full, "a full batch")
                time.sleep(0.3)
                before = ask("/metrics")
                (folder / "go").touch()
                wait_for((folder / "idle.json").exists, "the profile")
                after = ask("/metrics")
            told = json.loads((folder / "idle.json").read_text())
            (folder / "idle.json").unlink()
            prompts = figure(after, "prompt_tokens_total") - figure(before, "prompt_tokens_total")
            print(
                f"{args.model} {args.workload}: prompt tokens meanwhile {prompts:.0f}; {json.dumps(told)}", flush=True
            )
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def load(args: argparse.Namespace, url: str, number: int) -> Iterator[None]:
    """In its block the load runs; it is through when the block is left."""
    command = [
        sys.executable, args.loadgen, "--base-url", url, "--model", "m", "--procs", "4", "--seed", str(77 + number),
        "--json", os.devnull, "--workload", args.workload,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
        process.wait(60)
    finally:
        process.kill()


def engine_main(folder: str, argv: list[str]) -> int:
    from engine.__main__ import main as run_engine
    from engine.execution.gpu_runner import GpuRunner

    profiled, launch = Profiled(Path(folder)), GpuRunner.launch

    def launch_profiled(self: GpuRunner, *args: Any) -> Any:
        profiled.before_launch()
        return launch(self, *args)

    GpuRunner.launch = launch_profiled  # type: ignore[method-assign]
    return run_engine(argv, os.environ)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        code = engine_main(sys.argv[2], sys.argv[3:])
        sys.stdout.flush()
        os._exit(code)
    main()
