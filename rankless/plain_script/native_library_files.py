"""Files that libraries write in C, C++ or Rust, which never call Python's `open`.

Note [library files]: two tables name the functions that take the path of a file to write. A *single call* writes a file
and closes it: rank 0 alone makes it, and the others receive what it returned. A function that *opens* a file returns an
object that writes until somebody closes it. So every rank calls it, and the others open a copy of the file in a folder
of their own: what the object returns, raises and reads back is one process's. The copy counts as a private file (see
Note [files]) as long as this process has it open.

A library that is in no table writes on every rank. If it keeps its file open, a notice names the file.
"""

import asyncio
import contextlib
import fcntl
import fnmatch
import functools
import itertools
import mmap
import os
import shutil
import stat
import sys
import tempfile
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from rankless.plain_script.effects_on_first_rank import Effects, replace_everywhere, take_whole_values
from rankless.plain_script.file_effects import FileEffects
from rankless.plain_script.substitute_files import FSTAT, OS_OPEN, OpenFile

LISTDIR, STAT = os.listdir, os.stat

PATHS = (
    "filename", "file", "path", "where", "dest", "output_file", "base_dir", "root_path", "f", "fname", "name",
    "database", "sink", "source", "folder",
)  # fmt: skip
"""The names that libraries give to the argument with the path."""
SINGLE_CALLS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "torch": (
        ("profiler.profiler._KinetoProfile", "export_chrome_trace", 1),
        ("autograd.profiler.profile", "export_chrome_trace", 1),
    ),
    "cv2": (("", "imwrite*", 0),),
    "soundfile": (("", "write", 0),),
    "pyarrow.parquet": (("", "write_table", 1), ("", "write_metadata", 1), ("", "write_to_dataset", 1)),
    "pyarrow.feather": (("", "write_feather", 1),),
    "pyarrow.csv": (("", "write_csv", 1),),
    "pyarrow.orc": (("", "write_table", 1),),
    "pyarrow.dataset": (("", "write_dataset", 1),),
    "polars": (("DataFrame", "write_[!de]*", 1), ("LazyFrame", "sink_[!d]*", 1)),
    "lightgbm": (("Booster", "save_model", 1), ("Dataset", "save_binary", 1)),
    "xgboost": (("Booster", "save_model", 1),),
    "tokenizers": (("Tokenizer", "save", 1), ("models.Model", "save", 1)),
    "duckdb": (("DuckDBPyRelation", "write_*", 1), ("DuckDBPyRelation", "to_[cp]*", 1)),
}
"""By module: the class or "", the functions, and the place of the path among their arguments."""


class Opener(NamedTuple):
    """A function that opens a file.

    Args:
        owner: Its class, or "" for a function of the module.
        name: Its name.
        place: The place of the path among its arguments.
        mode: The name of the argument that decides whether it writes, or "" if it always does.
        mode_place: The place of this argument.
        default: The argument's default.
        reading: The values with which it only reads.
    """

    owner: str
    name: str
    place: int = 0
    mode: str = ""
    mode_place: int = 1
    default: Any = "w"
    reading: tuple[Any, ...] = ("r", "rb")


