"""Slows one rank from outside: a module for `--preload`. SLOW_RANK is the rank whose uses of files wait."""

import functools
import json
import os
import sys
import time
from types import FrameType
from typing import Any

PROCESS = (os.getpid,)  # in a tuple: in the logical view the function gives rank 0's number
SLOWED = ("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "shutil.copyfile")
SLOWED_METHODS = ("close", "__exit__", "flush", "truncate")
"""A file that is open shows no event when it is written or closed."""
SECONDS = 0.005


@functools.cache
def find_rank(_process_id: int) -> str:
    plan = os.environ.get("RANKLESS_WORKER_PLAN")
    return "" if plan is None else str(json.loads(plan)["rank"])


def wait(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in SLOWED and find_rank(PROCESS[0]()) == os.environ.get("SLOW_RANK"):
        time.sleep(SECONDS)
        if sys.getprofile() is None:
            sys.setprofile(wait_before_method)


def wait_before_method(_frame: FrameType, event: str, called: Any) -> None:
    if event == "c_call" and called.__name__ in SLOWED_METHODS and type(called.__self__).__module__ == "_io":
        time.sleep(SECONDS)


sys.addaudithook(wait)
