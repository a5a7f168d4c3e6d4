"""A notebook: a real Jupyter kernel that runs cells and returns what they show."""

import os
import queue
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

CELL_TIMEOUT_SECONDS = 120.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Shown:
    """What a cell shows below itself."""

    output: str = ""
    errors: str = ""
    result: str = ""
    """The value of the cell's last line."""
    traceback: str = ""
    """What the frontend shows of an exception, without colours."""
    died: bool = False
    """Whether the kernel ended instead of answering."""


class Notebook:
    """A running kernel. As a context manager it ends the kernel at the exit."""

    def __init__(self, folder: Path) -> None:
        self._manager = KernelManager()
        self._manager.start_kernel(cwd=folder, env={**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"})
        self._client: BlockingKernelClient = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=CELL_TIMEOUT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def run(self, cell: str) -> Shown:
        """Run one cell, and wait for its end or for the kernel's."""
        return self.wait(self.start(cell))

    def start(self, cell: str) -> str:
        """Start a cell, and return its number for `wait`."""
        number: str = self._client.execute(cell)
        return number

    def wait_for_output(self, number: str, text: str) -> str:
        """Wait until a running cell has shown `text`, and return what it has shown."""
        shown = ""
        deadline = time.monotonic() + CELL_TIMEOUT_SECONDS
        while text not in shown:
            message = self._client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            if message["msg_type"] == "stream" and message["parent_header"].get("msg_id") == number:
                shown += message["content"]["text"]
        return shown

    def interrupt(self) -> None:
        """Do what the frontend's stop button does."""
        self._manager.interrupt_kernel()

    def wait(self, number: str) -> Shown:
        """Wait for the end of a cell, or of the kernel."""
        shown = Shown()
        deadline = time.monotonic() + CELL_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=1.0)
            except queue.Empty:
                if not self._manager.is_alive():
                    shown.died = True
                    return shown
                continue
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                if content["name"] == "stdout":
                    shown.output += content["text"]
                else:
                    shown.errors += content["text"]
            elif kind == "execute_result":
                shown.result = content["data"]["text/plain"]
            elif kind == "error":
                shown.traceback = _COLOUR.sub("", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return shown
        raise TimeoutError("the cell does not end")
