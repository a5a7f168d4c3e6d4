"""Changes of files by a script in the logical view: rank 0 makes them, and reads of the others see them.

Note [files]: opening a file to write, and each change of a folder's entries, is an effect (see Note [effects]): all
ranks have met before rank 0 makes it, and the others know that it is made. What a script then writes into an open file
goes to disk on rank 0 alone; the other ranks have a private file. A rank that reads a file which the script has closed
meets the others first, because rank 0 may not have closed it yet. One that is still open is read from the private
file. All other reads cost a look into two dictionaries.
"""

import builtins
import fcntl
import io
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

from rankless.plain_script.effects_on_first_rank import Effects, replace_everywhere
from rankless.plain_script.file_results_as_plain_values import (
    describe_result,
    describe_status,
    make_result,
    make_status,
    read_whole,
)
from rankless.plain_script.substitute_files import (
    FILE_MODES,
    FSTAT,
    IO_OPEN,
    NEW_FILE,
    OS_OPEN,
    OpenFile,
    open_hollow,
    open_new,
)

OPENING_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
UNNAMED = getattr(os, "O_TMPFILE", 0)
CHANGES: tuple[tuple[Any, str, tuple[int, ...]], ...] = (
    *((os, name, (0,)) for name in ("remove", "unlink", "mkdir", "makedirs", "rmdir", "removedirs", "mkfifo")),
    *((os, name, (0,)) for name in ("truncate", "chmod", "chown", "utime", "setxattr") if hasattr(os, name)),
    *((os, name, (0, 1)) for name in ("rename", "replace", "renames")),
    *((os, name, (1,)) for name in ("link", "symlink")),
    *((shutil, name, (1,)) for name in ("copyfile", "copymode", "copystat", "copy", "copy2", "copytree")),
    (shutil, "move", (0, 1)),
    (shutil, "rmtree", (0,)),
    (shutil, "make_archive", (0,)),
    (shutil, "unpack_archive", (1,)),
)
"""Functions that change files or folders, and the positions of the arguments that name what they change."""
TREES = ("rename", "replace", "renames", "move", "rmtree", "copytree", "unpack_archive", "make_archive")
"""Those that may change all that is in a folder."""
KEYWORDS = ("path", "src", "dst", "name", "file", "base_name", "extract_dir", "base_format")
STATUS = ("stat", "lstat", "access", "scandir", "listdir")


