"""A headless browser that opens files, for tests of what readers see: Debian's Chromium, driven through a pipe."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from base64 import b64decode
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest

PROGRAM = shutil.which("chromium")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
FIRST_FREE = 10
"""The least number of our file descriptors, so that none is one of the two that Chromium reads and writes."""
WIDTH = 1320
LIMIT_SECONDS = 60


class Browser:
    """A page of a browser process. See the Chrome DevTools Protocol for the commands."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._answers = answers
        self._received = b""
        self._numbers = count(1)
        self._events: list[str] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Return the result of a command."""
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._events.append(answer.get("method", ""))

    def open(self, file: Path, scheme: Literal["light", "dark"] = "light") -> None:
        """Open a file, as a window of its whole height that prefers light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self.call("Page.navigate", url=file.absolute().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._events.append(self._read().get("method", ""))
        self._resize(800)
        self._resize(self.evaluate("Math.ceil(document.documentElement.getBoundingClientRect().height) + 60"))

    def evaluate(self, code: str) -> Any:
        """Return the value of an expression in JavaScript."""
        result = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def take_screenshot(self, file: Path) -> None:
        """Write what the window shows as PNG."""
        file.write_bytes(b64decode(self.call("Page.captureScreenshot")["data"]))

    def _resize(self, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def start_browser() -> Iterator[Browser]:
    """Start a browser, and end it. Skips the test where there is none."""
    if PROGRAM is None:
        pytest.skip("PICTURES ARE NOT TESTED IN A BROWSER: there is no chromium here (apt-get install chromium)")
    pipes = [os.pipe(), os.pipe()]
    (reads, requests), (answers, writes) = (
        [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for end in ends] for ends in pipes
    )
    for end in (end for ends in pipes for end in ends):
        os.close(end)
    with tempfile.TemporaryDirectory(prefix="rankless-browser-") as folder:
        command = [PROGRAM, *OPTIONS, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *command],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        try:
            yield Browser(requests, answers)
        finally:
            os.close(requests)  # the browser ends
            os.close(answers)
            process.wait(LIMIT_SECONDS)
