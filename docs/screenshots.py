"""The pictures of the pages in docs/, taken from a running server with the built-in model.

    python -m streamkv serve --kv-cache-memory-gib 0.45
    python docs/screenshots.py http://127.0.0.1:8000

Needs Playwright and /usr/bin/chromium. Takes two minutes, in which it keeps some streams going.
"""

import asyncio
import random
import sys
from pathlib import Path

import aiohttp
from playwright.async_api import Browser, Page, async_playwright

FOLDER = Path(__file__).resolve().parent
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SYSTEM = (
    "You are a helpful assistant. You answer questions about the sea, the sky and the stars in short, clear words. " * 3
)
QUESTIONS = [
    "Why is the sky blue?",
    "Tell me about the moon.",
    "How do tides work?",
    "What is a whale?",
    "Explain gravity.",
    "What is a comet?",
]
SETTINGS = (
    "localStorage['streamkv.settings'] = JSON.stringify({temperature: 0.3, top_p: 0.9, max_tokens: 260, seed: 11})"
)
NUM_STREAMS = 6
FILL_S = 66


async def stream(session: aiohttp.ClientSession, url: str, number: int) -> None:
    """Ask one thing after the other until cancelled."""
    chance = random.Random(number)
    await asyncio.sleep(2 * number)
    while True:
        messages = [
            {"role": "user", "content": chance.choice(QUESTIONS) + " Give details." * chance.choice([0, 2, 40])}
        ]
        if number % 2:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        body = {"messages": messages, "max_tokens": chance.randint(30, 160), "stream": True}
        async with session.post(url + "/v1/chat/completions", json=body) as response:
            await response.read()
        await asyncio.sleep(chance.random())


async def chat(browser: Browser, url: str, questions: list[str], name: str, **options: object) -> None:
    """A picture of an answer, with other chats beside it that are still being written."""
    context = await browser.new_context(**options)
    await context.add_init_script(SETTINGS)
    page = await context.new_page()
    await page.goto(url)
    await page.wait_for_selector("#state[data-state=ready]")
    for question in questions:
        if not await page.is_visible("#empty"):
            await page.evaluate("document.querySelector('#new-chat').click()")
        await page.fill("#prompt", question)
        await page.press("#prompt", "Enter")
        await page.wait_for_selector(".is-writing")
    await page.wait_for_selector("#stop", state="hidden", timeout=300_000)
    await shoot(page, name)
    await context.close()


async def shoot(page: Page, name: str) -> None:
    path = FOLDER / name
    await page.screenshot(path=path, full_page=True)
    print(f"{path}: {path.stat().st_size // 1000} kB")


async def main(url: str) -> None:
    async with async_playwright() as playwright, aiohttp.ClientSession() as session:
        browser = await playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGS)
        await chat(
            browser,
            url,
            ["Why is the sky blue?", "Write a Python function that tells whether a number is prime"],
            "chat.png",
            viewport={"width": 1280, "height": 800},
            color_scheme="light",
        )
        await chat(
            browser,
            url,
            ["Give me three short tips for a good night's sleep, as a list"],
            "chat-phone-dark.png",
            viewport={"width": 390, "height": 780},
            color_scheme="dark",
            has_touch=True,
            is_mobile=True,
        )
        streams = [asyncio.create_task(stream(session, url, number)) for number in range(NUM_STREAMS)]
        context = await browser.new_context(viewport={"width": 1360, "height": 900}, color_scheme="light")
        page = await context.new_page()
        await page.goto(url + "/dashboard")
        await asyncio.sleep(FILL_S)
        await shoot(page, "dashboard.png")
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await browser.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1].rstrip("/")))