class FileEffects:
    """The files that this rank's script changes.

    Args:
        effects: What the ranks do once.
        ignored: Beginnings of paths that are nobody's effects: devices, caches of libraries, the run's own folder.
        seed: Of the names of temporary files in folders that the script names, the same on all ranks.
        has_hosts: Whether the ranks are on several hosts. Then they get from rank 0 what the script has changed.
    """

    def __init__(self, effects: Effects, ignored: Sequence[str], *, seed: int, has_hosts: bool) -> None:
        self._effects = effects
        self._seed = seed
        self._has_hosts = has_hosts
        self._start = os.getcwd()
        self._changed: set[str] = set()
        """What the script has changed, and the folders that this is in."""
        self._trees: set[str] = set()
        """Folders that it has changed with all that they contain."""
        self._ignored = tuple(ignored)
        self._own: set[str] = set()
        """Files and folders that `tempfile` has made for this rank alone."""
        self._opened: dict[str, list[OpenFile]] = {}
        """Those that the script may have open to write, by path."""
        self._unfinished: set[str] = set()
        """Files that the script has closed since the ranks last met."""
        self._readers: WeakValueDictionary[str, Any] = WeakValueDictionary()
        """The last file that was opened to read, by path."""
        effects.after_meeting.append(self._forget_finished)
        os.register_at_fork(before=self.finish)

    def install(self) -> None:
        """Replace Python's functions that change or read files, until this process ends."""
        replaced = [(owner, name, self._change_of(owner, name, places)) for owner, name, places in CHANGES]
        replaced += [(os, name, self._read_of(getattr(os, name))) for name in STATUS]
        replaced += [(os, "chdir", self._chdir_of(os.chdir))] if self._has_hosts else []
        replaced += [(fcntl, name, self._lock_of(getattr(fcntl, name))) for name in ("flock", "lockf")]
        replaced += [(os, "fstat", self._read_descriptor)]
        replaced += [(builtins, "open", self.open), (io, "open", self.open), (os, "open", self.open_descriptor)]
        replaced += [
            (tempfile, name, self._own_of(getattr(tempfile, name), place))
            for name, place in (("_mkstemp_inner", 0), ("mkdtemp", 2))
        ]
        unlink = next(new for _, name, new in replaced if name == "unlink")
        tempfile._TemporaryFileCloser.close.__defaults__ = (unlink,)  # type: ignore[attr-defined]  # bound at import
        replace_everywhere(replaced)

    def find_path(self, given: Any, folder: int | None = None) -> str | None:
        """Return the absolute path that a call names; None for a descriptor, or for what is no path."""
        try:
            name = os.fsdecode(given)
            if folder is not None and not os.path.isabs(name):
                name = os.path.join(os.readlink(f"/dev/fd/{folder}"), name)
            return os.path.abspath(name)
        except (TypeError, ValueError, OSError):
            return None

    def is_shared(self, path: str | None) -> bool:
        """Return whether the script changes a path by the present call, and not this process alone."""
        if path is None or not self._effects.is_active or self.is_ignored(path) or self.is_own(path):
            return False
        return self._effects.is_of_script(sys._getframe(1))

    def is_own(self, path: str) -> bool:
        """Return whether a path is, or lies in, what `tempfile` has made for this rank."""
        return any(path == own or path.startswith(own + os.sep) for own in self._own)

    def describe(self, path: str) -> str:
        """Return the name of a path that ranks compare. Hosts may start the script in different folders."""
        if self.is_own(path):
            return "a temporary file"
        if self._effects.is_of_library():  # it may name a file by its process or its clock; rank 0's name counts
            path = os.path.dirname(path)
        return os.path.relpath(path, self._start) if f"{path}{os.sep}".startswith(self._start + os.sep) else path

    def is_ignored(self, path: str) -> bool:
        """Return whether changes of a path are nobody's effects."""
        return path.startswith(self._ignored) or path.endswith(".pyc") or f"{os.sep}__pycache__" in path

    # -- opening

    def open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """Open a file, as Python's `open` does."""

        def act(opener: Any = opener) -> Any:
            return IO_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)

        if opener is not None or not self._effects.is_active:
            return act()
        path = self.find_path(file)
        if not isinstance(mode, str) or not set(mode) & set("wax+"):
            with self.find_source(path, file) as source:
                found = act() if source is None else act(lambda _, flags: OS_OPEN(source, flags))
            if path is not None:
                self._readers[path] = found
            return found
        if not self.is_shared(path):
            return act()
        assert path is not None
        kept = "+" in mode

        def make_private(opener: Callable[[str, int], int]) -> tuple[Any, OpenFile]:
            if not kept:
                return open_hollow(file, mode, (encoding, errors, newline), buffering, opener=opener)
            found = act(opener)
            return found, OpenFile(found.fileno(), keeps_data=True)

        flags = FILE_MODES[next((each for each in "wxa" if each in mode), "r")]
        return self._open_once(path, flags, kept, (act, make_private))

    def open_descriptor(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Open a file, as `os.open` does."""

        def act() -> int:
            return OS_OPEN(path, flags, mode, dir_fd=dir_fd)

        if not self._effects.is_active or (UNNAMED and flags & UNNAMED == UNNAMED):
            return act()
        where = self.find_path(path, dir_fd)
        if not flags & OPENING_TO_WRITE:
            with self.find_source(where, path) as source:
                return act() if source is None else OS_OPEN(source, flags)
        if not self.is_shared(where):
            return act()
        assert where is not None

        def make_private(opener: Callable[[str, int], int]) -> tuple[Any, OpenFile]:
            descriptor = opener("", flags)
            return descriptor, OpenFile(descriptor, keeps_data=True)

        found: int = self._open_once(where, flags, True, (act, make_private))
        return found

    def _open_once(self, path: str, flags: int, kept: bool, ways: tuple[Callable[[], Any], Callable[..., Any]]) -> Any:
        """Open a file to write: on rank 0 the script's, on the others a private one.

        Args:
            path: The file.
            flags: Those of `os.open`, of which appending and truncating matter.
            kept: Whether the private file keeps data.
            ways: How rank 0 opens it, and how the others do with an opener.
        """
        effects = self._effects
        known = self.find_opened(path)
        if known is None and path in self._unfinished:
            self.finish()
        reader = self._readers.get(path)
        if reader is not None and not reader.closed:
            kept = True  # it will read what is written
        if known is not None and kept:
            self._prepare_read(path)  # the private file gets the data that it lacks
        has_data = kept and not flags & (os.O_TRUNC | os.O_EXCL)
        private = self._make_private(path, has_data=has_data) if known is None else None
        made: list[Any] = []

        def act() -> int:
            made.append(ways[0]())
            descriptor = made[0] if isinstance(made[0], int) else made[0].fileno()
            return FSTAT(descriptor).st_size

        def opener(_: str, wanted: int) -> int:
            access = wanted & (os.O_ACCMODE | os.O_APPEND | os.O_TRUNC)
            return OS_OPEN(f"/dev/fd/{private}" if known is None else known.path, access)

        try:
            size = effects.once(f"open {self.describe(path)} to write", act)
            if effects.is_first:
                file = made[0]
                opened = OpenFile(file if isinstance(file, int) else file.fileno(), keeps_data=kept)
            else:
                if private is not None and size and not kept:
                    os.ftruncate(private, size)
                file, opened = ways[1](opener)
        finally:
            if private is not None:
                os.close(private)
        opened.keeps_data = kept if known is None else known.keeps_data
        if reader is not None and not reader.closed and not effects.is_first:
            follow(reader, opened)
        self.register(path, opened)
        return file

    def register(self, path: str, opened: OpenFile) -> None:
        """Note a file that is open to write."""
        for each, others in list(self._opened.items()):  # a closed file may have had the same descriptor
            others[:] = [old for old in others if old.descriptor != opened.descriptor]
            self.find_opened(each)
        self._opened.setdefault(path, []).append(opened)
        self.note_change(path)

    def _make_private(self, path: str, *, has_data: bool) -> int | None:
        """Return the descriptor of a new private file for a path; None on rank 0. With `has_data` it has its data."""
        with self.find_source(path, path, may_lack=True) if has_data else nullcontext() as source:
            if self._effects.is_first:
                return None
            return open_new(os.O_RDWR, content=(source or path) if has_data else None, size=0)

    # -- reading

    def find_opened(self, path: str) -> OpenFile | None:
        """Return a file that the script has open to write."""
        known = self._opened.get(path)
        if known is None:
            return None
        known[:] = [each for each in known if each.is_open]
        if not known:
            self._opened.pop(path, None)  # a thread may have done so
            self._unfinished.add(path)
            return None
        return known[0]

    def find_open(self, descriptor: int) -> str | None:
        """Return the path of a file that the script has open to write, by its descriptor."""
        return next((p for p, each in self._opened.items() if any(o.descriptor == descriptor for o in each)), None)

    def _prepare_read(self, path: str | None, *, content: bool = True) -> OpenFile | None:
        """Make what the script has written to a path readable. Return the file if it is open.

        Args:
            path: The file or folder.
            content: Whether the data are read, and not only the status.
        """
        if path is None or not (self._opened or self._unfinished) or not self._effects.can_meet:
            return None
        opened = self.find_opened(path)
        if opened is None:
            if path in self._unfinished or self._has_unfinished(path):
                self.finish()
            return None
        if content and not opened.keeps_data:
            data = self._effects.once(f"read {self.describe(path)}, which is open to write", opened.read_all)
            for each in self._opened[path]:
                if self._effects.is_first:
                    each.keeps_data = True
                else:
                    each.fill(data)
        return opened

    @contextmanager
    def find_source(self, path: str | None, given: Any, *, may_lack: bool = False) -> Iterator[str | None]:
        """Yield the path at which this rank reads what the script has written to a file; None for the file's own.

        Args:
            path: The file.
            given: Its name as the script gave it, for errors.
            may_lack: Whether it need not exist.
        """
        opened = self._prepare_read(path)
        if opened is not None or not self._is_distant(path):
            yield None if opened is None or self._effects.is_first else opened.path
            return
        assert path is not None

        def read() -> bytes:
            return b"" if may_lack and not os.path.isfile(path) else read_whole(IO_OPEN, given)

        data = self._effects.once(f"read {self.describe(path)}", read)
        if self._effects.is_first:
            yield None
            return
        with NEW_FILE() as file:
            file.write(data)
            file.flush()
            yield f"/dev/fd/{file.fileno()}"

    def note_change(self, path: str, *, is_tree: bool = False) -> None:
        """Note that the script changes a file by other means than Python's files, or what a folder contains."""
        self._changed.update((path, os.path.dirname(path)))
        if is_tree:
            self._trees.add(path)

    def _is_distant(self, path: str | None) -> bool:
        """Return whether ranks on other hosts than rank 0's must get something from it."""
        if not self._has_hosts or path is None or not self._effects.is_active or not self._effects.can_meet:
            return False
        is_changed = path in self._changed or any(path.startswith(each + os.sep) for each in self._trees)
        return is_changed and not self.is_own(path)

    def _has_unfinished(self, folder: str) -> bool:
        """Return whether files in a folder have been closed since the ranks last met."""
        for path in list(self._opened):
            if os.path.dirname(path) == folder:
                self.find_opened(path)
        return any(os.path.dirname(path) == folder for path in self._unfinished)

    def finish(self) -> None:
        """Let the ranks meet if rank 0 may not have closed a file that this rank has closed."""
        for path in list(self._opened):
            self.find_opened(path)
        if self._unfinished and self._effects.is_active:
            self._effects.meet("what the script has written")

    def _forget_finished(self) -> None:
        for path in list(self._opened):
            self.find_opened(path)
        self._unfinished.clear()

    def _read_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `os` that reads the status of a file or the entries of a folder."""
        name = function.__name__
        is_status = name in ("stat", "lstat")

        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int) or not (self._opened or self._unfinished or self._has_hosts):
                return function(path, *args, **kwargs)
            if not self._effects.is_active:
                return function(path, *args, **kwargs)
            where = self.find_path(path, kwargs.get("dir_fd"))
            opened = self._prepare_read(where, content=False)
            if opened is not None and is_status and not self._effects.is_first:
                with self._effects.alone():
                    return os.stat(opened.path)
            if opened is not None or not self._is_distant(where):
                return function(path, *args, **kwargs)
            assert where is not None
            shared = self._effects.once(
                f"{name} of {self.describe(where)}", lambda: describe_result(name, function(path, *args, **kwargs))
            )
            return make_result(name, shared, path)

        return read

    def _read_descriptor(self, descriptor: int) -> os.stat_result:
        """Return the status of a descriptor, as `os.fstat` does. A private file has no name, but the script's has."""
        status = FSTAT(descriptor)
        if status.st_nlink or self._effects.is_first or self.find_open(descriptor) is None:
            return status
        visible, others = describe_status(status)
        return make_status([[*visible[:3], 1, *visible[4:]], others])

    def _lock_of(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function that locks a file of the script on rank 0, for all ranks."""

        def lock(file: Any, *args: Any) -> None:
            path = self.find_open(file if isinstance(file, int) else file.fileno()) if self._effects.is_active else None
            if path is None:
                function(file, *args)
            else:
                self._effects.once(f"lock {self.describe(path)}", lambda: function(file, *args))

        return lock

    def _chdir_of(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return `os.chdir`, which can go to a folder that only rank 0's host has: the others make an empty one."""

        def chdir(path: Any) -> None:
            where = self.find_path(path)
            if not self._is_distant(where):
                function(path)
                return
            assert where is not None
            self._effects.once(f"chdir to {self.describe(where)}", lambda: function(path))
            if not self._effects.is_first:
                with self._effects.alone():
                    os.makedirs(where, exist_ok=True)
                function(where)

        return chdir

    # -- changes of folders

    def _change_of(self, owner: Any, name: str, places: tuple[int, ...]) -> Callable[..., Any]:
        """Return a function that changes what its arguments at some places name, once."""
        function = vars(owner)[name]

        def change(*args: Any, **kwargs: Any) -> Any:
            if not self._effects.is_active:
                return function(*args, **kwargs)
            given = [*args, *(kwargs[key] for key in KEYWORDS if key in kwargs)]
            named = [given[place] for place in places if place < len(given)]
            if name == "unpack_archive" and not named:
                named = [os.getcwd()]
            paths = [self.find_path(each, kwargs.get("dir_fd")) for each in named]
            if not any(map(self.is_shared, paths)):
                return function(*args, **kwargs)
            known = [path for path in paths if path is not None]
            text = f"{name} {' to '.join(map(self.describe, known))}"

            def act() -> Any:
                result = function(*args, **kwargs)
                return os.fspath(result) if isinstance(result, os.PathLike) else result

            result = self._effects.once(text, act)
            self._follow(name, known)
            return result

        change.__name__ = change.__qualname__ = name
        return change

    def _follow(self, name: str, paths: Sequence[str]) -> None:
        """Note what has changed, and let the private files follow a file that has been renamed or removed."""
        for path in paths:
            self.note_change(path, is_tree=name in TREES)
        if name in ("rename", "replace", "renames", "move") and len(paths) == 2:
            source, target = paths
            if self.is_own(source) and not self._effects.is_first:
                (shutil.rmtree if os.path.isdir(source) else os.remove)(source)
            self._opened.pop(target, None)
            for path in [each for each in self._opened if each == source or each.startswith(source + os.sep)]:
                self._opened[target + path[len(source) :]] = self._opened.pop(path)
        elif name in ("remove", "unlink", "rmtree"):
            (removed,) = paths[:1]
            for path in [each for each in self._opened if each == removed or each.startswith(removed + os.sep)]:
                del self._opened[path]

    # -- temporary files

    def _own_of(self, function: Callable[..., Any], place: int) -> Callable[..., Any]:
        """Return a function of `tempfile` whose files are this rank's, unless the script names their folder."""
        usual = os.path.abspath(tempfile.gettempdir())
        names = tempfile._RandomNameSequence()  # type: ignore[attr-defined]  # tempfile has no public way
        names._rng, names._rng_pid = random.Random(self._seed), os.getpid()

        def make(*args: Any, **kwargs: Any) -> Any:
            given = args[place] if place < len(args) else kwargs.get("dir")
            folder = usual if given is None else self.find_path(given)
            if folder != usual and self.is_shared(folder):
                before, tempfile._name_sequence = tempfile._name_sequence, names  # type: ignore[attr-defined]
                try:
                    return function(*args, **kwargs)
                finally:
                    tempfile._name_sequence = before  # type: ignore[attr-defined]
            with self._effects.alone():
                made = function(*args, **kwargs)
            self._own.add(os.path.abspath(os.fsdecode(made[1] if isinstance(made, tuple) else made)))
            return made

        return make


def follow(reader: Any, opened: OpenFile) -> None:
    """Let a file that reads the script's file read this rank's private one, from the same position."""
    descriptor = OS_OPEN(opened.path, os.O_RDONLY)
    try:
        os.lseek(descriptor, os.lseek(reader.fileno(), 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(descriptor, reader.fileno(), inheritable=False)
    finally:
        os.close(descriptor)
