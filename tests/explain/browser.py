"""Headless Chromium by its DevTools protocol, over a pipe: nothing to install beside the browser."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe"),
)


def find() -> str | None:
    """The browser of this machine, if it has one; `tools/install_chromium.sh` brings it."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page: commands, and every event since it was opened."""

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of, self._left, self._number, self._session = to, of, b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._to, json.dumps({"id": self._number, "method": method, "params": params, **session}).encode() + b"\0"
        )
        while True:
            message = self._next(30)
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def open(self, page: Path, query: str = "") -> None:
        """Load a page to its end."""
        before = len(self.events)
        self.send("Page.navigate", url=page.as_uri() + query)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events[before:]):
            self.events.append(self._next(30))

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """A key, as the keyboard gives it."""
        codes = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more)

    def _next(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._left:
            if not select.select([self._of], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError(f"the browser said nothing for {seconds} s")
            part = os.read(self._of, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def opened(page: Path, folder: Path, width: int = 1280, height: int = 800) -> Iterator[Tab]:
    """A tab that shows a page; the browser and what it wrote are gone afterwards."""
    program = find()
    assert program is not None
    (read, to), (of, write) = os.pipe(), os.pipe()
    line = f'exec "$0" "$@" 3<&{read} 4>&{write}'
    flags = [*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"]
    browser = subprocess.Popen(
        ["bash", "-c", line, program, *flags],
        pass_fds=(read, write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read)
    os.close(write)
    try:
        tab = Tab(to, of)
        tab.open(page)
        yield tab
        tab._session = ""
        tab.send("Browser.close")
        browser.wait(20)
    finally:
        browser.kill()
        browser.wait()
        os.close(to)
        os.close(of)
        shutil.rmtree(folder, ignore_errors=True)
