"""The pages' routes: files with their headers, and the dashboard's data, asked for once for all who watch."""

import asyncio
import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest

from gateway.auth import ApiKeys, Caller
from gateway.engine_client import EngineClient
from streamkv.protocol import GetSnapshot, unpack_ids
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, eventually_async, running_gateway
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

FOLDER = Path(__file__).resolve().parents[2] / "gateway" / "page"
KEY = "a-key-of-the-tests-0123456789"
API_KEYS = {hashlib.sha256(KEY.encode()).digest(): Caller("tests")}
DATA = "/dashboard/data"


async def fetch(gateway: RunningGateway, path: str, **headers: str) -> tuple[int, bytes, Mapping[str, str]]:
    """Without a session of its own, so that nothing is unpacked or kept."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.get(gateway.url + path, headers=names, skip_auto_headers=["Accept-Encoding"]) as response,
    ):
        return response.status, await response.read(), response.headers


async def test_every_file_comes_with_its_type_its_etag_and_a_strict_policy() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, api_keys=ApiKeys(API_KEYS)) as gateway:
            types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
            paths = {path: f"/page/{path.name}" for path in FOLDER.iterdir()}
            assert len(paths) > 8 and {path.suffix for path in paths} == set(types)
            wanted = {**paths, FOLDER / "index.html": "/", FOLDER / "dashboard.html": "/dashboard"}
            for path, address in wanted.items():
                status, body, headers = await fetch(gateway, address)
                assert (status, body) == (200, path.read_bytes())
                assert headers["Content-Type"] == f"{types[path.suffix]}; charset=utf-8"
                policy = headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
                assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-cache"
                status, body, again = await fetch(gateway, address, If_None_Match=headers["ETag"])
                assert (status, body, again["ETag"]) == (304, b"", headers["ETag"])
                assert (await fetch(gateway, address, If_None_Match='"other"'))[0] == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "%2e%2e%2fkeys.py", ".htaccess"])
async def test_only_the_pages_files_are_there(name: str) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            assert (await fetch(gateway, f"/page/{name}"))[0] == 404


def test_the_pages_load_nothing_from_elsewhere_and_have_no_script_of_their_own() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[^\s\"'`)<>\\]+", text)) - {"http://www.w3.org/2000/svg"}
        assert all(address.startswith("http://127.0.0.1") for address in addresses), (path.name, addresses)
        if path.suffix == ".html":
            assert re.findall(r"<script(?![^>]*src=)", text) == re.findall(r"\s(?:on\w+|style)=", text) == []
        if path.suffix == ".js":
            assert not re.search(
                r"innerHTML|outerHTML\s*=|insertAdjacentHTML|document\.write|\beval\(|new Function", text
            )


async def test_the_data_show_the_blocks_of_what_runs() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, num_blocks=40, step_s=0.02)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            body = {"prompt": list(range(30, 50)), "max_tokens": 200, "temperature": 0}
            live = asyncio.create_task(gateway.events("/v1/completions", body))

            async def has_sequence() -> bool:
                status, text = await gateway.get(DATA)
                return status == 200 and len(json.loads(text)["snapshot"]["sequences"]) == 1

            await eventually_async(has_sequence, 30.0)
            status, packed, headers = await fetch(gateway, DATA, Accept_Encoding="gzip")
            assert (status, headers["Content-Encoding"], headers["Cache-Control"]) == (200, "gzip", "no-store")
            data = json.loads(gzip.decompress(packed))
            engine_facts, snapshot = data["engine"], data["snapshot"]
            assert (engine_facts["state"], engine_facts["num_blocks"], engine_facts["block_size"]) == ("ready", 40, 16)
            states = base64.b64decode(snapshot["block_states"])
            (sequence,) = snapshot["sequences"]
            table = unpack_ids(base64.b64decode(sequence[7]))
            assert len(states) == 40 and sequence[1:3] == ["running", 20]
            assert [block for block in range(40) if states[block] == 3] == sorted(table)
            assert "prompt" not in json.dumps(snapshot["sequences"])
            live.cancel()

            async def is_empty() -> bool:
                found = json.loads((await gateway.get(DATA))[1])["snapshot"]
                return not found["sequences"] and set(base64.b64decode(found["block_states"])[1:]) <= {1, 2}

            await eventually_async(is_empty, 30.0)


async def test_the_data_need_the_key() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, api_keys=ApiKeys(API_KEYS)) as gateway:
            assert (await fetch(gateway, DATA))[0] == 401
            assert (await fetch(gateway, DATA, Authorization=f"Bearer {KEY}"))[0] == 200


async def test_many_viewers_share_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    num_asked = 0
    ask = EngineClient.snapshot

    async def counted(self: EngineClient, timeout_s: float) -> object:
        nonlocal num_asked
        num_asked += 1
        return await ask(self, timeout_s)

    monkeypatch.setattr(EngineClient, "snapshot", counted)
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            found = await asyncio.gather(*(gateway.get(DATA) for _ in range(50)))
            assert {status for status, _ in found} == {200} and num_asked <= 2


async def test_an_engine_that_is_not_ready_is_told_of() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, load_s=2.0)) as engine:
        async with running_gateway(engine.endpoint, is_ready=False) as gateway:

            async def is_loading() -> bool:
                data = json.loads((await gateway.get(DATA))[1])
                return data["engine"]["state"] == "loading" and data["snapshot"] is None

            await eventually_async(is_loading, 30.0)


async def test_an_engine_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.dashboard._TIMEOUT_S", 0.05)
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            handle = engine.loop._handle
            monkeypatch.setattr(
                engine.loop,
                "_handle",
                lambda sender, message: None if isinstance(message, GetSnapshot) else handle(sender, message),
            )
            data = json.loads((await gateway.get(DATA))[1])
            assert data["engine"]["state"] == "ready" and data["snapshot"] is None
