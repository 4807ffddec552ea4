"""The dashboard in a real browser: what runs is seen, and is gone afterwards; and both pages' colours can be read."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from gateway.auth import ApiKeys, Caller
from tests.support.browser import Tab, needs_browser, open_tab
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, running_gateway
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

pytestmark = [needs_browser, pytest.mark.long]

KEY = "a-key-of-the-tests-0123456789"
LEGEND = """Object.fromEntries([...document.querySelectorAll('#legend li')].map((entry) => [
  entry.textContent.replace(/^[\\d,]+ /, '').split(/[ ,]/)[0],
  Number(entry.querySelector('b').textContent.replace(/,/g, '')),
]))"""
"""State → blocks, as the page says."""


@contextlib.asynccontextmanager
async def dashboard(
    folder: Path, *, api_keys: ApiKeys | None = None, **options: Any
) -> AsyncIterator[tuple[Tab, RunningGateway]]:
    """The dashboard of a slow engine with 100 blocks."""
    async with contextlib.AsyncExitStack() as stack:
        executor = ScriptedExecutor(vocab_size=VOCAB_SIZE, num_blocks=101, step_s=0.03)
        engine = stack.enter_context(serving(executor))
        gateway = await stack.enter_async_context(running_gateway(engine.endpoint, api_keys=api_keys))
        yield await stack.enter_async_context(open_tab(folder, gateway.url + "/dashboard", **options)), gateway


@contextlib.asynccontextmanager
async def running(gateway: RunningGateway, num_streams: int, **headers: str) -> AsyncIterator[None]:
    """Streams with a common prompt of two blocks and more, until the block ends."""

    async def stream(number: int) -> None:
        body = {"prompt": [*range(30, 70), 100 + number], "max_tokens": 300, "temperature": 0, "stream": True}
        async with gateway.session.post(gateway.url + "/v1/completions", json=body, headers=headers) as response:
            await response.read()

    tasks = [asyncio.create_task(stream(number)) for number in range(num_streams)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_blocks_of_running_sequences_are_seen_and_gone_afterwards(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as (tab, gateway):
        page = tab.page
        await tab.until(f"({LEGEND}).free === 100")
        assert await page.inner_text("#state-text") == "Idle"
        async with running(gateway, 3):
            await tab.until(f"({LEGEND}).shared >= 2 && ({LEGEND}).owned >= 3")
            await tab.until("document.querySelectorAll('#sequences tr').length === 3")
            assert await page.inner_text("#state-text") == "Running"
            await tab.until("document.querySelector('.tile .value').textContent !== '0.0'")
            rows = await page.locator("#sequences tr").all_inner_texts()
            assert all("Writing" in row and "41 +" in row for row in rows), rows
            colours = await page.locator("#sequences .swatch").evaluate_all(
                "nodes => nodes.map(n => getComputedStyle(n).backgroundColor)"
            )
            assert len(set(colours)) == 3
            painted = await page.evaluate(PAINTED)
            assert len(painted) >= 5, "sequences, free blocks and the ground have colours of their own"
            await tab.until("document.querySelector('#timeline').ariaLabel.startsWith('3 sequences')")
            await tab.until("document.querySelector('#latency tr:nth-child(2) td').textContent.endsWith('ms')")
            await page.click("#sequences .pick >> nth=0")
            assert await page.get_attribute("#sequences .pick >> nth=0", "aria-pressed") == "true"
            await page.check("[name=colour][value=state]")
            assert len(await page.evaluate(PAINTED)) >= 3
        await tab.until(f"({LEGEND}).owned === 0 && ({LEGEND}).shared === 0 && ({LEGEND}).cached > 0")
        await tab.until("document.querySelectorAll('#sequences tr').length === 0")
        assert await page.is_visible("#no-sequences")


PAINTED = """(() => {
  const canvas = document.querySelector('#map');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const counts = {};
  for (let at = 0; at < data.length; at += 4) {
    const colour = `${data[at]},${data[at + 1]},${data[at + 2]},${data[at + 3]}`;
    counts[colour] = (counts[colour] ?? 0) + 1;
  }
  return Object.keys(counts).filter((colour) => counts[colour] > 60);
})()"""


async def test_a_block_tells_what_it_is_by_mouse_and_by_keyboard(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as (tab, gateway), running(gateway, 2):
        page = tab.page
        await tab.until("document.querySelectorAll('#sequences tr').length === 2")
        await page.click("#hold")
        await page.focus("#map")
        texts = []
        for _ in range(100):
            await page.keyboard.press("ArrowRight")
            texts.append(await page.inner_text("#tip"))
        assert texts[0].startswith("Block 1:") and texts[99].startswith("Block 100:")
        assert any("shared" in text and "2 owners" in text for text in texts)
        assert any("owned" in text and "1 owner" in text and "its block 3 of" in text for text in texts)
        assert any("free" in text and "holds nothing" in text for text in texts)
        assert "Block 100" in await page.text_content("#map-live")
        await page.keyboard.press("Escape")
        assert await page.is_hidden("#tip")
        await page.hover("#map", position={"x": 30, "y": 10})
        assert (await page.inner_text("#tip")).startswith("Block ")


async def test_a_key_is_asked_for(tmp_path: Path) -> None:
    api_keys = ApiKeys({hashlib.sha256(KEY.encode()).digest(): Caller("tests")})
    async with dashboard(tmp_path, api_keys=api_keys) as (tab, _):
        await tab.page.fill("#key", KEY)
        await tab.page.press("#key", "Enter")
        await tab.until(f"({LEGEND}).free === 100")
        assert await tab.page.is_hidden("#key-form")
        await tab.page.reload()
        await tab.until(f"({LEGEND}).free === 100")


async def test_a_phone_needs_no_sideways_scrolling(tmp_path: Path) -> None:
    async with dashboard(tmp_path, viewport={"width": 360, "height": 740}) as (tab, gateway), running(gateway, 2):
        await tab.until("document.querySelectorAll('#sequences tr').length === 2")
        assert await tab.page.evaluate("document.documentElement.scrollWidth") == 360


async def test_an_engine_that_is_gone_is_told_of(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as (tab, gateway):
        await tab.until(f"({LEGEND}).free === 100")
        await gateway.server.close()
        await tab.until("document.querySelector('#state').dataset.state === 'lost'")
        assert await tab.page.inner_text("#state-text") == "Not reachable"


# Both pages

TEXT_ON = [
    *[(text, ground) for text in ("text", "muted") for ground in ("bg", "surface", "raised", "code-bg", "accent-soft")],
    *[("accent", ground) for ground in ("bg", "surface")],
    *[(f"code-{kind}", "code-bg") for kind in ("word", "string", "number", "comment")],
    ("on-accent", "accent"),
    ("on-accent", "accent-hover"),
    ("danger", "danger-soft"),
    ("warn", "warn-soft"),
]
SHAPES_ON = [("control-line", "bg"), *[(name, "surface") for name in ("control-line", "ok", "warn", "danger")]]
STATES = ["free", "cached", "owned", "shared", "transfer"]


def luminance(colour: str) -> float:
    """Of #rrggbb, as WCAG 2 has it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_the_colours_can_be_read(tmp_path: Path, scheme: str) -> None:
    async with dashboard(tmp_path, color_scheme=scheme) as (tab, _):
        names = sorted({name for pair in (*TEXT_ON, *SHAPES_ON) for name in pair} | set(STATES))
        values = await tab.page.evaluate(
            "names => names.map(name => getComputedStyle(document.body).getPropertyValue(`--${name}`).trim())",
            names,
        )
        colours = dict(zip(names, values, strict=True))
        for pairs, least in ((TEXT_ON, 4.5), (SHAPES_ON, 3.0)):
            found = {(one, other): contrast(colours[one], colours[other]) for one, other in pairs}
            assert {pair: value for pair, value in found.items() if value < least} == {}
        assert all(colours[one] != colours[other] for one, other in combinations(STATES, 2))


async def test_every_control_has_a_name(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as (tab, gateway), running(gateway, 2):
        await tab.until("document.querySelectorAll('#sequences tr').length === 2")
        nameless = await tab.page.evaluate(
            "[...document.querySelectorAll('button, input, a, canvas[tabindex], canvas[role=img], [tabindex=\"0\"]')]"
            ".filter(node => !(node.ariaLabel || node.getAttribute('aria-labelledby') || node.textContent"
            " || [...(node.labels ?? [])].map(label => label.textContent).join('')).trim())"
            ".map(node => node.outerHTML.slice(0, 120))"
        )
        assert nameless == []
        assert await tab.page.locator("h1").count() == await tab.page.locator("main").count() == 1
