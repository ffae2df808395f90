"""A real browser for tests: the Chromium that the machine has, never one that is fetched."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_FOUND = next(filter(None, map(shutil.which, _NAMES)), None)
_MISSING = f"no Chromium on this machine ({', '.join(_NAMES)})"

#: Marks of a test that opens a page.
needs_browser = (
    pytest.mark.browser,
    pytest.mark.skipif(_FOUND is None, reason=_MISSING),
)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser, until it is let go. RuntimeError where there is none."""
    if _FOUND is None:
        raise RuntimeError(_MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_FOUND, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()
