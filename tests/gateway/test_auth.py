"""API keys: which files are taken, who is let in, and what one key's requests share with another's."""

import asyncio
import hmac
import itertools
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import auth
from gateway import keys as app_keys
from gateway.auth import ApiKeys, Caller, OriginRefused, Unauthorized, check_origin, load_api_keys
from gateway.cursor import FROM_START
from gateway.failures import UnknownStream
from gateway.outlet import NoOutlet
from streamkv.client import Client, ServerError
from streamkv.errors import ConfigError
from tests.support.running_gateway import MODEL, VOCAB_SIZE, RunningGateway, running_gateway, small_tokenizer
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.small_tokenizers import CHATML, train_byte_level, write_folder

TEXT = "/v1/completions"
PROMPT = list(range(30, 66))
ALICE, BOB, CAROL, DAVE = (f"sk-{name}-0123456789abcdef" for name in ("alice", "bob", "carol", "dave"))
FILE = f"""
alice = "{ALICE}"
bob = "{BOB}"
[carol]
key = "{CAROL}"
shares_prefix = true
[dave]
key = "{DAVE}"
shares_prefix = true
"""


def written(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "keys.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# The file and the variable


def test_a_file_has_lines_and_tables_and_the_variable_adds_a_key(tmp_path: Path) -> None:
    keys = load_api_keys(written(tmp_path, FILE), {"STREAMKV_API_KEY": "x" * 16})
    assert len(keys) == 5
    assert keys.authenticate(bearer(ALICE)) == Caller("alice")
    assert keys.authenticate(bearer(CAROL)) == Caller("carol", shares_prefix=True)
    assert keys.authenticate(bearer("x" * 16)) == Caller("default")


def test_the_setting_holds_for_entries_that_say_nothing(tmp_path: Path) -> None:
    text = FILE + f'[erin]\nkey = "{"e" * 20}"\nshares_prefix = false\n'
    keys = load_api_keys(written(tmp_path, text), {"STREAMKV_API_KEY": "x" * 16}, shares_prefix=True)
    assert keys.authenticate(bearer(ALICE)).shares_prefix
    assert keys.authenticate(bearer("x" * 16)).shares_prefix
    assert not keys.authenticate(bearer("e" * 20)).shares_prefix


def test_without_keys_everybody_is_the_anonymous_caller() -> None:
    keys = load_api_keys("", {"STREAMKV_API_KEY": ""})
    assert len(keys) == 0 and not keys
    assert keys.authenticate({}) == keys.authenticate(bearer("whatever")) == Caller()


SECRET = "do-not-show-this-anywhere"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no key"),
        ("# only a remark", "has no key"),
        (f'alice = "{SECRET}', r"not valid TOML \(at"),
        (f"alice {SECRET}", r"not valid TOML \(at line 1"),
        (f'alice = "{SECRET}"\nbob = "{SECRET}"', "alice and bob have the same key"),
        ('alice = "short"', "the key of alice must have 16 to 256"),
        (f'alice = "{SECRET} {SECRET}"', "visible ASCII"),
        (f'alice = "{SECRET}é"', "visible ASCII"),
        (f'alice = "{SECRET * 20}"', "16 to 256"),
        (f'"a b" = "{SECRET}"', "a name must have"),
        (f'"{"a" * 65}" = "{SECRET}"', "a name must have"),
        ("alice = 7", "alice must be a key in quotes"),
        (f'alice = ["{SECRET}"]', "alice must be a key in quotes"),
        (f'[alice]\nkey = "{SECRET}"\nshare = true', "unknown field `share`"),
        (f'[alice]\nkey = "{SECRET}"\nshares_prefix = "{SECRET}"', "Expected `bool"),
        ("[alice]\nshares_prefix = true", "missing required field `key`"),
        (f'default = "{SECRET}"', "the key named default"),
    ],
)
def test_a_file_that_is_none_is_refused_and_no_key_is_shown(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_api_keys(written(tmp_path, text), {"STREAMKV_API_KEY": "y" * 16})
    assert SECRET not in str(caught.value)


def test_bytes_that_are_no_text_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = Path(written(tmp_path, ""))
    path.write_bytes(b'alice = "\xff\xfe"')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_api_keys(str(path), {})
    with pytest.raises(ConfigError, match="cannot read") as caught:
        load_api_keys(str(tmp_path / "nothing"), {})
    assert caught.value.field == "api_keys_file"


def test_a_variable_that_is_no_key_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load_api_keys("", {"STREAMKV_API_KEY": "a bad key with spaces"})
    assert caught.value.field == "STREAMKV_API_KEY" and "bad key" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o444])
