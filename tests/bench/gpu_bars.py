"""Serve a model shape with dummy weights on a GPU and drive it over HTTP, workload after workload.

    python tests/bench/gpu_bars.py --loadgen LOADGEN.py --model FOLDER [--only decode1,batch256] [--out FOLDER]
        [-- flags of `streamkv serve`]

LOADGEN.py is any load generator that takes --workload, --seed, --json and --watch-pid as `streamkv bench` does. Each
run gets a seed of its own, so that none finds another's prompts in the cache; `--only online-13:1` gives it that one,
to send the very requests that another server was sent. Prints the time from launch to ready and to the first token,
then one line a workload: what was asked for and what came out.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

WORKLOADS = {
    "decode1": [],
    "batch256": [],
    "mixed": [],
    "long": [],
    "prefix": [],
    "prefix-cold": [],
    "online-13": ["--workload", "online", "--rate", "13"],
    "online-26": ["--workload", "online", "--rate", "26"],
    "online-37": ["--workload", "online", "--rate", "37"],
    "stall": ["--stall-out", "2048"],
}


def first_token_s(base_url: str, started_s: float, process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Seconds from the launch to /ready's 200 and to the first generated token."""
    ready_s = 0.0
    while not ready_s:
        if process.poll() is not None:
            raise SystemExit(f"the server has ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"{base_url}/ready", timeout=5) as answer:
                ready_s = time.monotonic() - started_s if answer.status == 200 else 0.0
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    body = {"model": "m", "prompt": [1000, 1001], "max_tokens": 1, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{base_url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
    return ready_s, time.monotonic() - started_s


def line_of(name: str, figures: dict) -> str:
    ttft, itl = figures["ttft_ms"], figures["itl_ms"]
    text = (
        f"{name:<12} {figures['ok']:>4} ok {figures['failed']:>2} failed  out {figures['output_tok_s']:>8.0f}/s  "
        f"total {figures['total_tok_s']:>8.0f}/s  TTFT {ttft['p50']:.0f}/{ttft['p90']:.0f}/{ttft['p99']:.0f}  "
        f"ITL {itl['p50']:.2f}/{itl['p99']:.2f}/{itl['max']:.1f}  TPOT {figures['tpot_ms_mean']:.3f}"
    )
    if "stall" in figures:
        stall = figures["stall"]
        text += (
            f"  gaps before {stall['stream_gap_before_ms']['p50']:.1f}, p50/p99/max {stall['stream_gap_ms']['p50']:.1f}"
            f"/{stall['stream_gap_ms']['p99']:.1f}/{stall['stream_gap_ms']['max']:.1f}  "
            f"injected {stall['injected_ttft_ms']} ({stall['injected_while_streams_ran']} of 4)"
        )
    cpu = figures.get("server_cpu_percent", {})
    return text + "  CPU " + " ".join(f"{value:.0f}" for value in cpu.values() if value >= 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loadgen", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--out", default="")
    parser.add_argument("--limit-s", type=float, default=500.0, help="begin no workload after this")
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    base_url = f"http://127.0.0.1:{args.port}"
    out = Path(args.out or ".")
    out.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "streamkv", "serve", "--model", args.model, "--served-model-name", "m", "--load-format",
        "dummy", "--max-model-len", "20000", "--port", str(args.port), *args.flags,
    ]  # fmt: skip
    started_s = time.monotonic()
    lines = []
    with (out / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stderr=log, stdout=log, env=os.environ)
        try:
            ready_s, token_s = first_token_s(base_url, started_s, server)
            lines.append(f"launch to ready {ready_s:.1f} s, to the first token {token_s:.1f} s  ({args.model})")
            print(lines[-1], flush=True)
            for number, word in enumerate(args.only.split(",")):
                name, _, own_seed = word.partition(":")
                if time.monotonic() - started_s > args.limit_s:
                    lines.append(f"{name}: no time left")
                    continue
                seed = own_seed or str(args.seed + number)
                extra = WORKLOADS[name]
                given = extra if "--workload" in extra else ["--workload", name, *extra]
                path = out / f"{name}.json"
                subprocess.run(
                    [sys.executable, args.loadgen, "--base-url", base_url, "--model", "m", "--procs", "4", "--seed",
                     seed, "--watch-pid", str(server.pid), "--json", str(path), *given],
                    check=False, stdout=subprocess.DEVNULL, stderr=log, timeout=180,
                )  # fmt: skip
                lines.append(line_of(name, json.loads(path.read_text())) if path.exists() else f"{name}: no figures")
                print(lines[-1], flush=True)
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
    print("\n".join(["", "== summary", *lines]))


if __name__ == "__main__":
    main()