OPENERS: dict[str, tuple[Opener, ...]] = {
    "torch": (
        Opener("_C", "PyTorchFileWriter"),  # torch.package and torch.export
        Opener("", "from_file", 0, "shared", 1, False, (False, None)),
    ),
    "sqlite3": (Opener("", "connect"),),
    "h5py": (Opener("File", "__init__", 1, "mode", 2, "r"),),
    "tables": (Opener("File", "__init__", 1, "mode", 2, "r"),),
    "netCDF4": (Opener("Dataset", "__init__", 1, "mode", 2, "r"),),
    "lmdb": (
        Opener("", "open", 0, "readonly", 99, False, (True,)),
        Opener("", "Environment", 0, "readonly", 99, False, (True,)),
    ),
    "duckdb": (Opener("", "connect", 0, "read_only", 1, False, (True,)),),
    "cv2": (Opener("VideoWriter", "__init__", 1), Opener("VideoWriter", "open", 1)),
    "soundfile": (Opener("SoundFile", "__init__", 1, "mode", 2, "r"),),
    "pyarrow": (
        Opener("", "OSFile", 0, "mode", 1, "r"),
        Opener("", "memory_map", 0, "mode", 1, "r"),
        Opener("", "create_memory_map"),
        Opener("", "output_stream"),
    ),
    "pyarrow.parquet": (Opener("ParquetWriter", "__init__", 1),),
    "pyarrow.csv": (Opener("", "CSVWriter"),),
    "pyarrow.orc": (Opener("ORCWriter", "__init__", 1),),
    "pyarrow.ipc": (
        Opener("RecordBatchFileWriter", "__init__", 1),
        Opener("RecordBatchStreamWriter", "__init__", 1),
    ),
}
CLOSING = ("close", "release", "write_end_of_file", "__exit__")
"""Methods that may close a file."""
LOOK_SECONDS = 1.0
"""How often a rank looks for files that an unknown library keeps open."""
NUMBERS = itertools.count(1)


class HeldFile(OpenFile):
    """A file, or a folder of files, that a library has open to write.

    Args:
        path: Where this rank has it.
        discard: Called when nothing in this process can use it any more.
    """

    def __init__(self, path: str, discard: Callable[[], None]) -> None:
        self._path = path
        self.descriptor = -next(NUMBERS)  # the library has it
        self.keeps_data = True
        self._identities: set[tuple[int, int]] = set()
        weakref.finalize(self, discard)

    def note_identities(self) -> None:
        """Note which files these are, once they exist. A file that is renamed stays the same."""
        with contextlib.suppress(OSError):
            self._identities.add(identify(STAT(self._path)))
            self._identities.update(identify(STAT(os.path.join(self._path, name))) for name in LISTDIR(self._path))

    @property
    def is_open(self) -> bool:
        """Whether this process has it open."""
        return any(identify(status) in self._identities for _, status in list_written())

    @property
    def path(self) -> str:
        """A path at which it can be opened once more."""
        return self._path


def do_nothing() -> None:
    """Keep what another owns."""


def identify(status: os.stat_result) -> tuple[int, int]:
    """Return what tells a file from all others, by whatever name."""
    return status.st_dev, status.st_ino


def list_written() -> Iterator[tuple[int, os.stat_result]]:
    """Yield the descriptors with which this process can write to files, each with the status of its file."""
    for name in LISTDIR("/dev/fd"):
        with contextlib.suppress(OSError):  # the one that listed the folder
            status = FSTAT(int(name))
            if stat.S_ISREG(status.st_mode) and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                yield int(name), status


