"""Text that is easily spoilt on its way: the same streamed and not, over SSE and WebSocket, wherever it is cut.

Every choice of a request says a text of its own. What is right is the tokenizer's decode of all ids at once, prompt
included.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
import tokenizers

from gateway.tokenizer import Tokenizer
from streamkv.model_files import resolve
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_engine import serving
from tests.support.small_tokenizers import train_byte_fallback, train_byte_level, write_folder
from tests.support.speaking_executor import SpeakingExecutor

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_TOKENS: Final = 40
MIXED: Final = "  no\u0308 \U0001f469\u200d\U0001f467 \u2603\u05e9\u05dc 'so"
"""What the others have, in few tokens."""
TEXTS: Final = (
    MIXED,
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 "
    "\U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5 \U0001f44d\U0001f3fd",
    "e\u0301 n\u0303o\u0308 \u0e01\u0e47 \u0ba8\u0bbf \u0915\u094d\u0937, the\u0332 dog",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd, \u0645\u0631\u062d\u0628\u0627 \u200f(one) \u202bthe\u202c",
    "   one\n\t two  three \n\n    four   ",
    "\u2603\u2603 caf\u00e9 \u65e5\u672c\u8a9e\u306e and \u2014 \ufffd \ud55c\uad6d\uc5b4 \u2026",
)
SAYING: Final = "Say it:"


def _small(train: Callable[[], tokenizers.Tokenizer], **config: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.load(write_folder(Path(folder) / "model", train(), **config))


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    if kind == "bytes":
        return _small(train_byte_level, eos_token="<|im_end|>")
    if kind == "byte_fallback":
        return _small(train_byte_fallback, bos_token="<s>", eos_token="</s>")
    return Tokenizer.load(resolve("default", lambda stage, percent: None))


KINDS: Final = ["bytes", "byte_fallback", pytest.param("built-in", marks=pytest.mark.long)]


def broken_text(tokenizer: Tokenizer) -> list[int]:
    """Characters that are cut short, by a letter, by another character, and by the end."""
    by_piece = {piece: token_id for token_id, piece in reversed(list(enumerate(tokenizer.vocabulary.pieces)))}
    data = b"a\xf0\x9f\x98b\xe2\x98\xc3\xa9c\xff\x80\xf0\x9f\x98\x80" * 2 + b"\xf0\x9f"
    letters = {token: tokenizer.encode(token, add_special_tokens=False)[-1] for token in "abc"}
    return [letters.get(chr(byte)) or by_piece[bytes([byte])] for byte in data]


def expected(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of ids behind a prompt."""
    prompt = tokenizer.encode(SAYING)
    text = tokenizer.decode([*prompt, *ids], skip_special_tokens)
    return text[len(tokenizer.decode(prompt, skip_special_tokens)) :]


@asynccontextmanager
async def saying(kind: str, *texts: Sequence[int]) -> AsyncIterator[tuple[Tokenizer, RunningGateway]]:
    tokenizer = tokenizer_of(kind)
    executor = SpeakingExecutor(tokenizer, num_blocks=2048)
    executor.say_tokens(*texts)
    with serving(executor, max_num_seqs=256) as engine:
        async with running_gateway(engine.endpoint, lambda: tokenizer) as gateway:
            yield tokenizer, gateway