def test_a_file_that_others_can_read_is_taken_with_a_warning(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(load_api_keys(written(tmp_path, FILE, mode), {})) == 4
    assert [record.message for record in caplog.records] == ["others can read the API keys"]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="changed by others"):
        load_api_keys(written(tmp_path, FILE, mode), {})


def test_a_gateway_with_a_wrong_key_file_does_not_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway", f"--api-keys-file={tmp_path / 'nothing'}", "--port=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("streamkv: api_keys_file: cannot read ")


async def test_the_gateway_s_process_takes_the_keys_of_its_file_and_environment(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_folder(model, train_byte_level(), CHATML, eos_token="<|im_end|>")
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    with free_endpoint() as endpoint:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "gateway", f"--model={model}", "--port=0", f"--endpoint={endpoint}"],
            *["--startup-wait-s=0", f"--api-keys-file={written(tmp_path, FILE)}"],
            env={**os.environ, "STREAMKV_API_KEY": "x" * 16},
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            while b"event=listening" not in (line := await asyncio.wait_for(process.stderr.readline(), 60)):
                assert line, "it ended"
            url = re.findall(r"url=(\S+) num_api_keys=5", line.decode())[0]
            async with aiohttp.ClientSession() as session:
                for headers, status in (
                    ({}, 401),
                    (bearer("x" * 16), 503),
                    (bearer(BOB), 503),
                    (bearer("y" * 16), 401),
                ):
                    async with session.get(url + "/v1/models", headers=headers) as response:
                        assert response.status == status
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 20) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


# The comparison


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    return load_api_keys(written(tmp_path, FILE), {})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": ALICE},
        {"Authorization": f"Basic {ALICE}"},
        {"Authorization": f"Bearer {ALICE[:-1]}"},
        {"Authorization": f"Bearer {ALICE}x"},
        {"Authorization": f"Bearer {ALICE.upper()}"},
        {"Authorization": f"Bearer {ALICE} {BOB}"},
        {"Authorization": "Bearer \udcff\udcfe"},
        {"Sec-WebSocket-Protocol": "streamkv.json, streamkv.key."},
        {"Sec-WebSocket-Protocol": f"streamkv.json, {ALICE}"},
    ],
)
def test_what_is_no_key_of_ours_is_refused(keys: ApiKeys, headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        keys.authenticate(headers)


def test_a_key_comes_as_a_bearer_or_as_a_subprotocol(keys: ApiKeys) -> None:
    for headers in (
        {"Authorization": f"Bearer {BOB}"},
        {"Authorization": f"  bearer   {BOB} "},
        {"Sec-WebSocket-Protocol": f"streamkv.json,streamkv.key.{BOB}"},
        {"Sec-WebSocket-Protocol": f"streamkv.key.{BOB} , streamkv.msgpack"},
    ):
        assert keys.authenticate(headers) == Caller("bob")


def test_every_key_is_compared_whichever_fits(keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return hmac.compare_digest(left, right)

    monkeypatch.setattr(auth, "hmac", type("Counting", (), {"compare_digest": staticmethod(compare)}))
    for key in (ALICE, DAVE):
        compared.clear()
        keys.authenticate(bearer(key))
        assert len(set(compared)) == 4
    compared.clear()
    with pytest.raises(Unauthorized):
        keys.authenticate(bearer("nobody"))
    assert len(set(compared)) == 4


@given(st.text(max_size=80))
def test_no_header_lets_anybody_in_or_raises_anything_else(text: str) -> None:
    keys = ApiKeys({auth.hashlib.sha256(ALICE.encode()).digest(): Caller("alice")})
    for headers in ({"Authorization": text}, {"Authorization": f"Bearer {text}"}, {"Sec-WebSocket-Protocol": text}):
        with pytest.raises(Unauthorized):
            keys.authenticate(headers)


# Over HTTP


@pytest.fixture
async def gateway(keys: ApiKeys) -> AsyncIterator[RunningGateway]:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, api_keys=keys) as running:
            yield running


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **more}


