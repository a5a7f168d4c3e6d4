"""Sources of a script in the logical view that differ between processes, and are equal on all ranks.

*Entropy*: what the script and its libraries draw from the system comes from one stream, which the run's seed begins.
Python's `tempfile` and `multiprocessing`, PyTorch and Rankless keep the system's: their names must differ.

*The process*: the clock, the process id and the name of the host are rank 0's where the script's own files ask for
them. Libraries see their own; nothing that they compute from it should become a number of a training.

*Seeds* that the script sets are noted: if they differ, the ranks name them when they meet.
"""

import contextlib
import ctypes
import datetime
import gc
import hashlib
import os
import platform
import random
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sized
from types import FrameType
from typing import Any, SupportsIndex

from rankless.plain_script.effects_on_first_rank import Effects, replace_everywhere

OWN_ENTROPY = ("tempfile", "multiprocessing", "torch", "rankless", "asyncio", "ssl", "concurrent")
"""Packages whose random names and keys must differ between processes."""
BETWEEN = ("random", "secrets", "uuid", "numpy", __name__)
"""Packages that pass entropy on to their callers."""
CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
FROM_NOW = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
"""Functions of `time` that take the present time without an argument at a place."""
MOMENTS = ((datetime.datetime, "now"), (datetime.datetime, "utcnow"), (datetime.date, "today"))
SYSTEM_ENTROPY = os.urandom
SEED = random.Random.seed
PROCESS_ID = os.getpid


