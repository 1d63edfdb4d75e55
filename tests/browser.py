"""A headless Chromium, driven through chromedriver by the WebDriver protocol: plain HTTP, no package needed."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

MISSING = next((name for name in ("chromium", "chromedriver") if not shutil.which(name)), None)
"""The program that is not installed, if one is not."""


class Browser:
    """One page of a Chromium. Made by `browser`."""

    def __init__(self, driver: str):
        self._session = None
        options = {
            "binary": shutil.which("chromium"),
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"],
        }
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        self._driver = driver
        self._session = self._call("POST", "/session", wanted)["sessionId"]

    def open(self, address: str, width: int = 1600, height: int = 1200) -> None:
        """Go to an address, in a window of this size."""
        self._call("POST", f"/session/{self._session}/window/rect", {"width": width, "height": height})
        self._call("POST", f"/session/{self._session}/url", {"url": address})

    def run(self, script: str):
        """What the JavaScript function body returns."""
        return self._call("POST", f"/session/{self._session}/execute/sync", {"script": script, "args": []})

    def text(self) -> str:
        """What the page shows, as text."""
        return self.run("return document.body ? document.body.innerText : ''")

    def wait(self, script: str, seconds: float = 60):
        """What `script` returns as soon as that is true; AssertionError with the page's text after `seconds`."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"{script} stays false on a page that says:\n{self.text()}"
            time.sleep(0.3)
        return found

    def save(self, file: Path) -> None:
        """The window as PNG."""
        file.write_bytes(base64.b64decode(self._call("GET", f"/session/{self._session}/screenshot")))

    def close(self) -> None:
        """End the browser."""
        if self._session:
            self._call("DELETE", f"/session/{self._session}")

    def _call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._driver + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]


@contextlib.contextmanager
def browser():
    """A browser that ends with all it has started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    page = None
    try:
        end = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < end, "chromedriver did not come up"
            time.sleep(0.1)
        page = Browser(f"http://127.0.0.1:{port}")
        yield page
    finally:
        if page is not None:
            page.close()
        driver.terminate()
        driver.wait()