PATHS = [
    ("POST", TEXT),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("GET", "/v1/stream"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/nothing/here"),
    ("DELETE", TEXT),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_nothing_but_health_and_ready_is_open(gateway: RunningGateway, method: str, path: str) -> None:
    for headers, challenge in (
        ({}, 'Bearer realm="streamkv"'),
        (bearer(ALICE + "x"), 'Bearer realm="streamkv", error="invalid_token"'),
    ):
        async with gateway.session.request(method, gateway.url + path, headers=headers) as response:
            answer = await response.json()
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == challenge
            assert answer["error"].keys() == {"message", "type", "param", "code"}
            assert (answer["error"]["type"], answer["error"]["code"]) == ("invalid_request_error", "invalid_api_key")
    for path in ("/health", "/ready"):
        assert (await gateway.get(path))[0] == 200


async def test_the_openai_client_is_let_in_with_its_key_and_told_without(gateway: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key=ALICE, max_retries=0) as client:
        answer = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0)
        assert answer.usage is not None and answer.usage.completion_tokens == 4
        assert [model.id async for model in client.models.list()] == [MODEL]
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="not known here"):
            await client.completions.create(model=MODEL, prompt=PROMPT)


async def test_our_client_brings_its_key_over_http_and_websocket(gateway: RunningGateway) -> None:
    async with Client(gateway.url, BOB) as client, client.socket() as socket:
        request = body()
        streamed = "".join([delta.text async for delta in client.complete(PROMPT, {"max_tokens": 4, "temperature": 0})])
        assert "".join([delta.text async for delta in socket.generate(request)]) == streamed != ""
    async with Client(gateway.url) as client:
        with pytest.raises(ServerError, match="401") as caught:
            async with client.socket():
                pass
        assert caught.value.status == 401


async def cached(gateway: RunningGateway, key: str, **more: Any) -> int:
    status, answer = await gateway.post(TEXT, body(**more), headers=bearer(key))
    assert status == 200
    assert answer["choices"][0]["text"] == small_tokenizer().decode(
        ScriptedExecutor(vocab_size=VOCAB_SIZE).expected_tokens(PROMPT, 4)
    )
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_two_keys_never_share_a_prefix_and_one_key_does_within_a_salt(gateway: RunningGateway) -> None:
    whole = len(PROMPT) - 1
    assert await cached(gateway, ALICE) == 0
    assert await cached(gateway, ALICE) == whole
    assert await cached(gateway, BOB) == 0
    assert await cached(gateway, BOB) == whole
    assert await cached(gateway, ALICE, cache_salt="a") == 0
    assert await cached(gateway, ALICE, cache_salt="a") == whole
    assert await cached(gateway, BOB, cache_salt="a") == 0
    # A name can't be played by a salt, nor a salt by a name
    assert await cached(gateway, ALICE, cache_salt="bob") == 0


async def test_keys_that_share_find_each_other_s_prefixes_and_nobody_else_s(gateway: RunningGateway) -> None:
    whole = len(PROMPT) - 1
    assert await cached(gateway, ALICE) == 0
    assert await cached(gateway, CAROL) == 0
    assert await cached(gateway, DAVE) == whole
    assert await cached(gateway, DAVE, cache_salt="own") == 0
    assert await cached(gateway, CAROL, cache_salt="own") == whole
    assert await cached(gateway, BOB) == 0


# On the WebSocket


async def read(socket: aiohttp.ClientWebSocketResponse, *kinds: str) -> dict[str, Any]:
    """The next event of one of these kinds."""
    while True:
        event: dict[str, Any] = json.loads((await socket.receive(timeout=10)).data)
        if event["type"] in kinds:
            return event


def generate(**more: Any) -> dict[str, Any]:
    return {"type": "generate", "id": "a", **body(), **more}