class EqualSources:
    """The sources that this rank's script draws from.

    Args:
        effects: What the ranks do once.
        seed: Of the stream of entropy.
    """

    def __init__(self, effects: Effects, seed: int) -> None:
        self._effects = effects
        self._key = hashlib.blake2b(seed.to_bytes(16, signed=False)).digest()
        self._drawn = 0

    def install(self) -> None:
        """Replace the sources until this process ends."""
        replaced: list[tuple[Any, str, Any]] = [
            (os, "urandom", self.draw),
            (random.Random, "seed", self._make_seed()),
            (random, "seed", self._seed_of(random.seed, random._inst)),
            (uuid, "uuid1", self._make_uuid1(uuid.uuid1)),
            (os, "getpid", self._shared(os.getpid, "the process id")),
            (os, "getppid", self._shared(os.getppid, "the process id")),
            (os, "kill", self._kill(os.kill)),
            (socket, "gethostname", self._shared(socket.gethostname, "the name of the host")),
            (platform, "node", self._shared(platform.node, "the name of the host")),
        ]
        for name in CLOCKS:
            replaced += [(time, each, self._shared(vars(time)[each], "the clock")) for each in (name, f"{name}_ns")]
        replaced += [(time, name, self._from_now(vars(time)[name], place)) for name, place in FROM_NOW.items()]
        replace_everywhere(replaced)
        for owner, name in MOMENTS:
            replace_in_type(owner, name, classmethod(self._moment_of(vars(owner)[name], owner)))

    # -- entropy

    def draw(self, size: int, /) -> bytes:
        """Return so many bytes: of the stream that is equal on all ranks, or of the system."""
        if not self._is_shared_entropy(sys._getframe(1)):
            return SYSTEM_ENTROPY(size)
        return self._draw_equal(size)

    def _draw_equal(self, size: int) -> bytes:
        self._effects.require_all()
        self._drawn += 1
        return hashlib.shake_256(self._key + self._drawn.to_bytes(8)).digest(size)

    def _is_shared_entropy(self, frame: Any) -> bool:
        if not self._effects.is_active or not self._effects.can_meet:
            return False
        while frame is not None and find_package(frame) in BETWEEN:
            frame = frame.f_back
        return (frame is None or find_package(frame) not in OWN_ENTROPY) and self._effects.is_of_script(frame)

    def _make_seed(self) -> Callable[..., None]:
        """Return `random.Random.seed`, which draws from the stream without a seed."""

        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            if a is None and self._is_shared_entropy(sys._getframe(1)):
                a = int.from_bytes(self._draw_equal(32))
            SEED(generator, a, version)

        return seed

    def _seed_of(self, _function: Any, generator: random.Random) -> Callable[..., None]:
        """Return `random.seed`, which notes the seed."""

        def seed(a: Any = None, version: int = 2) -> None:
            if a is not None:
                self.note(a, "the seed of random.seed")
            elif self._is_shared_entropy(sys._getframe(1)):
                a = int.from_bytes(self._draw_equal(32))
            SEED(generator, a, version)

        return seed

    def _make_uuid1(self, function: Callable[..., uuid.UUID]) -> Callable[..., uuid.UUID]:
        def uuid1(node: int | None = None, clock_seq: int | None = None) -> uuid.UUID:
            if not self._effects.is_active or not self._effects.can_meet:
                return function(node, clock_seq)
            made = self._effects.once("uuid1", lambda: str(function(node, clock_seq)))
            return uuid.UUID(made)

        return uuid1

    # -- seeds

    def note(self, value: Any, what: str) -> None:
        """Note a seed that must be equal on all ranks. A generator, which shows its address, is none."""
        if f"{id(value):x}" in repr(value).lower():
            return
        if self._effects.is_active and self._effects.can_meet and self._effects.is_of_script(sys._getframe(1)):
            self._effects.ranks.note(value if isinstance(value, int | float | str | bytes) else repr(value), what)

    def watch_seeds(self, owner: Any, name: str, what: str) -> None:
        """Note the first argument of a function that seeds a generator; without one, rank 0 draws a seed for all."""
        function = vars(owner)[name]

        def seed(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(given, SupportsIndex | Sized | float):  # not a generator, which has its state already
                self.note(given, what)
            return function(*args, **kwargs)

        seed.__name__ = name
        replace_everywhere([(owner, name, seed)])

    def watch_numpy(self, module: Any) -> None:
        """Note the seeds of `numpy.random`."""
        for name in ("seed", "default_rng"):
            self.watch_seeds(module, name, f"the seed of numpy.random.{name}")

    def _draw_seed(self) -> int:
        shared = self._is_shared_entropy(sys._getframe(1))
        return int.from_bytes(self._draw_equal(8) if shared else SYSTEM_ENTROPY(8)) >> 1

    def watch_torch(self, module: Any) -> None:
        """Note the seeds of PyTorch, and let `torch.seed()` draw the same on all ranks."""
        self.watch_seeds(module, "manual_seed", "the seed of torch.manual_seed")
        generator = module._C.Generator
        manual_seed = generator.manual_seed

        def seed_all() -> int:
            value = self._draw_seed()
            module.manual_seed(value)
            return value

        def seed(own: Any) -> int:
            value = self._draw_seed()
            manual_seed(own, value)
            return value

        def noted(own: Any, value: int) -> Any:
            self.note(value, "the seed of a torch.Generator")
            return manual_seed(own, value)

        replace_everywhere([(module, "seed", seed_all), (module.random, "seed", seed_all)])
        replace_in_type(generator, "seed", seed)
        replace_in_type(generator, "manual_seed", noted)

    # -- the process

    def _is_shared(self, frame: Any) -> bool:
        effects = self._effects
        return effects.is_active and effects.can_meet and effects.find_kind(frame) == "script"

    def _shared(self, function: Callable[[], Any], what: str) -> Callable[[], Any]:
        """Return a function that gives the script's own files what it returns on rank 0."""

        def shared() -> Any:
            if not self._is_shared(sys._getframe(1)):
                return function()
            return self._effects.agree(f"read {what}", function)

        shared.__name__ = shared.__qualname__ = function.__name__
        return shared

    def _from_now(self, function: Callable[..., Any], place: int) -> Callable[..., Any]:
        """Return a function of `time` that takes rank 0's present time where the script gives none."""
        now, local = time.time, time.localtime

        def from_now(*args: Any) -> Any:
            if len(args) > place or not self._is_shared(sys._getframe(1)):
                return function(*args)
            moment: Any = self._effects.agree("read the clock", now)
            if function.__name__ in ("asctime", "strftime"):
                moment = local(moment)
            return function(*args, moment)

        return from_now

    def _moment_of(self, method: Any, owner: type) -> Callable[..., Any]:
        """Return a constructor of `datetime` that takes rank 0's present time where the script's own files call it."""
        now = time.time

        def moment(cls: Any, tz: Any = None) -> Any:
            given = () if tz is None else (tz,)
            if not self._is_shared(sys._getframe(1)):
                return method.__get__(None, cls)(*given)
            seconds = self._effects.agree("read the clock", now)
            if method.__name__ == "utcnow":
                return cls.fromtimestamp(seconds, datetime.UTC).replace(tzinfo=None)
            return cls.fromtimestamp(seconds, *given)

        del owner
        return moment

    def _kill(self, function: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return `os.kill`, for which the process id that the script knows is this process's own."""

        def kill(process_id: int, number: int, /) -> None:
            if self._is_shared(sys._getframe(1)) and process_id == self._effects.agree(
                "read the process id", PROCESS_ID
            ):
                process_id = PROCESS_ID()
            function(process_id, number)

        return kill


def find_package(frame: FrameType) -> str:
    """Return the package whose code a frame runs, or this module's name for its own code."""
    name: str = frame.f_globals.get("__name__", "")
    return name if name == __name__ else name.partition(".")[0]


def replace_in_type(owner: type, name: str, value: Any) -> None:
    """Replace a method of a class that is written in C, which Python itself does not let change."""
    with contextlib.suppress(TypeError):
        setattr(owner, name, value)
        return
    methods = next(each for each in gc.get_referents(owner.__dict__) if isinstance(each, dict))
    methods[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))
