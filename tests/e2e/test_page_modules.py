"""The pages' modules alone, in the browser that runs them: the Markdown renderer and the client."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Tab, needs_browser, open_tab
from tests.support.relay import Relay, relaying
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, eventually_async, running_gateway
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

pytestmark = [needs_browser, pytest.mark.long]


@contextlib.asynccontextmanager
async def opened(folder: Path, step_s: float = 0.0) -> AsyncIterator[tuple[Tab, RunningGateway, Relay]]:
    """A page of the gateway's, loaded through a relay."""
    async with contextlib.AsyncExitStack() as stack:
        engine = stack.enter_context(serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=step_s)))
        gateway = await stack.enter_async_context(running_gateway(engine.endpoint))
        relay = await stack.enter_async_context(relaying(gateway.url))
        tab = await stack.enter_async_context(open_tab(folder, relay.url))
        yield tab, gateway, relay


MARKDOWN = [
    ("a *b* **c** ***d*** `e*f*` ~~g~~", '<p dir="auto">a <em>b</em> <strong>c</strong> <strong><em>d</em></strong> '
     '<code dir="ltr">e*f*</code> <del>g</del></p>'),
    ("2*3*4 snake_case_name __init__", '<p dir="auto">2*3*4 snake_case_name <strong>init</strong></p>'),
    ("# A\n## B ##\ntext", '<h3 dir="auto">A</h3><h4 dir="auto">B</h4><p dir="auto">text</p>'),
    ("one\ntwo  \nthree", '<p dir="auto">one\ntwo<br>three</p>'),
    ("- a\n- b\n  - c\n- d", '<ul dir="auto"><li>a</li><li>b<ul dir="auto"><li>c</li></ul></li><li>d</li></ul>'),
    ("3. a\n4. b\n\ntext", '<ol dir="auto" start="3"><li>a</li><li>b</li></ol><p dir="auto">text</p>'),
    ("1. a\n   - b\n2. c", '<ol dir="auto"><li>a<ul dir="auto"><li>b</li></ul></li><li>c</li></ol>'),
    ("- [ ] a\n- [x] b", '<ul dir="auto"><li>☐ a</li><li>☑ b</li></ul>'),
    ("> a\n> > b", '<blockquote dir="auto"><p dir="auto">a</p><blockquote dir="auto"><p dir="auto">b</p></blockquote>'
     "</blockquote>"),
    ("a\n\n---\n\nb", '<p dir="auto">a</p><hr><p dir="auto">b</p>'),
    ("born in\n1984. A year", '<p dir="auto">born in\n1984. A year</p>'),
    ("<b>a</b> &amp; &lt;", '<p dir="auto">&lt;b&gt;a&lt;/b&gt; &amp;amp; &amp;lt;</p>'),
    ("[a](javascript:alert(1)) [b](/c)", '<p dir="auto"><span>a</span> <span>b</span></p>'),
    ("\\*a\\* \\`b\\`", '<p dir="auto">*a* `b`</p>'),
    ("", ""),
]  # fmt: skip


@pytest.fixture
async def module_tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with opened(tmp_path) as (tab, _, __):
        yield tab


async def test_markdown_becomes_the_nodes_that_it_means(module_tab: Tab) -> None:
    found = await module_tab.page.evaluate(
        """async (texts) => {
          const { markdown, MarkdownView } = await import('./page/markdown.js');
          return texts.map((text) => {
            const whole = document.createElement('div');
            whole.append(markdown(text));
            const grown = document.createElement('div');
            const view = new MarkdownView(grown);
            for (let end = 0; end <= text.length; end++) view.update(text.slice(0, end));
            return [whole.innerHTML, grown.innerHTML];
          });
        }""",
        [text for text, _ in MARKDOWN],
    )
    for (text, wanted), (whole, grown) in zip(MARKDOWN, found, strict=True):
        assert whole == wanted, text
        assert grown == whole, f"it depends on how the text came: {text}"


async def test_links_code_and_tables(module_tab: Tab) -> None:
    text = (
        "[site](https://example.org/a_b_(c)?x=1) <https://example.org/d> see https://example.org/e_f. "
        "[mail](mailto:a@b.c)\n\n| a | b \\| c |\n|:--|--:|\n| **1** | 2 |\n| 3 |\n\n"
        "```py\ndef f(x):  # *no*\n    return 'a'\n```\n\n~~~\nopen fence"
    )
    found = await module_tab.page.evaluate(
        """async (text) => {
          const { markdown } = await import('./page/markdown.js');
          const root = document.createElement('div');
          root.append(markdown(text));
          return {
            links: [...root.querySelectorAll('a')].map(({ href, rel, target }) => [href, rel, target]),
            cells: [...root.querySelectorAll('tr')].map((row) => [...row.children].map((cell) => cell.textContent)),
            ends: [...root.querySelectorAll('.to-end')].length,
            code: [...root.querySelectorAll('pre code')].map((code) => code.textContent),
            colours: [...root.querySelectorAll('pre span')].map((part) => [part.className, part.textContent]),
            copies: [...root.querySelectorAll('button.copy-code')].map((button) => button.ariaLabel),
          };
        }""",
        text,
    )
    assert [href for href, _, __ in found["links"]] == [
        "https://example.org/a_b_(c)?x=1", "https://example.org/d", "https://example.org/e_f", "mailto:a@b.c",
    ]  # fmt: skip
    assert {(rel, target) for _, rel, target in found["links"]} == {("noopener noreferrer nofollow", "_blank")}
    assert found["cells"] == [["a", "b | c"], ["1", "2"], ["3", ""]] and found["ends"] == 3
    assert found["code"] == ["def f(x):  # *no*\n    return 'a'", "open fence"]
    assert ["code-comment", "# *no*"] in found["colours"] and ["code-string", "'a'"] in found["colours"]
    assert found["copies"] == ["Copy py code", "Copy text code"]


