"""The chat page in a real browser, on the real gateway over a scripted engine."""

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway import keys
from gateway.auth import ApiKeys, Caller
from gateway.limits import Allowance
from tests.support.browser import Tab, needs_browser, open_tab
from tests.support.relay import Relay, relaying
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

pytestmark = [needs_browser, pytest.mark.long]

TRANSPORTS = ["sse", "websocket"]
GREEDY = {"temperature": 0, "top_p": 1, "max_tokens": 60}
KEY = "a-key-of-the-tests-0123456789"


@contextlib.asynccontextmanager
async def page_of(
    folder: Path,
    transport: str = "sse",
    *,
    step_s: float = 0.0,
    settings: dict[str, object] | None = None,
    api_keys: ApiKeys | None = None,
    through_relay: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[Tab, RunningGateway, Relay]]:
    """The page, open, with greedy answers over `transport`."""
    chosen = {"transport": transport, **GREEDY, **(settings or {})}
    async with contextlib.AsyncExitStack() as stack:
        engine = stack.enter_context(serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=step_s)))
        gateway = await stack.enter_async_context(running_gateway(engine.endpoint, api_keys=api_keys))
        relay = await stack.enter_async_context(relaying(gateway.url))
        tab = await stack.enter_async_context(open_tab(folder, "", **options))
        await tab.page.add_init_script(f"localStorage['streamkv.settings'] ??= JSON.stringify({json.dumps(chosen)})")
        await tab.page.goto(relay.url if through_relay else gateway.url)
        yield tab, gateway, relay


async def put_chat(tab: Tab, text: str, answer: str, draft: str = "", **more: object) -> None:
    """Have the page find a chat of these two messages. more: of the answer."""
    messages = [{"id": "m", "role": "user", "text": text}, {"id": "n", "role": "assistant", "text": answer, **more}]
    chat = {"id": "x", "title": text, "created": 1, "updated": 2, "system": "", "draft": draft, "messages": messages}
    await tab.page.evaluate("chat => localStorage['streamkv.chat.x'] = JSON.stringify(chat)", chat)
    await tab.page.reload()
    await tab.page.wait_for_selector(".message.assistant .markdown > *")


async def say(tab: Tab, text: str) -> None:
    await tab.page.fill("#prompt", text)
    await tab.page.press("#prompt", "Enter")


async def finished(tab: Tab) -> None:
    """No answer is being written in the chat that is shown."""
    await tab.until(
        "document.querySelector('#stop').hidden && !document.querySelector('.is-writing')"
        " && document.querySelector('.message.assistant')"
    )


async def chats(tab: Tab) -> list[dict[str, Any]]:
    """What the browser keeps, newest first."""
    found: list[dict[str, Any]] = await tab.page.evaluate(
        "Object.entries(localStorage).filter(([name]) => name.startsWith('streamkv.chat.'))"
        ".map(([, text]) => JSON.parse(text)).sort((a, b) => b.updated - a.updated)"
    )
    return found


