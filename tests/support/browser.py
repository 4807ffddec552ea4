"""A real browser for the tests of the pages: Debian's chromium, driven by Playwright."""

import asyncio
import contextlib
import importlib.util
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = "/usr/bin/chromium"
WAIT_MS = 30_000
_ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

needs_browser = pytest.mark.skipif(
    not Path(CHROMIUM).exists() or importlib.util.find_spec("playwright") is None,
    reason=f"needs {CHROMIUM} and Playwright",
)


class Tab:
    """One page in a browser profile of its own. What goes wrong in it fails the test."""

    def __init__(self, context: Any, page: Any) -> None:
        self.context = context
        self.page = page
        self.faults: list[str] = []
        """Exceptions, refused resources and errors on the console."""
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("console", self._on_console)

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript expression holds. Playwright's own way of it is what the pages' policy forbids."""
        until_s = time.monotonic() + WAIT_MS / 1000
        while not await self.page.evaluate(condition):
            assert time.monotonic() < until_s, f"this did not come true in time: {condition}"
            await asyncio.sleep(0.02)

    def _on_console(self, message: Any) -> None:
        # A refused request is one more line here, and the page shows it: those are the tests' own.
        if (
            message.type == "error"
            and "Failed to load resource" not in message.text
            and "WebSocket" not in message.text
        ):
            self.faults.append(f"console: {message.text}")


@contextlib.asynccontextmanager
async def open_tab(folder: Path, url: str, **options: Any) -> AsyncIterator[Tab]:
    """A browser at `url` with a new profile in `folder`. options: of Playwright's context, as viewport."""
    from playwright.async_api import async_playwright

    profile = folder / "profile"
    async with async_playwright() as playwright:
        context = await playwright.chromium.launch_persistent_context(
            str(profile), executable_path=CHROMIUM, headless=True, args=list(_ARGS), **options
        )
        try:
            tab = Tab(context, context.pages[0] if context.pages else await context.new_page())
            if url:
                await tab.page.goto(url)
            yield tab
            assert tab.faults == []
        finally:
            await context.close()
            shutil.rmtree(profile, ignore_errors=True)
