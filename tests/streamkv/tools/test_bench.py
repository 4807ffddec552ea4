"""`streamkv bench` against a small server: what it sends, what it counts, and that no failure is hidden."""

import asyncio
import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamkv.tools import bench, driver
from tests.support.openai_server import OpenAIServer, chat_events, completion_events, event, serving

TRACES = Path(__file__).resolve().parents[2] / "data" / "traces"


@contextmanager
def server_in_a_thread() -> Iterator[OpenAIServer]:
    """The bench has its own event loop, so the server gets a thread."""
    ready = threading.Event()
    servers: list[OpenAIServer] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        async with serving() as server:
            servers.append(server)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with server_in_a_thread() as running:
        yield running


def run(server: OpenAIServer, tmp_path: Path, *words: str) -> tuple[int, dict[str, object]]:
    file = tmp_path / "figures.json"
    status = bench.main(["--base-url", server.url, "--json", str(file), "--warmup", "0", *words])
    return status, json.loads(file.read_text())


def test_every_request_is_sent_once_and_counted(server: OpenAIServer, tmp_path: Path) -> None:
    server.gap_s = 0.002
    status, figures = run(server, tmp_path, "--workload", "cpu-small", "--requests", "10", "--concurrency", "4")
    assert status == 0
    assert (figures["ok"], figures["failed"], figures["unexpected_length"]) == (10, 0, 0)
    assert figures["output_tokens"] == 640 and figures["prompt_tokens"] == 50  # the server says 5 for each prompt
    assert server.max_live == 4
    sent = server.bodies
    assert len({tuple(body["prompt"]) for body in sent}) == 10  # type: ignore[arg-type]
    for body in sent:
        assert body["model"] == "small" and body["ignore_eos"] is True and body["temperature"] == 0
        assert body["stream"] is True and body["stream_options"] == {"include_usage": True}


def test_the_same_seed_sends_the_same(server: OpenAIServer, tmp_path: Path) -> None:
    words = ("--workload", "decode1", "--len-scale", "0.02")
    run(server, tmp_path, *words, "--seed", "5")
    run(server, tmp_path, *words, "--seed", "5")
    run(server, tmp_path, *words, "--seed", "6")
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts[:3] == prompts[3:6] and prompts[6] not in prompts[:6]


def test_several_processes_share_the_requests(server: OpenAIServer, tmp_path: Path) -> None:
    words = ("--workload", "batch256", "--requests", "12", "--len-scale", "0.02", "--procs", "2")
    status, figures = run(server, tmp_path, *words)
    assert (status, figures["ok"], len(server.bodies)) == (0, 12, 12)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 12  # type: ignore[arg-type]


def test_refusals_are_counted_by_reason_and_fail_the_run(
    server: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status, server.failure = 503, ({"error": {"message": "queue is full"}}, {})
    status, figures = run(server, tmp_path, "--workload", "cpu-small", "--requests", "3")
    assert (status, figures["ok"], figures["failed"]) == (1, 0, 3)
    assert figures["errors"] == {"HTTP 503: queue is full": 3}
    assert "3 x HTTP 503: queue is full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (completion_events(["a", "b"])[:2], "stream broke off without a finish reason"),
        ([*completion_events(["a"])[:1], event({"error": {"message": "engine lost"}})], "error event: engine lost"),
        ([event({"choices": [{"text": "a", "finish_reason": "abort"}]}), b"data: [DONE]\n\n"], "finish reason abort"),
        ([event({"choices": [{"text": "", "finish_reason": "stop"}]}), b"data: [DONE]\n\n"], "answer without output"),
    ],
)
def test_broken_answers_are_failures(server: OpenAIServer, tmp_path: Path, script: list[bytes], reason: str) -> None:
    server.script = script
    status, figures = run(server, tmp_path, "--workload", "decode1", "--requests", "1")
    assert status == 1 and figures["errors"] == {reason: 1}


def test_a_server_without_usage_is_counted_by_events(server: OpenAIServer, tmp_path: Path) -> None:
    server.script = completion_events(["a", "b", "c"], with_usage=False)
    _, figures = run(server, tmp_path, "--workload", "decode1", "--requests", "1")
    assert (figures["output_tokens"], figures["without_usage"], figures["unexpected_length"]) == (3, 1, 1)


def test_events_cut_anywhere_are_counted_right(server: OpenAIServer, tmp_path: Path) -> None:
    whole = b": keep-alive\n\n" + b"".join(completion_events(["a", "", "c"]))
    server.script = [whole[start : start + 5] for start in range(0, len(whole), 5)]
    server.gap_s = 0.001
    _, figures = run(server, tmp_path, "--workload", "decode1", "--requests", "1", "--per-request")
    assert figures["output_tokens"] == 3 and figures["failed"] == 0
    assert figures["itl_ms"]["max"] > 0  # type: ignore[index]