def asked(n: int, is_chat: bool, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": SAYING}]} if is_chat else {"prompt": SAYING}
    return {"n": n, "temperature": 0, **prompt, **fields}


async def whole(gateway: RunningGateway, path: str, n: int, **fields: Any) -> list[str]:
    status, answer = await gateway.post(path, asked(n, path == CHAT, **fields))
    assert status == 200, answer
    return [choice["message"]["content"] if path == CHAT else choice["text"] for choice in answer["choices"]]


async def streamed(gateway: RunningGateway, path: str, n: int, **fields: Any) -> list[str]:
    events = await gateway.events(path, asked(n, path == CHAT, **fields))
    assert events.status == 200 and events.data[-1] == "[DONE]"
    return [events.text(index) for index in range(n)]


async def on_a_socket(
    gateway: RunningGateway, n: int, is_chat: bool, requests: Sequence[dict[str, Any]]
) -> list[list[str]]:
    """All at once."""
    texts = [[""] * n for _ in requests]
    num_open = len(requests)
    async with gateway.session.ws_connect(gateway.url + "/v1/stream", max_msg_size=0) as socket:
        for index, fields in enumerate(requests):
            await socket.send_json({"type": "generate", "id": str(index), **asked(n, is_chat, **fields)})
        while num_open:
            event = json.loads((await socket.receive(timeout=60)).data)
            assert event["type"] != "error", event
            num_open -= event["type"] == "done"
            if event["type"] == "delta":
                texts[int(event["id"])][event["index"]] += event["text"]
    return texts


@pytest.mark.parametrize("kind", KINDS)
async def test_texts_are_the_same_in_every_answer_wherever_they_are_cut(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    said = [tokenizer.encode(text, add_special_tokens=False)[-MAX_TOKENS - 8 :] for text in TEXTS]
    if kind != "built-in":
        said.append(broken_text(tokenizer))
    n = len(said)
    async with saying(kind, *said) as (_, gateway):
        lengths = range(1, MAX_TOKENS + 1)
        right = [[expected(tokenizer, ids[:length]) for ids in said] for length in lengths]
        plain = [{"max_tokens": length} for length in lengths]
        halves = [
            {"max_tokens": length, "stop": [text[-2:] + "\x7fnever" for text in texts]}
            for length, texts in zip(lengths, right, strict=True)
        ]
        for path, answer, requests, num in (
            (CHAT, whole, plain, n),
            (CHAT, streamed, plain, n),
            (TEXT, streamed, halves, n),
            (TEXT, streamed, plain, 1),
        ):
            told = await asyncio.gather(*(answer(gateway, path, num, **fields) for fields in requests))
            assert told == [texts[:num] for texts in right], (path, answer.__name__, num)
        assert await on_a_socket(gateway, n, True, halves) == right
        assert await on_a_socket(gateway, 1, False, plain) == [texts[:1] for texts in right]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stop_string_of_one_character_of_many_bytes_cuts_before_it(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    said = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS[1:]]
    texts = [expected(tokenizer, ids) for ids in said]
    stops = ["\u200d", "\U0001f308", "\u0301", "\u0332", "\u05dd", "\u202c", "\ud55c", "\u00e9 \u65e5", "\u20f0", "  "]
    async with saying(kind, *said) as (_, gateway):
        for some in (stops[:2], stops[2:4], stops[4:7], stops[7:]):
            found = [min((text.index(stop) for stop in some if stop in text), default=len(text)) for text in texts]
            right = [text[:end] for text, end in zip(texts, found, strict=True)]
            assert await whole(gateway, CHAT, len(said), stop=some) == right, some
            assert await streamed(gateway, TEXT, len(said), stop=some) == right, some
            assert await on_a_socket(gateway, len(said), False, [{"stop": some}]) == [right], some


@pytest.mark.parametrize("kind", KINDS)
async def test_special_tokens_are_shown_or_skipped_as_asked(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    names = {"byte_fallback": ["<s>", "</s>"]}.get(kind, ["<|im_start|>", "<|im_end|>"])
    first, last = ([tokenizer.encode(name, add_special_tokens=False)[-1]] for name in names)
    words = [tokenizer.encode(text, add_special_tokens=False) for text in ("the \U0001f600", "\u00e9 dog")]
    half = words[0][:-1]
    said = [[*first, *words[0], *last, *words[1], *first], [*half, *first, *words[1], *last], [*last, *first] * 3]
    async with saying(kind, *said) as (_, gateway):
        for is_skipped in (True, False):
            right = [[expected(tokenizer, ids[:length], is_skipped) for ids in said] for length in range(1, 6)]
            fields = {"skip_special_tokens": is_skipped, "ignore_eos": True}
            requests = [{"max_tokens": length, **fields} for length in range(1, 6)]
            for request, texts in zip(requests, right, strict=True):
                assert await whole(gateway, TEXT, 3, **request) == texts
                assert await streamed(gateway, CHAT, 3, **request) == texts
                assert await streamed(gateway, TEXT, 1, **request) == texts[:1]
            assert await on_a_socket(gateway, 3, True, requests) == right
            assert any(names[0] in text for texts in right for text in texts) != is_skipped


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_every_token_is_an_event_also_where_it_has_no_text(path: str) -> None:
    tokenizer = tokenizer_of("bytes")
    special = tokenizer.encode("<|im_start|>", add_special_tokens=False)[-1]
    smile = tokenizer.encode("\U0001f600", add_special_tokens=False)
    assert len(smile) > 1
    ids = [special, special, *smile, special, *smile[:-1]]
    async with saying("bytes", ids) as (_, gateway):
        fields = {"max_tokens": len(ids), "ignore_eos": True, "stream_options": {"include_usage": True}}
        events = await gateway.events(path, asked(1, path == CHAT, **fields))
    choices = [json.loads(data)["choices"] for data in events.data if data != "[DONE]"]
    told = [choice[0] for choice in choices if choice and choice[0]["finish_reason"] is None]
    texts = [choice["text"] if path == TEXT else choice["delta"]["content"] for choice in told]
    # A chat's first event has the role, and no token.
    assert len(texts) == len(ids) + (path == CHAT)
    assert texts.count("") == len(texts) - 2
    assert "".join(texts) == "\U0001f600\ufffd"
    assert events.usage is not None and events.usage["completion_tokens"] == len(ids)
