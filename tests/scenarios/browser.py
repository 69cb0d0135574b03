"""A page in headless Chromium, and what it must never do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
TIMEOUT_S = 60
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def skip_without_browser() -> None:
    """Skip the test, with the reason, where it cannot be run."""
    pytest.importorskip("playwright", reason="The Python package playwright is missing.")
    if not CHROMIUM.exists():
        pytest.skip(f"There is no browser at {CHROMIUM} (Debian's package chromium).")


class Window:
    """One page, as its reader sees it.

    Attributes:
        page: Playwright's.
        complaints: What the console said, and exceptions; to be empty in the end.
        asked: The addresses that were asked for.
    """

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.url = url
        self._context = browser.new_context(**context)
        self.page = self._context.new_page()
        self.page.set_default_timeout(1000 * TIMEOUT_S)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", lambda dialog: dialog.accept())
        self.page.goto(url)

    def close(self) -> None:
        self._context.close()

    def text(self, selector: str) -> str:
        """Return what is written there."""
        return str(self.page.locator(selector).inner_text())

    def texts(self, selector: str) -> list[str]:
        return [str(text) for text in self.page.locator(selector).all_inner_texts()]

    def until(
        self, condition: Callable[[], object], meanwhile: Callable[[], object] | None = None
    ) -> None:
        """Return once ``condition`` holds; fail if it never does.

        Args:
            condition: Asked again and again.
            meanwhile: Done between two questions.
        """
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, self.page.locator("body").inner_text()
            if meanwhile is not None:
                meanwhile()
            # Playwright handles the page's events only while it is asked something.
            self.page.wait_for_timeout(20)

    def set(self, *, instructions: str = "", longest: int = 8) -> None:
        """Fill in the settings of the conversation."""
        self.page.click("#settings summary")
        self.page.fill("#instructions", instructions)
        self.page.fill("#temperature", "0")
        self.page.fill("#max-tokens", str(longest))

    def send(self, text: str) -> None:
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")

    @property
    def answered(self) -> int:
        """How many answers of this conversation are over."""
        return int(self.page.locator("#messages .answer[aria-busy=false]").count())

    @property
    def overflows(self) -> bool:
        """Something is wider than the window."""
        return bool(
            self.page.evaluate("document.documentElement.scrollWidth > innerWidth")
            or self.page.evaluate(
                "[...document.querySelectorAll('main *')].some((each) =>"
                " each.getClientRects().length"
                " && !each.closest('.wide, pre, svg, .hidden')"
                " && each.getBoundingClientRect().right > innerWidth + 1)"
            )
        )