def test_times_are_those_of_the_server(server: OpenAIServer, tmp_path: Path) -> None:
    server.script, server.gap_s = completion_events(["a"] * 10), 0.03
    words = ("--workload", "decode1", "--requests", "1", "--slo-tpot", "0.02", "--per-request")
    _, figures = run(server, tmp_path, *words)
    assert 25 < figures["itl_ms"]["p50"] < 60 and figures["ttft_ms"]["p50"] < 30  # type: ignore[index]
    assert figures["goodput"]["met"] == 0  # type: ignore[index]
    assert figures["requests"][0]["e2e_s"] > 0.3  # type: ignore[index]


def test_text_and_chat_are_for_servers_that_take_no_ids(server: OpenAIServer, tmp_path: Path) -> None:
    run(server, tmp_path, "--workload", "decode1", "--requests", "1", "--prompt-format", "text")
    prompt = server.bodies[-1]["prompt"]
    assert isinstance(prompt, str) and len(prompt.split()) == 128
    server.script = chat_events(["a", "b"])
    status, figures = run(server, tmp_path, "--workload", "decode1", "--requests", "1", "--api", "chat")
    assert (status, figures["output_tokens"]) == (0, 2)
    assert server.bodies[-1]["messages"][0]["role"] == "user" and "prompt" not in server.bodies[-1]  # type: ignore[index]


def test_extra_fields_are_added_replaced_and_taken_out(server: OpenAIServer, tmp_path: Path) -> None:
    extra = '{"ignore_eos": null, "temperature": 0.5, "top_k": 3}'
    run(server, tmp_path, "--workload", "decode1", "--requests", "1", "--extra", extra)
    body = server.bodies[-1]
    assert "ignore_eos" not in body and (body["temperature"], body["top_k"]) == (0.5, 3)


def test_a_trace_is_replayed_at_its_times(server: OpenAIServer, tmp_path: Path) -> None:
    words = ("--trace", str(TRACES / "azure-llm-2023-conversation.csv.gz"), "--requests", "6", "--per-request")
    status, figures = run(server, tmp_path, *words, "--time-scale", "0.02", "--len-scale", "0.1", "--max-output", "5")
    requests = figures["requests"]
    assert status == 0 and isinstance(requests, list) and len(requests) == 6
    assert requests[1]["start_s"] == pytest.approx(0.02 * 4.3145, abs=0.05)
    assert len(server.bodies[0]["prompt"]) == 37  # type: ignore[arg-type]


def test_stall_sends_its_long_prompts_when_all_streams_run(
    server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "BEFORE_INJECTED_S", 0.5)
    monkeypatch.setattr(driver, "BETWEEN_INJECTED_S", 0.25)
    server.gap_s = 0.03
    words = ("--workload", "stall", "--requests", "3", "--len-scale", "0.1", "--stall-out", "1000")
    status, figures = run(server, tmp_path, *words)
    stall = figures["stall"]
    assert status == 0 and isinstance(stall, dict)
    assert len(stall["injected_ttft_ms"]) == 4 and stall["injected_while_streams_ran"] >= 3
    assert [len(body["prompt"]) for body in server.bodies] == [6] * 3 + [1638] * 4  # type: ignore[arg-type]


def test_a_plot_is_written_on_request(server: OpenAIServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(server, tmp_path, "--workload", "decode1", "--len-scale", "0.1", "--plot", str(tmp_path / "run.png"))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_an_absent_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--workload", "decode1", "--base-url", "http://127.0.0.1:9", "--model", "m"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("streamkv bench: the first request to http://127.0.0.1:9 failed: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--workload", "decode2"], "invalid choice: 'decode2'"),
        ([], "one of the arguments --workload --trace is required"),
        (["--workload", "long", "--requests", "0"], "must be a whole number of at least 1, got 0"),
        (["--workload", "long", "--rate", "nan"], "must be a number over 0, got nan"),
        (["--workload", "long", "--vocab-hi", "10"], "--vocab-hi must be over --vocab-lo (1000), got 10"),
        (["--workload", "long", "--json", "/no/such/folder/x"], "cannot write /no/such/folder/x"),
        (["--workload", "long", "--extra", "[1]"], "must be a JSON object"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(words)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        bench.main(["--workload", "long", "--plot", str(tmp_path / "x.png")])
    assert "pip install 'streamkv[plot]'" in capsys.readouterr().err