async def whole(gateway: RunningGateway, *turns: str, **more: object) -> str:
    """The answer as the server gives it in one piece. turns: of user and assistant, in turn."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
    body = {"messages": messages, "temperature": 0, "max_tokens": 60, **more}
    status, answer = await gateway.post("/v1/chat/completions", body)
    assert status == 200, answer
    text: str = answer["choices"][0]["message"]["content"]
    return text


# Answers


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_answer_arrives_whole_with_its_figures(tmp_path: Path, transport: str) -> None:
    async with page_of(tmp_path, transport) as (tab, gateway, _):
        await say(tab, "one two three")
        await finished(tab)
        (chat,) = await chats(tab)
        asked, answer = chat["messages"]
        assert (asked["text"], chat["title"]) == ("one two three", "one two three")
        assert answer["text"] == await whole(gateway, "one two three") and answer["state"] == "done"
        assert answer["usage"]["completion_tokens"] == answer["numTokens"] == 60
        figures = await tab.page.inner_text(".figures")
        assert re.search(r"First token\s+[\d.,]+ m?s", figures), figures
        assert re.search(r"Tokens\s+60", figures) and re.search(r"Prompt\s+\d+", figures)
        assert re.search(r"End\s+cut at max_tokens", figures)
        await say(tab, "and four")
        await finished(tab)
        (chat,) = await chats(tab)
        assert chat["messages"][3]["text"] == await whole(gateway, "one two three", answer["text"], "and four")
        assert "Cached" in await tab.page.inner_text(".message:last-child .figures")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_stop_ends_the_answer_at_the_server_too(tmp_path: Path, transport: str) -> None:
    async with page_of(tmp_path, transport, step_s=0.02, settings={"max_tokens": 1500}) as (tab, gateway, _):
        await say(tab, "one two three")
        await tab.page.wait_for_selector(".is-writing .markdown > *")
        await tab.page.click("#stop")
        await finished(tab)
        await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0)
        (chat,) = await chats(tab)
        answer = chat["messages"][1]
        assert answer["state"] == "stopped" and answer["text"] and answer["usage"]["completion_tokens"] < 1500
        assert "stopped" in await tab.page.inner_text(".figures")


async def test_answer_again_and_edit_change_what_follows(tmp_path: Path) -> None:
    async with page_of(tmp_path) as (tab, gateway, _):
        await say(tab, "one two")
        await finished(tab)
        await tab.page.evaluate("window.old = document.querySelector('.message.assistant')")
        await tab.page.click("[aria-label='Answer again']")
        await tab.until("!window.old.isConnected")
        await finished(tab)
        (chat,) = await chats(tab)
        assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]
        assert chat["messages"][1]["text"] == await whole(gateway, "one two")
        await tab.page.click("[aria-label='Edit the message']")
        await tab.page.fill(".edit textarea", "seven eight")
        await tab.page.press(".edit textarea", "Enter")
        await tab.until("!document.querySelector('.edit')")
        await finished(tab)
        (chat,) = await chats(tab)
        assert [message["text"] for message in chat["messages"]] == ["seven eight", await whole(gateway, "seven eight")]


async def test_the_system_prompt_and_the_settings_are_sent(tmp_path: Path) -> None:
    async with page_of(tmp_path) as (tab, gateway, _):
        await tab.page.click("#open-settings")
        await tab.page.fill("#system", "be brief")
        await tab.page.fill("#max_tokens", "7")
        await tab.page.fill("#stop_strings", "no such text")
        await tab.page.click("text=Done")
        await say(tab, "one")
        await finished(tab)
        (chat,) = await chats(tab)
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 7}
        _, answer = await gateway.post("/v1/chat/completions", body)
        assert chat["messages"][1]["text"] == answer["choices"][0]["message"]["content"]
        assert chat["messages"][1]["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_two_chats_are_answered_side_by_side(tmp_path: Path, transport: str) -> None:
    async with page_of(tmp_path, transport, step_s=0.02) as (tab, gateway, _):
        await say(tab, "first question")
        await tab.page.wait_for_selector(".is-writing")
        await tab.page.fill("#prompt", "typed meanwhile")
        await tab.page.click("#new-chat")
        assert await tab.page.input_value("#prompt") == ""
        await say(tab, "second question")
        await tab.until("document.querySelectorAll('#chats .writing').length === 2")
        await tab.until("!document.querySelector('#chats .writing')")
        by_title = {chat["title"]: chat for chat in await chats(tab)}
        for title in ("first question", "second question"):
            assert by_title[title]["messages"][1]["text"] == await whole(gateway, title)
        await tab.page.click("#chats .open:has-text('first question')")
        assert await tab.page.input_value("#prompt") == "typed meanwhile"
        assert await tab.page.inner_text(".message.user .body") == "first question"


# What breaks


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_reload_amid_an_answer_loses_and_doubles_nothing(tmp_path: Path, transport: str) -> None:
    settings = {"max_tokens": 160}
    async with page_of(tmp_path, transport, step_s=0.02, settings=settings) as (tab, gateway, _):
        await say(tab, "tell me something long")
        for num_chars in (20, 120):
            await tab.until(f"(document.querySelector('.is-writing .markdown')?.textContent.length ?? 0) > {num_chars}")
            await tab.page.reload()
        await tab.page.wait_for_selector(".message.assistant")
        await finished(tab)
        (chat,) = await chats(tab)
        answer = chat["messages"][1]
        assert answer["text"] == await whole(gateway, "tell me something long", max_tokens=160)
        assert answer["state"] == "done" and answer["usage"]["completion_tokens"] == 160
        metrics = await gateway.metrics()
        assert metrics["requests_received_total"] == 2, "it was asked for again, and not taken up"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_broken_connection_loses_and_doubles_nothing(tmp_path: Path, transport: str) -> None:
    settings = {"max_tokens": 200}
    async with page_of(tmp_path, transport, step_s=0.02, settings=settings, through_relay=True) as (
        tab,
        gateway,
        relay,
    ):
        await say(tab, "tell me something long")
        for num_chars in (20, 150):
            await tab.until(f"(document.querySelector('.is-writing .markdown')?.textContent.length ?? 0) > {num_chars}")
            relay.cut()
        await finished(tab)
        (chat,) = await chats(tab)
        assert chat["messages"][1]["text"] == await whole(gateway, "tell me something long", max_tokens=200)
        assert chat["messages"][1]["state"] == "done"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_missing_key_is_asked_for_and_then_used(tmp_path: Path, transport: str) -> None:
    api_keys = ApiKeys({hashlib.sha256(KEY.encode()).digest(): Caller("tests")})
    async with page_of(tmp_path, transport, api_keys=api_keys) as (tab, _, __):
        await tab.page.wait_for_selector("#key-needed:not([hidden])")
        await say(tab, "one two three")
        await tab.page.wait_for_selector(".error:has-text('API key')")
        await tab.page.click(".error >> text=Enter the API key")
        await tab.page.keyboard.type(KEY)
        await tab.page.keyboard.press("Enter")
        await tab.page.wait_for_selector("#key-needed", state="hidden")
        await tab.page.click("text=Try again")
        await finished(tab)
        (chat,) = await chats(tab)
        assert chat["messages"][1]["state"] == "done" and chat["messages"][1]["usage"]["completion_tokens"] == 60
        assert KEY not in json.dumps(chat)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_rate_limit_says_when_to_try_again(tmp_path: Path, transport: str) -> None:
    api_keys = ApiKeys(anonymous=Caller(allowance=Allowance(requests_per_minute=1)))
    async with page_of(tmp_path, transport, api_keys=api_keys) as (tab, _, __):
        await say(tab, "one")
        await finished(tab)
        await say(tab, "two")
        await tab.page.wait_for_selector(".error")
        assert re.search(r"Too many requests", await tab.page.inner_text(".error"))
        again = tab.page.locator(".error button")
        assert re.fullmatch(r"Try again in \d+ s", await again.inner_text()) and await again.is_disabled()


async def test_a_model_that_loads_is_shown_with_its_percent(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        engine = stack.enter_context(serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, load_s=6.0)))
        gateway = await stack.enter_async_context(running_gateway(engine.endpoint, is_ready=False))
        tab = await stack.enter_async_context(open_tab(tmp_path, gateway.url))
        await tab.page.wait_for_selector("#loading-text:has-text('%')")
        assert await tab.page.get_attribute("#state", "data-state") == "loading"
        await tab.page.wait_for_selector("#loading", state="hidden")
        assert await tab.page.inner_text("#state-text") == "scripted"


# What is kept


async def test_chats_are_renamed_exported_and_deleted(tmp_path: Path) -> None:
    async with page_of(tmp_path) as (tab, _, __):
        page = tab.page
        await say(tab, "one two")
        await finished(tab)
        await page.click("[data-role=rename]")
        await page.fill("#chats input", "My *name*")
        await page.press("#chats input", "Enter")
        await page.wait_for_selector("#chats .open:has-text('My *name*')")
        assert await page.inner_text("#title") == "My *name*"
        async with page.expect_download() as downloading:
            await page.click("[data-role=export]")
        download = await downloading.value
        await download.save_as(tmp_path / "chat.json")
        exported = json.loads((tmp_path / "chat.json").read_text())
        assert download.suggested_filename == "streamkv-my-name-.json" and exported["title"] == "My *name*"
        assert [message["role"] for message in exported["messages"]] == ["user", "assistant"]
        page.once("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
        await page.click("[data-role=delete]")
        await page.wait_for_selector("#empty:not([hidden])")
        assert await chats(tab) == []
        await page.reload()
        assert await page.locator("#chats li").count() == 0


EVIL = """<script>window.hit=1</script> <img src=x onerror='window.hit=1'> [a](javascript:window.hit=1)
[b](JaVaScRiPt:window.hit=1) [c](data:text/html,<script>window.hit=1</script>) ![d](https://example.org/x.png)
<a href='javascript:window.hit=1'>e</a> <svg onload=window.hit=1> `<b>` <javascript:window.hit=1>

```html
<script>window.hit=1</script>
```"""


async def test_text_with_html_stays_text(tmp_path: Path) -> None:
    async with page_of(tmp_path) as (tab, gateway, _):
        page = tab.page
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        await put_chat(tab, EVIL, EVIL, state="done")
        await say(tab, EVIL)
        await finished(tab)
        assert await page.inner_text(".message.user .body >> nth=0") == EVIL
        body = page.locator(".message.assistant .body").nth(0)
        text = await body.inner_text()
        assert "<script>window.hit=1</script>" in text and "onerror" in text
        tags = await body.evaluate("root => [...root.querySelectorAll('*')].map(node => node.tagName)")
        assert not {"SCRIPT", "IMG", "SVG", "IFRAME"} & set(tags)
        links = await body.locator("a").evaluate_all("nodes => nodes.map(({href, rel}) => [href, rel])")
        assert [href for href, _ in links] == ["https://example.org/x.png"]
        assert "noopener" in links[0][1]
        assert await page.evaluate("window.hit === undefined")
        assert all(url.startswith(gateway.url) for url in requests)


# How it is used


async def test_everything_can_be_done_by_keyboard(tmp_path: Path) -> None:
    async with page_of(tmp_path, step_s=0.02, settings={"max_tokens": 1500}) as (tab, _, __):
        page = tab.page
        assert await page.evaluate("document.activeElement.id") == "prompt"
        await page.keyboard.type("one")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("two")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".is-writing .markdown > *")
        await page.keyboard.type("typed while it writes")
        await page.keyboard.press("Enter")
        assert await page.input_value("#prompt") == "typed while it writes"
        await page.keyboard.press("Escape")
        await finished(tab)
        (chat,) = await chats(tab)
        assert chat["messages"][0]["text"] == "one\ntwo" and chat["messages"][1]["state"] == "stopped"
        reached = []
        await page.focus(".skip")
        for _ in range(30):
            await page.keyboard.press("Tab")
            name = "(({ariaLabel, textContent}) => ariaLabel || textContent.trim())(document.activeElement)"
            reached.append(await page.evaluate(name))
        for name in ("New chat", "Live dashboard", "Settings", "Answer again", "Send"):
            assert any(name in label for label in reached), (name, reached)
        assert reached.index("New chat") < reached.index("Settings") < reached.index("Send")
        await page.focus("#open-settings")
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.querySelector('#settings').open")
        await page.keyboard.press("Escape")
        assert not await page.evaluate("document.querySelector('#settings').open")
        assert await page.evaluate("document.activeElement.id") == "open-settings"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_system_theme_is_taken_and_can_be_changed(tmp_path: Path, scheme: str) -> None:
    async with page_of(tmp_path, color_scheme=scheme) as (tab, _, __):
        theme = "document.documentElement.dataset.theme"
        assert await tab.page.evaluate(theme) == scheme
        for wanted in ("light", "dark"):
            await tab.page.click("#theme")
            assert await tab.page.evaluate(theme) == wanted
        await tab.page.reload()
        assert await tab.page.evaluate(theme) == "dark"
        await tab.page.click("#theme")
        assert await tab.page.evaluate(theme) == scheme


WIDE = f"""| a | b | c | d |
|---|---|---|---|
| {" | ".join(["wide cell"] * 4)} |

```
{"x" * 300}
```

{"y" * 400}"""


async def test_a_phone_needs_no_sideways_scrolling(tmp_path: Path) -> None:
    viewport = {"width": 360, "height": 740}
    async with page_of(tmp_path, viewport=viewport, has_touch=True, is_mobile=True) as (tab, _, __):
        page = tab.page
        error = {"message": "z" * 200, "status": 429, "retryAt": 4e12}
        await put_chat(tab, WIDE, WIDE, state="failed", error=error)
        widths = "[document.documentElement.scrollWidth, document.querySelector('#scroller').scrollWidth]"
        assert await page.evaluate(widths) == [360, 360]
        await page.tap("#open-sidebar")
        await tab.until("document.querySelector('#sidebar').getBoundingClientRect().left === 0")
        assert await page.evaluate(widths) == [360, 360]
        await page.tap("#new-chat")
        await tab.until("document.activeElement?.id === 'prompt'")
        await page.tap("#open-settings")
        assert await page.evaluate(widths) == [360, 360]
        box = await page.locator("#settings").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360
        await page.tap("[aria-label='Close the settings']")
        for button in await page.locator("#composer button:visible, header button:visible").all():
            size = await button.bounding_box()
            assert min(size["width"], size["height"]) >= 32


async def test_every_control_has_a_name_and_answers_are_announced(tmp_path: Path) -> None:
    async with page_of(tmp_path) as (tab, _, __):
        page = tab.page
        await say(tab, "one two")
        await finished(tab)
        await page.click("#open-settings")
        assert await page.evaluate(NAMELESS) == []
        assert await page.get_attribute("#messages", "aria-live") == "polite"
        assert await page.get_attribute(".message.assistant", "aria-busy") == "false"
        assert await page.get_attribute("html", "lang") == "en"
        assert await page.locator("main").count() == await page.locator("h1").count() == 1
        assert await page.locator("[id]").evaluate_all(
            "nodes => nodes.length === new Set(nodes.map(({id}) => id)).size"
        )


async def test_text_from_right_to_left_is_shown_so(tmp_path: Path) -> None:
    async with page_of(tmp_path) as (tab, _, __):
        text = "مرحبا بالعالم"
        await put_chat(tab, text, f"{text}\n\nEnglish\n\n- {text}", draft=text, state="done")
        directions = await tab.page.evaluate(
            "['#prompt', '#title', '.user .body', '.markdown p', '.markdown p + p', '.markdown ul']"
            ".map(name => getComputedStyle(document.querySelector(name)).direction)"
        )
        assert directions == ["rtl", "rtl", "rtl", "rtl", "ltr", "rtl"]


CONTROLS = "button, input, textarea, select, a, canvas[tabindex], dialog, progress"
NAMELESS = f"""[...document.querySelectorAll('{CONTROLS}')]
  .filter((node) => {{
    const labels = [...(node.labels ?? [])].map((label) => label.textContent).join(' ');
    const by = node.getAttribute('aria-labelledby');
    const name = node.ariaLabel || (by && document.getElementById(by)?.textContent) || labels || node.textContent;
    return !name.trim();
  }}).map((node) => node.outerHTML.slice(0, 120))"""
