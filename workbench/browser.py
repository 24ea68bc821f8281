"""A real browser for tests of pages: headless Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Dialog, Page, sync_playwright

from workbench.settings import ROOT

INSTALLED = ("chromium", "chromium-browser", "google-chrome")
UNPACKED = ROOT / "build" / "chromium" / "chromium"
"""What the Makefile unpacks where none is installed."""


def program() -> Path | None:
    """The browser: an installed one, else that of `make build/chromium/.ready`, else None."""
    for name in INSTALLED:
        if found := shutil.which(name):
            return Path(found)
    return UNPACKED if UNPACKED.exists() else None


@contextmanager
def started(path: Path) -> Iterator[Browser]:
    """A browser process, ended behind the block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            browser.close()


class Trap:
    """What a page must never do, noted from its first moment on.

    Attributes:
        dialogs: the texts of its alerts and questions; each is answered with yes.
        errors: exceptions of its scripts.
        asked: addresses that it asked for, with its own.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        self.asked: list[str] = []
        page.on("dialog", self._on_dialog)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def _on_dialog(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.accept()

    def sprung(self) -> list[str]:
        """The frames of the page in which a script of `ATTACKS` ran."""
        return [
            frame.name or frame.url
            for frame in self._page.frames
            if frame.evaluate("() => window.sprung !== undefined")
        ]


ATTACKS = (
    "<script>window.sprung=1;alert('sprung')</script>"
    "<img src=x onerror=\"window.sprung=1;alert('sprung')\">"
    '"><svg onload="window.sprung=1;alert(\'sprung\')">'
)
"""Text that is three scripts where it is taken for markup."""