@pytest.mark.parametrize(
    "unit", ["**a", "_a ", "[a](", "![", "`a", "| a ", "> ", "- ", "*_~`[(", "<a href=", "~~a", "1. "]
)
async def test_no_text_takes_long(module_tab: Tab, unit: str) -> None:
    seconds = await module_tab.page.evaluate(
        """async ([unit, count]) => {
          const { markdown } = await import('./page/markdown.js');
          const begun = performance.now();
          markdown(unit.repeat(count));
          return (performance.now() - begun) / 1000;
        }""",
        [unit, 40_000 // len(unit)],
    )
    assert seconds < 10


# The client

COLLECT = """async ([transport, request, options]) => {
  const { StreamKV } = await import('./page/streamkv.js');
  const client = new StreamKV();
  const texts = {}, ends = {};
  const types = [];
  let usage = null;
  window.answer = client.stream(request, { transport, ...options });
  for await (const event of window.answer) {
    types.push(event.type);
    if (event.type === 'delta') texts[event.index] = (texts[event.index] ?? '') + event.text;
    if (event.type === 'finished') ends[event.index] = event.finishReason;
    if (event.type === 'done') usage = event.usage;
    window.numChars = Object.values(texts).join('').length;
  }
  return { texts, ends, types, usage };
}"""


async def whole(gateway: RunningGateway, request: dict[str, Any]) -> dict[str, str]:
    status, answer = await gateway.post("/v1/completions", request)
    assert status == 200, answer
    return {str(choice["index"]): choice["text"] for choice in answer["choices"]}


@pytest.mark.parametrize("transport", ["sse", "websocket"])
async def test_several_choices_survive_cuts_without_loss_or_doubling(tmp_path: Path, transport: str) -> None:
    request = {"prompt": list(range(30, 50)), "n": 3, "max_tokens": 120, "seed": 5, "temperature": 0.9, "stop": ["zzz"]}
    async with opened(tmp_path, step_s=0.02) as (tab, gateway, relay):
        task = asyncio.create_task(tab.page.evaluate(COLLECT, [transport, request, {}]))
        for num_chars in (60, 250):
            await tab.until(f"(window.numChars ?? 0) > {num_chars}")
            relay.cut()
        found = await task
        assert found["texts"] == await whole(gateway, request)
        assert found["ends"] == {"0": "length", "1": "length", "2": "length"}
        assert found["types"].count("reconnected") == 2 and found["types"][-1] == "done"
        assert found["usage"]["completion_tokens"] == 360


@pytest.mark.parametrize("transport", ["sse", "websocket"])
async def test_what_is_refused_is_thrown_with_its_reason(tmp_path: Path, transport: str) -> None:
    async with opened(tmp_path) as (tab, _, __):
        found = await tab.page.evaluate(
            """async (transport) => {
              const { StreamKV, StreamKVError } = await import('./page/streamkv.js');
              const client = new StreamKV();
              try {
                for await (const event of client.stream({ prompt: 'a', temperature: -1 }, { transport })) void event;
              } catch (error) {
                return [error instanceof StreamKVError, error.status, error.param, error.message];
              }
            }""",
            transport,
        )
        assert found[:3] == [True, 400, "temperature"] and "temperature" in found[3]


@pytest.mark.parametrize("transport", ["sse", "websocket"])
async def test_leaving_the_loop_cancels(tmp_path: Path, transport: str) -> None:
    async with opened(tmp_path, step_s=0.02) as (tab, gateway, _):
        request = {"prompt": [5, 6, 7], "max_tokens": 1500, "temperature": 0}
        await tab.page.evaluate(
            """async ([transport, request]) => {
              const { StreamKV } = await import('./page/streamkv.js');
              for await (const event of new StreamKV().stream(request, { transport })) {
                if (event.type === 'delta') break;
              }
            }""",
            [transport, request],
        )

        async def is_idle() -> bool:
            metrics = await gateway.metrics()
            return metrics["num_live_streams"] == 0 and metrics['requests_ended_total{reason="abort"}'] == 1

        await eventually_async(is_idle, 30.0)


@pytest.mark.parametrize(("before", "after"), [("sse", "sse"), ("websocket", "websocket"), ("sse", "websocket")])
async def test_a_cursor_can_be_taken_up_later_by_either_way(tmp_path: Path, before: str, after: str) -> None:
    request = {"prompt": list(range(30, 50)), "max_tokens": 90, "temperature": 0}
    async with opened(tmp_path, step_s=0.02) as (tab, gateway, _):
        text, cursor = await tab.page.evaluate(
            """async ([transport, request]) => {
              const { StreamKV } = await import('./page/streamkv.js');
              const answer = new StreamKV().stream(request, { transport });
              let text = '';
              for await (const event of answer) {
                text += event.text ?? '';
                if (text.length > 30) {
                  answer.cancel = () => {};
                  return [text, { ...answer.cursor }];
                }
              }
            }""",
            [before, request],
        )
        await tab.page.reload()
        rest = await tab.page.evaluate(
            """async (cursor) => {
              const { StreamKV } = await import('./page/streamkv.js');
              let text = '';
              for await (const event of new StreamKV().attach(cursor)) text += event.text ?? '';
              return text;
            }""",
            {**cursor, "transport": after},
        )
        assert text + rest == (await whole(gateway, request))["0"]
        assert json.dumps(cursor), "it is plain data"
