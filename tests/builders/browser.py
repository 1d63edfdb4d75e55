"""A real browser for the tests of pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

PROGRAMS = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
ARGUMENTS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-dev-shm-usage",
    "window-size=1600,1200",
    # The browser itself sends nothing over the network.
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
)
NEEDS_BROWSER = pytest.mark.skipif(
    None in PROGRAMS.values(), reason="needs the Debian packages chromium and chromium-driver"
)


@contextlib.contextmanager
def open_browser() -> Iterator[Chrome]:
    """Open a window of 1600 by 1200 pixels for the block."""
    options = ChromeOptions()
    options.binary_location = PROGRAMS["chromium"]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ARGUMENTS:
        options.add_argument(f"--{argument}")
    with Chrome(options, Service(PROGRAMS["chromedriver"])) as page:
        yield page


def page_text(page: Chrome) -> str:
    return page.execute_script("return document.body ? document.body.innerText : ''")


def wait_for(page: Chrome, script: str) -> object:
    """Wait until `script` returns a true value, and return it.

    Raises TimeoutException, with the text of the page, after a minute.
    """
    try:
        return WebDriverWait(page, 60).until(lambda _: page.execute_script(script))
    except TimeoutException as error:
        error.msg = f"{script} stays false on a page that says:\n{page_text(page)}"
        raise


def save_screenshot(page: Chrome, name: str) -> None:
    """Save a screenshot in the folder PGTK_SCREENSHOTS, if that is set."""
    folder = os.environ.get("PGTK_SCREENSHOTS")
    if folder:
        page.save_screenshot(str(Path(folder) / f"{name}.png"))
