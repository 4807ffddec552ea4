"""Where API keys come from beside plain lines: limits in their tables, the environment, and a file that changes."""

import asyncio
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway import app as app_module
from gateway import keys as app_keys
from gateway.auth import ApiKeys, Caller, Unauthorized, load_api_keys
from gateway.limits import Allowance
from streamkv.config import GatewayConfig, load
from streamkv.errors import ConfigError
from tests.support.api_keys import ALICE, BOB, bearer
from tests.support.running_gateway import VOCAB_SIZE, Events, eventually, running_gateway
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

SECRET = "do-not-show-this-anywhere"


def written(path: Path, text: str, mode: int = 0o600) -> str:
    """As an editor or a mounted secret does it: a new file in the old one's place."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.chmod(mode)
    new.replace(path)
    return str(path)


def is_known(keys: ApiKeys, key: str) -> bool:
    try:
        keys.authenticate(bearer(key))
    except Unauthorized:
        return False
    return True


# Tables


def test_a_table_has_limits_and_the_settings_are_the_rest(tmp_path: Path) -> None:
    text = f"""
    plain = "{ALICE}"
    [all]
    key = "{"a" * 16}"
    requests_per_minute = 60
    tokens_per_minute = 100_000
    max_concurrent = 4
    [keys.some]
    key = "{"b" * 16}"
    shares_prefix = true
    tokens_per_minute = 0
    """
    keys = load_api_keys(written(tmp_path / "k", text), {}, allowance=Allowance(7, 8, 9))
    assert keys.names == {"plain", "all", "some"}
    assert keys.authenticate(bearer(ALICE)) == Caller("plain", False, Allowance(7, 8, 9))
    assert keys.authenticate(bearer("a" * 16)) == Caller("all", False, Allowance(60, 100_000, 4))
    assert keys.authenticate(bearer("b" * 16)) == Caller("some", True, Allowance(7, 0, 9)), "0 is: no limit"
    assert load_api_keys("", {}, allowance=Allowance(1)).authenticate({}) == Caller(allowance=Allowance(1))


def test_a_key_may_be_called_keys_and_the_group_may_have_lines(tmp_path: Path) -> None:
    for text, names in (
        (f'keys = "{ALICE}"', {"keys"}),
        (f'[keys]\nkey = "{ALICE}"', {"keys"}),
        (f'[keys]\nalice = "{ALICE}"\n[keys.bob]\nkey = "{BOB}"', {"alice", "bob"}),
        (f'[keys.key]\nkey = "{ALICE}"', {"key"}),
    ):
        assert load_api_keys(written(tmp_path / "k", text), {}).names == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'[a]\nkey = "{SECRET}"\nrequests_per_minute = -1', "a: .*>= 0.*requests_per_minute"),
        (f'[a]\nkey = "{SECRET}"\ntokens_per_minute = "{SECRET}"', "a: .*int.*tokens_per_minute"),
        (f'[a]\nkey = "{SECRET}"\nmax_concurrent = 1.5', "a: .*int.*max_concurrent"),
        (f'[a]\nkey = "{SECRET}"\nmax_concurrent = true', "a: .*int.*max_concurrent"),
        (f'[a]\nkey = "{SECRET}"\nmax_concurrent = {2**40}', "a: .*<=.*max_concurrent"),
        (f'[a]\nkey = "{SECRET}"\nrequests_per_second = 1', "unknown field `requests_per_second`"),
        (f'a = "{SECRET}"\n[keys.a]\nkey = "{SECRET}"', "a stands there twice"),
        ("[keys]", "has no key"),
        ("[keys.a]\nmax_concurrent = 1", "missing required field `key`"),
    ],
)
def test_a_wrong_table_is_refused_by_its_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_api_keys(written(tmp_path / "k", text), {})
    assert SECRET not in str(caught.value)


# The environment


def test_the_environment_has_a_list_of_names_and_keys() -> None:
    environ = {"STREAMKV_API_KEYS": f"  alice={ALICE}\n\tbob={BOB}=x ", "STREAMKV_API_KEY": "c" * 16}
    keys = load_api_keys("", environ, allowance=Allowance(5))
    assert keys.names == {"alice", "bob", "default"}
    assert keys.authenticate(bearer(BOB + "=x")) == Caller("bob", allowance=Allowance(5))
    load(GatewayConfig, [], environ)  # neither variable looks like a mistyped setting


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (f"{SECRET}", "entry 1 is none"),
        (f"a={SECRET} {SECRET}", "entry 2 is none"),
        (f"a={SECRET} ={SECRET}", "entry 2 is none"),
        ("a=short", "the key of entry 1 must have 16"),
        (f"a={SECRET} a={SECRET}2", "has the name a twice"),
        (f"a={SECRET} b={SECRET}", "a and b have the same key"),
        (f"default={SECRET}", "has the name default, which is that of STREAMKV_API_KEY"),
        (f"filed={SECRET}", "has the key named filed, which api_keys_file has as well"),
    ],
)
def test_a_wrong_list_is_refused_and_not_shown(tmp_path: Path, value: str, said: str) -> None:
    path = written(tmp_path / "k", f'filed = "{"f" * 16}"')
    with pytest.raises(ConfigError, match=said) as caught:
        load_api_keys(path, {"STREAMKV_API_KEYS": value, "STREAMKV_API_KEY": "d" * 16})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
def test_a_key_comes_in_either_header(header: str) -> None:
    keys = load_api_keys("", {"STREAMKV_API_KEYS": f"alice={ALICE}"})
    value = f"Bearer {ALICE}" if header == "Authorization" else ALICE
    assert keys.authenticate({header: value}).name == "alice"
    with pytest.raises(Unauthorized):
        keys.authenticate({header: value + "x"})


# A file that changes


def test_a_changed_file_is_taken_in_and_the_environment_s_keys_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "k"
    keys = load_api_keys(written(path, f'alice = "{ALICE}"'), {"STREAMKV_API_KEY": "e" * 16})
    assert not keys.reload_if_changed(), "nothing has changed"
    written(path, f'[bob]\nkey = "{BOB}"\nrequests_per_minute = 3')
    assert keys.reload_if_changed() and not keys.reload_if_changed()
    assert keys.names == {"bob", "default"}
    assert not is_known(keys, ALICE) and is_known(keys, "e" * 16)
    assert keys.authenticate(bearer(BOB)).allowance == Allowance(3)
    (record,) = [record for record in caplog.records if record.message == "read the API keys again"]
    assert record.__dict__["fields"] == {"num_api_keys": 2, "num_new": 1, "num_gone": 1}


@pytest.mark.parametrize(
    "breaks",
    [
        lambda path: path.unlink(),
        lambda path: written(path, ""),
        lambda path: written(path, f'alice = "{SECRET}'),
        lambda path: written(path, f'bob = "{SECRET}"\ncarol = "{SECRET}"'),
        lambda path: written(path, f'bob = "{SECRET}"', mode=0o666),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: written(path, f'default = "{SECRET}"'),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_broken_file_changes_nothing_and_is_said_once(
    tmp_path: Path, breaks: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "k"
    keys = load_api_keys(written(path, f'alice = "{ALICE}"'), {"STREAMKV_API_KEY": "e" * 16})
    breaks(path)
    for _ in range(3):
        assert not keys.reload_if_changed()
    assert is_known(keys, ALICE) and keys.names == {"alice", "default"}
    (record,) = [record for record in caplog.records if record.message == "the API keys stay as they were"]
    assert SECRET not in str(record.__dict__)
    if path.is_dir():
        path.rmdir()
    written(path, f'bob = "{BOB}"')
    assert keys.reload_if_changed() and is_known(keys, BOB) and not is_known(keys, ALICE)


def test_a_change_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "k"
    keys = load_api_keys(written(path, f'alice = "{ALICE}"'), {})
    status = path.stat()
    path.write_text(f'alice = "{ALICE[::-1]}"')
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert keys.reload_if_changed() and is_known(keys, ALICE[::-1])


async def test_live_streams_of_a_key_that_is_gone_go_on_and_new_requests_are_401(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "k"
    keys = load_api_keys(written(path, f'alice = "{ALICE}"\nbob = "{BOB}"'), {}, allowance=Allowance(50, 9000, 5))
    follow = keys.follow
    monkeypatch.setattr(keys, "follow", lambda on_change: follow(on_change, 0.02))
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint, api_keys=keys) as gateway:

            async def stream() -> Events:
                request: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 300, "temperature": 0, "stream": True}
                url = gateway.url + "/v1/completions"
                async with gateway.session.post(url, json=request, headers=bearer(ALICE)) as response:
                    return Events(response.status, {}, await response.read())

            socket = await gateway.session.ws_connect(gateway.url + "/v1/stream", headers=bearer(ALICE))
            await socket.send_json({"type": "generate", "id": "old", "prompt": [7], "max_tokens": 300})
            live = asyncio.create_task(stream())
            await eventually(lambda: gateway.app[app_keys.ENGINE].num_tokens > 5, 30)
            written(path, f'bob = "{BOB}"\ncarol = "{SECRET}"')
            await eventually(lambda: keys.names == {"bob", "carol"}, 30)
            status, answer = await gateway.post("/tokenize", {"prompt": "one"}, headers=bearer(ALICE))
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert (await gateway.post("/tokenize", {"prompt": "one"}, headers=bearer(SECRET)))[0] == 200
            for kind in ({"type": "generate", "prompt": [5]}, {"type": "attach", "stream_id": "0" * 32}):
                await socket.send_json({"id": kind["type"], **kind})
            ends = []
            while len(ends) < 3:
                if (event := await socket.receive_json(timeout=30))["type"] in ("done", "error"):
                    ends.append((event["id"], event["type"], event.get("error", {}).get("code")))
            await socket.close()
            refused = [(kind, "error", "invalid_api_key") for kind in ("attach", "generate")]
            assert sorted(ends) == [*refused, ("old", "done", None)]
            events = await live
            assert (events.status, events.data[-1], events.reasons()) == (200, "[DONE]", {0: ["length"]})
            figures = await gateway.metrics(BOB)
            assert set(re.findall(r'key="(\w+)"', " ".join(figures))) == {"bob", "carol"}


async def test_the_watch_ends_with_the_app_and_survives_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = load_api_keys(written(tmp_path / "k", f'alice = "{ALICE}"'), {})
    calls = 0

    def fail() -> bool:
        nonlocal calls
        calls += 1
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(keys, "reload_if_changed", fail)
    task = asyncio.create_task(keys.follow(lambda: None, 0.001))
    await eventually(lambda: calls >= 3, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "the API keys could not be looked at" in {record.message for record in caplog.records}
    await asyncio.wait_for(load_api_keys("", {}).follow(lambda: None), 30)


def test_the_settings_are_the_limits_of_keys_without_their_own() -> None:
    config = load(GatewayConfig, ["--requests-per-minute=3", "--tokens-per-minute=4", "--max-concurrent=5"], {})
    assert app_module.allowance_of(config) == Allowance(3, 4, 5)
    with pytest.raises(ConfigError, match="tokens-per-minute"):
        load(GatewayConfig, ["--tokens-per-minute=-1"], {})