async def test_a_browser_s_socket_brings_its_key_as_a_subprotocol(gateway: RunningGateway) -> None:
    for protocol in ("streamkv.json", "streamkv.msgpack"):
        protocols = [protocol, f"streamkv.key.{ALICE}"]
        async with gateway.session.ws_connect(gateway.url + "/v1/stream", protocols=protocols) as socket:
            assert socket.protocol == protocol, "the key must not be answered"
    async with gateway.session.ws_connect(
        gateway.url + "/v1/stream", protocols=["streamkv.json", f"streamkv.key.{ALICE}"]
    ) as socket:
        for _ in range(2):
            await socket.send_json(generate())
            done = await read(socket, "done", "error")
        assert done["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1
    assert await cached(gateway, ALICE) == len(PROMPT) - 1
    assert await cached(gateway, BOB) == 0


async def test_a_subprotocol_that_is_not_ours_is_refused_without_its_text(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for offered in (f"streamkv.key.{ALICE}", f"other, streamkv.key.{ALICE}"):
        headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Protocol": offered,
        }
        async with gateway.session.get(gateway.url + "/v1/stream", headers=headers) as response:
            assert response.status == 400
            answer = await response.text()
        assert "beside the key" in answer and ALICE not in answer
    assert ALICE not in caplog.text


async def test_a_stream_is_attached_to_by_its_own_key_alone(keys: ApiKeys) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.005)) as engine:
        async with (
            running_gateway(engine.endpoint, api_keys=keys) as here,
            running_gateway(engine.endpoint, api_keys=keys) as there,
            running_gateway(engine.endpoint) as anonymous,
            here.session.ws_connect(here.url + "/v1/stream", headers=bearer(ALICE)) as owner,
        ):
            await owner.send_json(generate(max_tokens=150, attach_grace_s=20))
            stream_id = (await read(owner, "started"))["stream_id"]
            attach = {"type": "attach", "id": "b", "stream_id": stream_id}
            texts: list[str] = []
            for gateway, headers in ((here, bearer(BOB)), (there, bearer(BOB)), (anonymous, {})):
                async with gateway.session.ws_connect(gateway.url + "/v1/stream", headers=headers) as socket:
                    await socket.send_json(attach)
                    answer = await read(socket, "started", "error")
                    assert answer["error"]["code"] == "unknown_stream"
                    # What is refused can't be told from a stream that is not there
                    await socket.send_json({**attach, "stream_id": "0" * 32})
                    assert (await read(socket, "error"))["error"] == answer["error"]
            async with there.session.ws_connect(there.url + "/v1/stream", headers=bearer(ALICE)) as socket:
                await socket.send_json(attach)
                gone = await read(owner, "finished", "error")
                assert (gone["finish_reason"], gone["cause"]) == ("abort", "attached_elsewhere")
                while (event := await read(socket, "delta", "done", "error"))["type"] == "delta":
                    texts.append(event["text"])
                assert event["usage"]["completion_tokens"] == 150
            # It has ended, and is kept for its grace period
            async with here.session.ws_connect(here.url + "/v1/stream", headers=bearer(BOB)) as socket:
                await socket.send_json(attach)
                assert (await read(socket, "started", "error"))["type"] == "error"
            async with here.session.ws_connect(here.url + "/v1/stream", headers=bearer(ALICE)) as socket:
                await socket.send_json(attach)
                assert (await read(socket, "done", "error"))["usage"]["completion_tokens"] == 150
    expected = ScriptedExecutor(vocab_size=VOCAB_SIZE).expected_tokens(PROMPT, 150)
    assert "".join(texts) == small_tokenizer().decode(expected)


async def test_an_attach_by_another_key_does_not_stand_in_the_owner_s_way(keys: ApiKeys) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.005)) as engine:
        async with (
            running_gateway(engine.endpoint, api_keys=keys) as here,
            running_gateway(engine.endpoint, api_keys=keys) as there,
            here.session.ws_connect(here.url + "/v1/stream", headers=bearer(ALICE)) as owner,
        ):
            await owner.send_json(generate(max_tokens=100, attach_grace_s=20))
            stream_id = bytes.fromhex((await read(owner, "started"))["stream_id"])
            service = there.app[app_keys.GENERATION]
            both = (service.attach(stream_id, FROM_START, NoOutlet(), Caller(name)) for name in ("bob", "alice"))
            bobs, alices = await asyncio.gather(*both)
            await asyncio.wait([bobs.ended, alices.ended])
            assert isinstance(bobs.failure, UnknownStream)
            assert (alices.failure, alices.num_output) == (None, 100)
            assert service.num_live == 0