class LibraryFiles:
    """The files that this rank's script writes with libraries.

    Args:
        effects: What the ranks do once.
        files: The files that the script changes.
        notify: Tells the user.
    """

    def __init__(self, effects: Effects, files: FileEffects, notify: Callable[[str], None]) -> None:
        self._effects = effects
        self._files = files
        self._notify = notify
        self._looked = 0.0
        self._known = {identify(status) for _, status in list_written()}
        """Files that are open and none of a library's, or that the user has been told of."""
        names = {**SINGLE_CALLS, **OPENERS}
        self.patches: dict[str, Callable[[Any], None]] = {name: functools.partial(self._patch, name) for name in names}
        self.patches["zarr.core.sync"] = self._patch_zarr
        """By the name of a module: what to do when the script has imported it."""
        if not effects.is_first:
            effects.after_meeting.append(self._look_for_unknown)

    def install(self) -> None:
        """Let the mapping of a file count as an open file, until this process ends."""
        hold = self._hold

        class mmap_that_holds(mmap.mmap):
            __doc__ = mmap.mmap.__doc__

            def __new__(cls, fileno: int, *args: Any, **kwargs: Any) -> Any:
                made = super().__new__(cls, fileno, *args, **kwargs)
                hold(fileno, made)
                return made

        mmap_that_holds.__name__ = mmap_that_holds.__qualname__ = "mmap"
        replace_everywhere([(mmap, "mmap", mmap_that_holds)])

    def _hold(self, descriptor: int, holder: Any) -> None:
        """Let a file of the script count as open until an object that maps it is gone."""
        path = self._files.find_open(descriptor) if self._effects.is_active and descriptor >= 0 else None
        if path is not None:
            copy = os.dup(descriptor)
            weakref.finalize(holder, os.close, copy)
            self._files.register(path, OpenFile(copy, keeps_data=True))

    def _patch(self, name: str, module: Any) -> None:
        """Replace the functions of a module that are in the tables."""
        replaced = []
        for owner_name, pattern, place in SINGLE_CALLS.get(name, ()):
            owner = attrgetter(owner_name)(module) if owner_name else module
            for found in fnmatch.filter(vars(owner), pattern):
                replaced.append((owner, found, self._calling(vars(owner)[found], place)))
        for opener in OPENERS.get(name, ()):
            owner = attrgetter(opener.owner)(module) if opener.owner else module
            make = vars(owner)[opener.name]
            made = owner if opener.name == "__init__" else make
            if isinstance(made, type):
                with contextlib.suppress(TypeError):  # nothing inherits from it, and its methods stay
                    if made is make:
                        made = make = type(make.__name__, (make,), {})
                    for found in filter(functools.partial(hasattr, made), CLOSING):
                        setattr(made, found, self._closing(getattr(made, found)))
            replaced.append((owner, opener.name, self._opening(make, opener)))
        replace_everywhere(replaced)

    def _find_path(self, given: Any) -> str | None:
        """Return the path that an argument names, if the script writes to it."""
        if not self._effects.is_active or (isinstance(given, str) and given.startswith(":")):  # ":memory:"
            return None
        if isinstance(given, str) and given.startswith("file:"):  # SQLite's addresses
            given = urllib.parse.unquote(urllib.parse.urlsplit(given).path)
        path = self._files.find_path(given)
        return path if self._files.is_shared(path) else None

    def _calling(self, function: Callable[..., Any], place: int) -> Callable[..., Any]:
        """Return a function that rank 0 alone calls if it writes a file."""

        @functools.wraps(function)
        def call_once(*args: Any, **kwargs: Any) -> Any:
            path = self._find_path(take_argument(args, kwargs, place)[0])
            if path is None or kwargs.get("lazy"):  # a lazy one of polars writes nothing yet
                return function(*args, **kwargs)
            args, kwargs = take_whole_values(args), take_whole_values(kwargs)

            def act() -> list[Any]:
                result = function(*args, **kwargs)
                return [True, None] if args and result is args[0] else [False, result]

            returns_self, result = self._effects.once(f"{function.__qualname__} of {self._files.describe(path)}", act)
            self._files.note_change(path, is_tree=True)
            return args[0] if returns_self else result

        return call_once

    def _opening(self, make: Callable[..., Any], opener: Opener) -> Callable[..., Any]:
        """Return a function that opens a file, and on other ranks than 0 a copy of it."""

        @functools.wraps(make)
        def open_once(*args: Any, **kwargs: Any) -> Any:
            given, put = take_argument(args, kwargs, opener.place)
            path = self._find_path(given)
            if path is None:
                return make(*args, **kwargs)
            mode = take_argument(args, kwargs, opener.mode_place, (opener.mode,), opener.default)[0]
            if opener.mode and mode in opener.reading:
                with self._files.find_source(path, given) as source:
                    return make(*args, **kwargs) if source is None else put(make, source)
            address = given if isinstance(given, str) and given.startswith("file:") else ""
            if "mode=ro" in address or "mode=memory" in address:
                return make(*args, **kwargs)
            what = f"{make.__qualname__} of {self._files.describe(path)}"
            self._effects.meet(what)
            is_new = bool(opener.mode) and isinstance(mode, str) and mode[:1] in ("w", "x")
            with self._effects.alone():
                target, discard = self._find_target(path, copies=not is_new)
            self._effects.meet(what)
            held = HeldFile(target, discard)
            new = f"file:{target}?{address.partition('?')[2]}" if address else target
            result = self._effects.finish_together(lambda: put(make, given if target == path else new))
            if hasattr(result, "untyped_storage"):  # the file of a tensor is mapped, and not open
                weakref.finalize(result.untyped_storage(), os.close, OS_OPEN(target, os.O_RDWR))
            held.note_identities()
            self._files.register(path, held)
            return result

        return open_once

    def _closing(self, close: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method after which the ranks meet if it has closed a file: C++ may read it next."""

        @functools.wraps(close)
        def close_together(*args: Any, **kwargs: Any) -> Any:
            result = close(*args, **kwargs)
            if sys._getframe(1).f_code.co_name != "__del__":  # a collection of garbage is no call of the script
                self._files.finish()
            return result

        return close_together

    def _find_target(self, path: str, *, copies: bool) -> tuple[str, Callable[[], None]]:
        """Return where this rank opens a file, and what removes it. All ranks call it.

        Args:
            path: The file.
            copies: Whether the file may be read.
        """
        with self._files.find_source(path, path, may_lack=True) as source:
            known = self._files.find_opened(path)
            if self._effects.is_first or isinstance(known, HeldFile):
                return path if self._effects.is_first or known is None else known.path, do_nothing
            folder = tempfile.mkdtemp()
            target = os.path.join(folder, os.path.basename(path))
            if copies and os.path.isdir(path):
                shutil.copytree(path, target)
            elif copies and os.path.exists(source or path):
                shutil.copyfile(source or path, target)

        owner = os.getpid()

        def discard() -> None:
            with self._effects.alone():
                if os.getpid() == owner:  # a child forgets the file, too
                    shutil.rmtree(folder, ignore_errors=True)

        return target, discard

    def _patch_zarr(self, module: Any) -> None:
        """Let zarr write in the thread of the script, where the ranks meet, instead of in threads of its own."""
        sync, to_thread = module.sync, asyncio.to_thread
        loop = asyncio.new_event_loop()

        async def to_own_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            here = asyncio.get_running_loop() is loop
            return function(*args, **kwargs) if here else await to_thread(function, *args, **kwargs)

        @functools.wraps(sync)
        def sync_once(work: Any, *args: Any, **kwargs: Any) -> Any:
            if not (self._effects.is_active and self._effects.can_meet) or asyncio._get_running_loop() is not None:
                return sync(work, *args, **kwargs)
            if "get" not in getattr(work, "__name__", ""):
                return loop.run_until_complete(work)
            self._files.finish()
            return sync(work, *args, **kwargs)

        replace_everywhere([(module, "sync", sync_once), (asyncio, "to_thread", to_own_thread)])

    def _look_for_unknown(self) -> None:
        """Tell the user of files that a library has open to write on this rank, too."""
        now = time.monotonic()
        if now < self._looked + LOOK_SECONDS:
            return
        self._looked = now
        for descriptor, status in list_written():
            if not status.st_nlink or identify(status) in self._known:
                continue
            self._known.add(identify(status))
            path = os.readlink(f"/dev/fd/{descriptor}")
            if not self._files.is_ignored(path) and not self._files.is_own(path):
                self._notify(
                    f"every rank writes {path}, by a library that Rankless does not know: write it after the training, "
                    "or with a library that docs/explanation/logical-view.md names"
                )


def take_argument(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    place: int,
    names: tuple[str, ...] = PATHS,
    default: Any = None,
) -> tuple[Any, Callable[[Callable[..., Any], Any], Any]]:
    """Return an argument by its place or its name, and a function that makes the call with another one."""
    if place < len(args):
        return args[place], lambda make, new: make(*args[:place], new, *args[place + 1 :], **kwargs)
    name = next((each for each in names if each in kwargs), None)
    if name is None:
        return default, lambda make, _: make(*args, **kwargs)
    return kwargs[name], lambda make, new: make(*args, **{**kwargs, name: new})
