"""`import horovod.torch` in a script is `rankless.compat.horovod.torch`: one module object under two names.

Note [three ways into a process]: a worker installs the finder itself. What a worker starts (spawn children, a command,
a Python below a shell) finds it through PYTHONPATH, whose first folder is `at_start`. Under other launchers, and in
plain Python, a `.pth` file does it, a distribution of its own (packages/rankless-horovod). See docs/decisions/0015.

Note [the same objects]: a finder at the end of `sys.meta_path`, an entry in `sys.modules` or a folder of imports would
execute modules twice, and `except HorovodInternalError` would miss the other one's.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

FOREIGN = "horovod"
OWN = "rankless.compat.horovod"
AT_START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "at_start")
"""A folder for PYTHONPATH: an interpreter that finds it there has the finder from its start."""


class ImportNames(MetaPathFinder):
    """Answers `horovod` and what is below it with our modules, unless a real Horovod is installed; no other name.

    `on_real` is told once, with its file, that a script takes a real one's part for PyTorch.
    """

    def __init__(self, on_real: Callable[[str], None] | None = None) -> None:
        self._on_real = on_real
        self._yields: bool | None = None
        self._asking = False

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Of our module of that name; None where the name is not ours to answer.

        Raises ModuleNotFoundError, which says what there is, for a part of Horovod that is not here.
        """
        if (fullname != FOREIGN and not fullname.startswith(FOREIGN + ".")) or self._asking:
            return None
        if self.is_to_yield():
            self._tell_of_real(fullname)
            return None
        own = OWN + fullname.removeprefix(FOREIGN)
        found = _found(own)
        if found is None:
            raise _missing(fullname)
        is_package = found.submodule_search_locations is not None
        spec = ModuleSpec(fullname, _SameModule(own), origin=found.origin, is_package=is_package)
        if is_package:
            spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def is_to_yield(self) -> bool:
        """Whether the names are somebody else's."""
        if self._yields is None:
            choice = importlib.import_module("rankless.config.environment").horovod_choice()
            self._yields = choice == "never" or (choice == "missing" and self.installed() is not None)
        return self._yields

    def installed(self) -> str | None:
        """Where a real Horovod is; a folder that happens to have the name is none."""
        self._asking = True
        try:
            spec = importlib.util.find_spec(FOREIGN) if FOREIGN not in sys.modules else None
        finally:
            self._asking = False
        return None if spec is None else spec.origin

    def _tell_of_real(self, fullname: str) -> None:
        file = getattr(sys.modules.get(FOREIGN), "__file__", None)
        if self._on_real is not None and fullname == FOREIGN + ".torch" and file is not None:
            tell, self._on_real = self._on_real, None
            tell(file)


class _SameModule(Loader):
    """Loads nothing anew: the module is the one of our own name."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._spec: ModuleSpec | None = None

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._own)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just put the foreign one in its place

    def get_code(self, _name: str) -> CodeType | None:
        """What `python -m` runs."""
        spec = _found(self._own)
        code = None if spec is None or spec.loader is None else spec.loader.get_code(self._own)  # type: ignore[attr-defined]  # a source file's has it
        return code if isinstance(code, CodeType) else None


def install(on_real: Callable[[str], None] | None = None) -> ImportNames:
    """Put the finder at the front of `sys.meta_path`, unless there is one."""
    for finder in sys.meta_path:
        if isinstance(finder, ImportNames):
            return finder
    finder = ImportNames(on_real)
    sys.meta_path.insert(0, finder)
    return finder


def installed_horovod() -> str | None:
    """The file of a real Horovod to which the names are left in this interpreter; None where they are ours."""
    finder = install()
    return finder.installed() if finder.is_to_yield() else None


def are_ours_so_far() -> bool:
    """Whether the names are ours by what this interpreter's path has before a script has run.

    Nothing is left behind: a fork of this process, with the script's folder on its path, may find otherwise.
    """
    finder = install()  # a finder outside `sys.meta_path` would be answered by the one that a `.pth` file puts there
    try:
        return not finder.is_to_yield()
    finally:
        sys.meta_path.remove(finder)


def _found(own: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(own)
    except ModuleNotFoundError:
        return None  # not even the package that it would be in


def _missing(fullname: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"No module named {fullname!r}: Rankless has Horovod's API for PyTorch alone (horovod.torch, horovod.common, "
        "horovod.runner); an installed Horovod would be taken instead, as docs/guides/from-horovod.md says",
        name=fullname,
    )
