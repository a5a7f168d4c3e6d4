"""What a script in the logical view changes outside its process happens once: on rank 0.

Every rank runs the whole script. Note [effects]: a change of a file, a process that the script starts, and a read of
the terminal are *effects*. All ranks meet before an effect, so that no rank still reads what it changes. Rank 0 alone
causes it, and the others receive what it returned, or raise the same exception. So an effect is over when the script
goes on, on every rank.

An effect belongs to the script if the innermost file of code on the stack that is no library is the script's: its own
calls, and those of libraries that it calls. What Rankless does beneath such a call is not an effect, nor what other
threads and child processes do. Those cannot meet other ranks, because nothing orders them.

Nothing here imports torch: a script may write files before it does. The first effect joins the other ranks.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

import msgspec

from rankless.context.exception_serialization import RaisedError, describe_error, make_same_error
from rankless.records.encoding import encode_msgpack
from rankless.user_code import PACKAGE_FOLDER, is_library, is_standard, script_line

TRANSPARENT = tuple(
    os.path.join(PACKAGE_FOLDER, *parts)
    for parts in (
        ("plain_script", ""),
        ("runtime", "hooks", ""),
        ("runtime", "worker.py"),
        ("runtime", "user_program.py"),
    )
)
"""Rankless's code that runs the script, or stands between it and the functions of libraries that it replaces."""

READERS = "torch.utils.data._utils.worker"
"""The module that knows whether a process reads for a `DataLoader`."""


class EffectRanks(Protocol):
    """The ranks of a run, as effects need them."""

    def check(self, where: str) -> None:
        """Raise `RanksDiverged` if another rank is at a different call. No rank waits."""
        ...

    def meet(self, where: str) -> None:
        """Check, and return when every rank has made this call."""
        ...

    def share(self, data: bytes) -> bytes:
        """Return the bytes of rank 0 on every rank."""
        ...

    def note(self, value: object, what: str) -> None:
        """Note a value that must be equal on all ranks, for the next check."""
        ...

    def finish(self) -> None:
        """Compare no more: the ranks have reached the end of the script, and meet in what it has left for it."""
        ...


class EffectOutcome(msgspec.Struct, frozen=True):
    """What rank 0 shares of an effect: what it returned, or its error."""

    value: Any = None
    error: RaisedError | None = None


class EffectWhileReading(BaseException):
    """A data set has an effect while each rank reads other samples. No `except` of the script should take it."""


