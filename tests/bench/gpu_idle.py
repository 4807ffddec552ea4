"""How long the GPU of a served model has nothing to do: engine, gateway and clients as they are, under a profiler.

    python tests/bench/gpu_idle.py --loadgen LOADGEN.py --model FOLDER [--workload batch256] [--times 3]
        [-- flags of the engine]

Starts `streamkv gateway` and, in place of `streamkv engine`, this file with --engine: the same engine, in which a
thread waits for a word to profile for half a second. LOADGEN.py is as in gpu_bars.py. The word is given when as many
sequences run as are allowed and none waits, as often as asked for. Prints for each the steps, their time, the prompt
tokens that came meanwhile, none in steady decode, and the share of the time in which no kernel and no copy ran.
The profiler slows the host, so that what it finds is an upper bound.
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
from collections.abc import Callable
from pathlib import Path

ENDPOINT_OF = "ipc://{}/engine"
PROFILED_S = 0.5
LIMIT_S = 240.0


def spans_of(prof: object) -> list[tuple[int, int, str]]:
    """(start, end, name) in ns of what ran on the device."""
    events = prof.profiler.kineto_results.events()  # type: ignore[attr-defined]
    return sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.device_type().name == "CUDA"
    )


def profile_when_told(folder: Path) -> None:
    """In the engine's process: wait for FOLDER/go, write FOLDER/idle.json, and again."""
    from torch.profiler import ProfilerActivity, profile  # not in the process that starts the others

    while True:
        while not (folder / "go").exists():
            time.sleep(0.01)
        (folder / "go").unlink()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:
            time.sleep(PROFILED_S)
        spans = spans_of(prof)
        busy_ns, reached = 0, spans[0][0]
        longest: list[tuple[int, str]] = []
        times: Counter[str] = Counter()
        for start, end, name in spans:
            if start > reached:
                longest.append((start - reached, name))
            times[name] += end - start
            busy_ns += max(0, end - max(start, reached))
            reached = max(reached, end)
        told = {
            "span_ms": (reached - spans[0][0]) / 1e6,
            "idle_percent": 100 * (1 - busy_ns / (reached - spans[0][0])),
            "launches": len(spans),
            "samples": sum("_sample_kernel" in name for _, _, name in spans),
            "longest_gaps_us": [(round(gap / 1e3, 1), name[:60]) for gap, name in sorted(longest)[::-1][:5]],
            "most_ms": [(round(ns / 1e6, 2), name[:60]) for name, ns in times.most_common(6)],
        }
        (folder / "written").write_text(json.dumps(told))
        (folder / "written").rename(folder / "idle.json")


def figure(metrics: str, name: str) -> float:
    found = re.search(rf"^streamkv_{name} (\S+)", metrics, re.MULTILINE)
    return float(found[1]) if found else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loadgen", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", default="batch256")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--port", type=int, default=8127)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="idle-", dir="/tmp"))
    url = f"http://127.0.0.1:{args.port}"
    endpoint = ["--endpoint", ENDPOINT_OF.format(folder)]
    engine = [
        sys.executable, __file__, "--engine", str(folder), "--model", args.model, "--load-format", "dummy",
        "--max-model-len", "20000", "--max-num-seqs", str(args.max_num_seqs), *endpoint, *args.flags,
    ]  # fmt: skip
    gateway = [
        sys.executable, "-m", "streamkv", "gateway", "--model", args.model, "--served-model-name", "m", "--port",
        str(args.port), *endpoint,
    ]  # fmt: skip
    loads = [
        sys.executable, args.loadgen, "--base-url", url, "--model", "m", "--procs", "4", "--seed", "77", "--json",
        str(folder / "load.json"), "--workload", args.workload,
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
        processes.append(subprocess.Popen(loads, stdout=subprocess.DEVNULL))

        def is_full() -> bool:
            metrics = ask("/metrics")
            running = figure(metrics, "num_running_sequences")
            return running == args.max_num_seqs and figure(metrics, "num_waiting_sequences") == 0

        for _ in range(args.times):
            wait_for(is_full, "a full batch")
            time.sleep(0.5)  # the last prompt's steps
            before = ask("/metrics")
            (folder / "go").touch()
            wait_for((folder / "idle.json").exists, "the profile")
            after = ask("/metrics")
            told = json.loads((folder / "idle.json").read_text())
            (folder / "idle.json").unlink()
            prompts = figure(after, "prompt_tokens_total") - figure(before, "prompt_tokens_total")
            steps = max(1, told["samples"])
            print(
                f"{args.model} {args.workload}: {steps} steps of {told['span_ms'] / steps:.2f} ms, idle "
                f"{told['idle_percent']:.2f} %, prompt tokens meanwhile {prompts:.0f}, running "
                f"{figure(after, 'num_running_sequences'):.0f}; longest gaps {told['longest_gaps_us']}; most "
                f"{told['most_ms']}",
                flush=True,
            )
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def engine_main(folder: str, argv: list[str]) -> int:
    from engine.__main__ import main as run_engine

    threading.Thread(target=profile_when_told, args=(Path(folder),), daemon=True).start()
    return run_engine(argv, os.environ)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        code = engine_main(sys.argv[2], sys.argv[3:])
        sys.stdout.flush()
        os._exit(code)
    main()