async def test_a_stream_of_a_key_goes_on_in_a_new_engine_and_after_a_broken_connection(keys: ApiKeys) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.005), gateway_timeout_s=0.4) as engine:
        async with running_gateway(engine.endpoint, api_keys=keys, heartbeat_s=1.2) as gateway:
            # Its heartbeats are too rare: the engine takes it for dead, and it attaches again
            status, answer = await gateway.post(TEXT, body(max_tokens=300, return_token_ids=True), headers=bearer(BOB))
            assert status == 200
            task = asyncio.create_task(gateway.post(TEXT, body(max_tokens=100), headers=bearer(BOB)))
            await asyncio.sleep(0.1)
            engine.stop()
            with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE), endpoint=engine.endpoint):
                assert (await task)[1]["usage"]["completion_tokens"] == 100
                assert await cached(gateway, ALICE) == 0
                assert await cached(gateway, BOB) == len(PROMPT) - 1
    expected = ScriptedExecutor(vocab_size=VOCAB_SIZE).expected_tokens(PROMPT, 300)
    assert answer["choices"][0]["token_ids"] == expected


# Origins


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "is_let_in"),
    [
        (None, "here:8000", "", True),
        ("http://here:8000", "here:8000", "", True),
        ("https://here", "here", "", True),
        ("https://here", "here:443", "", True),
        ("http://HERE:80", "here", "", True),
        ("http://[::1]:8000", "[::1]:8000", "", True),
        ("http://evil.example", "here:8000", "", False),
        ("http://here:8001", "here:8000", "", False),
        ("http://here", "here:8000", "", False),
        ("http://here:8000.evil.example", "here:8000", "", False),
        ("http://here:8000@evil.example", "here:8000", "", False),
        ("null", "here:8000", "", False),
        ("", "here:8000", "", False),
        ("", "", "", False),
        ("http://[", "here:8000", "", False),
        ("https://front.example", "here:8000", "https://front.example", True),
        ("https://FRONT.example", "here:8000", "https://front.example http://other", True),
        ("http://front.example", "here:8000", "https://front.example", False),
        ("https://front.example.evil", "here:8000", "https://front.example", False),
        ("null", "here:8000", "null", True),
        ("http://evil.example", "here:8000", "*", True),
    ],
)
def test_a_page_of_another_site_opens_no_socket_unless_it_is_allowed(
    origin: str | None, host: str, allowed: str, is_let_in: bool
) -> None:
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
    if is_let_in:
        check_origin(headers, frozenset(allowed.split()))
    else:
        with pytest.raises(OriginRefused):
            check_origin(headers, frozenset(allowed.split()))


async def test_a_foreign_page_s_handshake_is_a_403() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, allowed_origins="https://front.example") as gateway:
            url = gateway.url + "/v1/stream"
            for origin in (gateway.url, "https://front.example", None):
                async with gateway.session.ws_connect(url, origin=origin) as socket:
                    await socket.send_json({"type": "ping"})
                    assert (await read(socket, "pong"))["type"] == "pong"
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await gateway.session.ws_connect(url, origin="http://evil.example")
            assert caught.value.status == 403
            async with gateway.session.get(url, headers={"Origin": "http://evil.example"}) as response:
                answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (403, "origin_not_allowed")


# Nothing of a key is logged


async def test_no_key_is_ever_logged(gateway: RunningGateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("aiohttp").setLevel(logging.DEBUG)
    wrong = "sk-wrong-fedcba9876543210"
    await gateway.post(TEXT, body(), headers=bearer(ALICE))
    await gateway.post(TEXT, body(nonsense=1), headers=bearer(ALICE))
    await gateway.post(TEXT, body(), headers=bearer(wrong))
    async with gateway.session.ws_connect(
        gateway.url + "/v1/stream", protocols=["streamkv.json", f"streamkv.key.{ALICE}"]
    ) as socket:
        await socket.send_json(generate())
        await read(socket, "done")
    host, port = gateway.url.removeprefix("http://").split(":")
    for line in (b"Authorization Bearer %b", b"Authorization: Bearer %b\x00", b"%b /v1/models HTTP/1.1"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + line % ALICE.encode() + b"\r\n\r\n")
        raw = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert b" 400 " in raw.splitlines()[0] and ALICE.encode() not in raw
    texts = [record.getMessage() + repr(record.__dict__) for record in caplog.records]
    assert any("request ended" in text and "'key': 'alice'" in text for text in texts)
    assert not any(secret in text for secret, text in itertools.product((ALICE, wrong), texts))