class Effects:
    """Decides which calls of this process are effects of the script, and causes them once.

    Args:
        rank: The rank of this process.
        join: Joins the other ranks. Called at the first effect.
    """

    def __init__(self, rank: int, join: Callable[[], EffectRanks]) -> None:
        self.rank = rank
        self._join = join
        self._ranks: EffectRanks | None = None
        self._state = threading.local()
        self._main_thread = threading.get_ident()
        self._is_over = False
        self._kinds: dict[str, str] = {}
        self.exempt: list[str] = []
        """Folders of libraries whose own doings are no effects, because rank 0 alone makes them work."""
        self.after_meeting: list[Callable[[], None]] = []
        """Called whenever all ranks have met."""
        self._is_child = False
        os.register_at_fork(after_in_child=self._become_child)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, whose effects happen."""
        return self.rank == 0

    @property
    def is_active(self) -> bool:
        """Whether this thread runs the script, and not an effect already."""
        if self._is_over or getattr(self._state, "is_alone", False):
            return False
        return not self._is_child or getattr(sys.modules.get(READERS), "_worker_info", None) is None

    @property
    def can_meet(self) -> bool:
        """Whether this thread can meet other ranks."""
        return threading.get_ident() == self._main_thread and not self._is_child

    @property
    def ranks(self) -> EffectRanks:
        """The ranks, which the first call joins."""
        if self._ranks is None:
            with self.alone():
                self._ranks = self._join()
        return self._ranks

    def finish(self) -> None:
        """Compare no more calls: the script has ended, but may have effects in its callbacks of the end."""
        if self._ranks is not None:
            self._ranks.finish()

    def end(self) -> None:
        """Leave everything to the process itself from now on: its script has failed."""
        self._is_over = True

    def _become_child(self) -> None:
        """Meet no other rank: this is a process that the script, or a `DataLoader`, has forked."""
        self._is_child = True

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within the context, what this thread does is no effect: it happens in this process, and waits for none."""
        before = getattr(self._state, "is_alone", False)
        self._state.is_alone = True
        try:
            yield
        finally:
            self._state.is_alone = before

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Within the context, ranks run different code of the script. An effect raises `EffectWhileReading`."""
        self._state.is_refused = True
        try:
            yield
        finally:
            self._state.is_refused = False

    def require_all(self) -> None:
        """Raise `EffectWhileReading` if the other ranks do not make the same calls now."""
        if getattr(self._state, "is_refused", False):
            raise EffectWhileReading

    def is_of_script(self, frame: FrameType | None) -> bool:
        """Return whether the script, or a library that it calls, makes a call from `frame`."""
        while frame is not None:
            kind = self.find_kind(frame)
            if kind in ("script", "rankless"):
                return kind == "script"
            frame = frame.f_back
        return True  # callbacks of the interpreter's end

    def is_of_library(self) -> bool:
        """Return whether an installed library, and not the script, makes the present call of Python's functions."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and self.find_kind(frame) == "standard":
            frame = frame.f_back
        return frame is not None and self.find_kind(frame) == "library"

    def find_kind(self, frame: FrameType) -> str:
        """Return whose code a frame runs: "script", "library", "standard" for Python's own, "rankless" for none's."""
        file = frame.f_code.co_filename
        kind = self._kinds.get(file)
        if kind is None:
            if file.startswith((PACKAGE_FOLDER, *self.exempt)):
                kind = "standard" if file.startswith(TRANSPARENT) else "rankless"
            elif is_standard(file):
                kind = "standard"
            else:
                kind = "library" if is_library(file) else "script"
            self._kinds[file] = kind
        return kind

    def describe(self, what: str) -> str:
        """Return the text by which ranks compare an effect: what it is, and the line of the script."""
        line = script_line(sys._getframe(1))
        return f"{what} ({line})" if line else what

    def meet(self, what: str) -> None:
        """Return when all ranks are here. Does nothing in a thread that cannot meet others."""
        if self.can_meet:
            self.require_all()
            with self.alone():
                self.ranks.meet(self.describe(what))
            for call in self.after_meeting:
                call()

    def once(self, what: str, act: Callable[[], Any]) -> Any:
        """Let rank 0 act, and return on every rank what it returned: None, a number, text, bytes, or a list of these.

        Raises:
            RanksDiverged: Another rank does something else.
            Exception: On all ranks, what `act` raised on rank 0.
        """
        if not self.can_meet:
            if not self.is_first:
                return None
            with self.alone():
                return act()
        self.meet(what)
        return self.share(act)

    def agree(self, what: str, read: Callable[[], Any]) -> Any:
        """Return on every rank what rank 0 reads. Rank 0 does not wait for the others."""
        self.require_all()
        with self.alone():
            self.ranks.check(self.describe(what))
        return self.share(read)

    def share(self, act: Callable[[], Any]) -> Any:
        """Let rank 0 act, and return on every rank what it returned. The ranks have met."""
        with self.alone():
            if not self.is_first:
                outcome = msgspec.msgpack.decode(self.ranks.share(b""), type=EffectOutcome)
                if outcome.error is not None:
                    raise make_same_error(outcome.error, rank=0)
                return outcome.value
            outcome = EffectOutcome(error=describe_error(RuntimeError("rank 0 was interrupted")))
            try:
                value = act()
                outcome = EffectOutcome(value=value)
            except Exception as error:
                outcome = EffectOutcome(error=describe_error(error))
                raise
            finally:
                self.ranks.share(encode_msgpack(outcome))
            return value

    def finish_together(self, work: Callable[[], Any]) -> Any:
        """Return what work on all ranks returns here, once rank 0's is done. Raise its error, or else this rank's."""
        errors: list[Exception] = []
        result = None
        try:
            with self.alone():
                result = work()
        except Exception as error:
            errors.append(error)

        def raise_error() -> None:
            if errors:
                raise errors[0]

        if self.can_meet:
            self.share(raise_error)
        raise_error()
        return result


def replace_everywhere(replaced: list[tuple[Any, str, Any]]) -> None:
    """Replace functions of libraries until this process ends, also where a module has imported one by its name.

    Args:
        replaced: A module or class, the name of its function, and the new one.
    """
    new = {id(vars(owner)[name]): (vars(owner)[name], function) for owner, name, function in replaced}
    for owner, name, function in replaced:
        setattr(owner, name, function)
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or module_name.partition(".")[0] in ("rankless", "posix", "_io", "torch"):
            continue
        for name, value in list(names.items()):
            found = new.get(id(value))
            if found is not None and found[0] is value:
                names[name] = found[1]


def take_whole_values(values: Any) -> Any:
    """Return the arguments of a call with whole tensors in place of logical ones. Collective if there are any."""
    if isinstance(values, dict):
        return {key: take_whole_values(value) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(map(take_whole_values, values))
    tensors: Any = sys.modules.get("rankless.logical_view.tensor")  # nothing here imports torch
    if tensors is not None and isinstance(values, tensors.CallsWithWholes):
        return values.partition.gather()
    return values.whole().detach() if tensors is not None and isinstance(values, tensors.DividedTensor) else values
