"""What streams notice of long prompts, with a target for their gaps and without, in turns:

    python -m tests.bench.stall_bound [--model FOLDER] [--factor 2.5] [--turns 2] [--stall-out 1024]

Each row is a fresh `streamkv serve` under `streamkv bench --workload stall --len-scale 0.25`. The target is a multiple
of the plain decode step, which is the median gap of the first run's streams before the first long prompt.
"""

import argparse
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

READY_WITHIN_S = 180.0


@contextlib.contextmanager
def serving(model: str, target_ms: float) -> Iterator[str]:
    """The URL of a server that takes requests."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--model", model, "--port", str(port), "--itl-target-ms", str(target_ms), "--kv-cache-memory-gib", "2"]
    server = subprocess.Popen([sys.executable, "-m", "streamkv", "serve", *flags, "--log-level", "warning"])
    url = f"http://127.0.0.1:{port}"
    until_s = time.monotonic() + READY_WITHIN_S
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url + "/ready").close()
                break
            if server.poll() is not None or time.monotonic() > until_s:
                raise SystemExit("the server did not become ready")
            time.sleep(0.2)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def measure(model: str, target_ms: float, stall_out: int, seed: int) -> dict[str, float]:
    """Milliseconds, and the latency model's error; one server's run."""
    with serving(model, target_ms) as url, tempfile.TemporaryDirectory() as folder:
        figures_path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "streamkv", "bench", "--base-url", url, "--workload", "stall"]
        command += ["--len-scale", "0.25", "--stall-out", str(stall_out), "--seed", str(seed), "--json"]
        subprocess.run([*command, str(figures_path)], check=True, stdout=subprocess.DEVNULL)
        summary = json.loads(figures_path.read_bytes())
        metrics = urllib.request.urlopen(url + "/metrics").read().decode()
    stall = summary["stall"]
    error = re.search(r"^streamkv_latency_model_error (\S+)$", metrics, re.MULTILINE)
    assert error is not None
    return {
        "step": stall["stream_gap_before_ms"]["p50"],
        "before_p99": stall["stream_gap_before_ms"]["p99"],
        "p50": stall["stream_gap_ms"]["p50"],
        "p99": stall["stream_gap_ms"]["p99"],
        "max": stall["stream_gap_ms"]["max"],
        "first_token": max(stall["injected_ttft_ms"]),
        "tokens_per_s": summary["total_tokens_per_s"],
        "error": float(error.group(1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--factor", type=float, default=2.5, help="of the plain decode step")
    parser.add_argument("--target-ms", type=float, default=0.0, help="instead of --factor")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--stall-out", type=int, default=1024, help="before --len-scale 0.25")
    args = parser.parse_args()
    print(
        "| target | decode step before, p50 / p99 | gap p50 | gap p99 | largest gap | last long prompt's first token "
        "| tokens/s, prompts + output | model error |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    target_ms = args.target_ms
    for turn in range(args.turns):
        for is_bound in (False, True):
            row = measure(args.model, target_ms if is_bound else 0.0, args.stall_out, seed=turn)
            target_ms = target_ms or round(args.factor * row["step"])
            first_s = row["first_token"] / 1000
            print(
                f"| {f'{target_ms:.0f} ms' if is_bound else 'none'} | {row['step']:.0f} / {row['before_p99']:.0f} ms "
                f"| {row['p50']:.0f} ms | {row['p99']:.0f} ms | {row['max']:.0f} ms | {first_s:.1f} s "
                f"| {row['tokens_per_s']:.0f} | {100 * row['error']:.0f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
