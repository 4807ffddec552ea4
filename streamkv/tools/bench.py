"""`streamkv bench`: loads any OpenAI-compatible server with a workload or a recorded trace, and reports its latency."""

import argparse
import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import msgspec

from streamkv.client import Client
from streamkv.errors import StreamKVError
from streamkv.tools import report, workloads
from streamkv.tools.arguments import json_object, number, output_file
from streamkv.tools.driver import PATHS, BenchError, Options, Run, run_load, warm_up
from streamkv.tools.report import Record
from streamkv.tools.workloads import BUILDERS, Shape


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    made = argparse.ArgumentParser(
        prog="streamkv bench",
        description="Loads an OpenAI-compatible server and reports latency and throughput.",
        epilog=f"Workloads:\n{(workloads.__doc__ or '').partition(chr(10) * 2)[2]}\n"
        f"Figures:\n{(report.__doc__ or '').partition(chr(10) * 2)[2]}\n"
        "A second run with the same seed hits the server's prefix cache: give it another --seed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = made.add_argument_group("what is sent")
    either = what.add_mutually_exclusive_group(required=True)
    either.add_argument("--workload", choices=BUILDERS, metavar="NAME", help="one of the list below")
    either.add_argument("--trace", metavar="FILE", help="replay a trace: Mooncake .jsonl or Azure .csv, also .gz")
    what.add_argument("--seed", type=number(0, int), default=0, metavar="N", help="same seed, same requests")
    what.add_argument("--requests", type=number(1, int), default=0, metavar="N", help="number of requests")
    what.add_argument("--concurrency", type=number(1, int), default=0, metavar="N", help="requests at a time")
    what.add_argument("--scale", type=number(0, float, True), default=1.0, metavar="X", help="factor for these two")
    what.add_argument("--len-scale", type=number(0, float, True), default=1.0, metavar="X", help="factor for lengths")
    what.add_argument("--rate", type=number(0, float, True), default=4.0, metavar="X", help="online: requests/s")
    what.add_argument(
        "--duration",
        type=number(0, float, True),
        default=0.0,
        metavar="S",
        help="online: seconds of arrivals (default 45); a trace: replay only this long",
    )
    what.add_argument("--stall-out", type=number(2, int), default=512, metavar="N", help="stall: tokens per stream")
    what.add_argument(
        "--time-scale", type=number(0, float), default=1.0, metavar="X", help="a trace: factor for its times"
    )
    what.add_argument("--max-prompt", type=number(1, int), default=0, metavar="N", help="a trace: longest prompt")
    what.add_argument("--max-output", type=number(1, int), default=0, metavar="N", help="a trace: longest output")
    what.add_argument("--vocab-lo", type=number(0, int), default=1000, metavar="ID", help="lowest token id sent")
    what.add_argument("--vocab-hi", type=number(1, int), default=30000, metavar="ID", help="ids stay below this")
    where = made.add_argument_group("where it goes")
    where.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default: %(default)s")
    where.add_argument("--model", default="", metavar="NAME", help="default: the first that the server lists")
    where.add_argument("--api-key", default=os.environ.get("STREAMKV_API_KEY", ""), metavar="KEY")
    where.add_argument("--api", choices=PATHS, default="completions", help="chat sends the prompt as one user message")
    where.add_argument(
        "--prompt-format", choices=("ids", "text"), default="ids", help="text: for servers that take no token ids"
    )
    where.add_argument(
        "--tokenizer",
        default="",
        metavar="PATH",
        help="text: tokenizer.json, or its folder, that turns the ids into text; without it words are sent",
    )
    where.add_argument(
        "--extra",
        type=json_object,
        default={},
        metavar="JSON",
        help="""fields to add or replace: '{"top_k": 40}'; null takes one out: '{"ignore_eos": null}'""",
    )
    where.add_argument("--timeout", type=number(0, float, True), default=600.0, metavar="S", help="for one request")
    where.add_argument("--procs", type=number(1, int), default=1, metavar="N", help="client processes")
    where.add_argument("--warmup", type=number(0, int), default=2, metavar="N", help="small requests before the run")
    then = made.add_argument_group("what is reported")
    then.add_argument("--slo-ttft", type=number(0, float), default=1.0, metavar="S", help="goodput: limit on TTFT")
    then.add_argument("--slo-tpot", type=number(0, float), default=0.05, metavar="S", help="goodput: limit on TPOT")
    then.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    then.add_argument("--per-request", action="store_true", help="add every request to the JSON")
    then.add_argument("--plot", type=output_file, metavar="FILE.png", help="plot latency over time (needs matplotlib)")
    return made


async def _first_model(base_url: str, api_key: str) -> str:
    async with Client(base_url, api_key) as client:
        models = await client.models()
    if not models:
        raise BenchError(f"{base_url} lists no models: name one with --model")
    return models[0]


def _run_of(chosen: argparse.Namespace) -> Run:
    return Run(
        options=Options(
            chosen.base_url,
            chosen.model or asyncio.run(_first_model(chosen.base_url, chosen.api_key)),
            chosen.api,
            chosen.prompt_format,
            chosen.tokenizer,
            chosen.api_key,
            chosen.extra,
            chosen.timeout,
        ),
        workload=chosen.workload or "",
        trace=chosen.trace or "",
        shape=Shape(
            seed=chosen.seed,
            vocab=range(chosen.vocab_lo, chosen.vocab_hi),
            scale=chosen.scale,
            len_scale=chosen.len_scale,
            requests=chosen.requests,
            concurrency=chosen.concurrency,
            rate=chosen.rate,
            duration_s=chosen.duration,
            stall_out=chosen.stall_out,
            time_scale=chosen.time_scale,
            max_prompt=chosen.max_prompt,
            max_output=chosen.max_output,
        ),
    )


def _write_json(path: Path, summary: report.Summary, records: list[Record], per_request: bool) -> None:
    figures = msgspec.to_builtins(summary)
    if per_request:
        start_s = min(record.start_s for record in records)
        figures["requests"] = [
            {
                "index": record.index,
                "prompt_tokens": record.prompt_tokens,
                "output_tokens": record.output_tokens,
                "start_s": round(record.start_s - start_s, 4),
                "ttft_s": round(record.ttft_s, 4) if record.output_times_s else None,
                "e2e_s": round(record.end_s - record.start_s, 4),
                "error": record.error,
            }
            for record in records
        ]
    path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 when every request got its answer, 1 when one did not, 2 for wrong options."""
    made = parser()
    chosen = made.parse_args(argv)
    if chosen.vocab_hi <= chosen.vocab_lo:
        made.error(f"--vocab-hi must be over --vocab-lo ({chosen.vocab_lo}), got {chosen.vocab_hi}")
    if chosen.plot and importlib.util.find_spec("matplotlib") is None:
        made.error("--plot needs matplotlib: pip install 'streamkv[plot]'")
    try:
        run = _run_of(chosen)
        load = run.load()
        if not load.requests:
            made.error("this workload has no requests: raise --rate or --duration")
        asyncio.run(warm_up(run.options, run.shape, chosen.warmup))
        num_processes = 1 if chosen.workload in ("stall", "decode1") else min(chosen.procs, len(load.requests))
        records, cpu_s = run_load(run, load, num_processes)
    except StreamKVError as error:
        print(f"streamkv bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("streamkv bench: interrupted; an unfinished run has no figures", file=sys.stderr)
        return 130
    records.sort(key=lambda record: record.index)
    summary = report.summarise(load.name, records, chosen.slo_ttft, chosen.slo_tpot, cpu_s)
    hidden = ("api_key", "json", "plot", "base_url", "trace")
    summary.options = {name: value for name, value in vars(chosen).items() if name not in hidden}
    print(report.table(summary))
    if chosen.json:
        _write_json(chosen.json, summary, records, chosen.per_request)
    if chosen.plot:
        report.plot(f"{load.name}: {summary.ok} requests, {summary.failed} failed", records, chosen.plot)
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
