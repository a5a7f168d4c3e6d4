"""Import aliases: an import of another system's package in a script imports a package of an extension.

It is one module under two names. Extensions declare the names (`config.extensions`). Nothing of such a package is
imported before a script imports its name.

Note [three ways into a process]: a worker installs the finder itself. A process that a worker starts (a spawn child, a
command, a Python below a shell) finds it through PYTHONPATH, whose first folder is `at_start`. Under other launchers,
and in plain Python, a `.pth` file installs it, which is a distribution of its own. See docs/decisions/0015.

Note [the same objects]: a finder at the end of `sys.meta_path`, an entry in `sys.modules` or a folder of imports would
execute modules twice. Then an `except` of a script would miss the errors of the other copy.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from rankless.config import environment
from rankless.config.extensions import ImportAlias, find_extension, is_own

InstalledObserver = Callable[[ImportAlias, str], None]


class AliasFinder(MetaPathFinder):
    """Answers the names that extensions declare, and what is below them, with their modules.

    A name for which the real package is installed stays with that package. `on_installed` is called once, with the
    alias and the real package's file, when a script imports the reported part of it.
    """

    def __init__(self, on_installed: InstalledObserver | None = None) -> None:
        self._on_installed = on_installed
        self.others: set[str] = set()
        """The extensions of other packages whose import names it answers."""
        self._is_real: dict[str, bool] = {}
        self._searching = False

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        """Return the spec of our module of that name, or None if the name is not ours to answer.

        Raises ModuleNotFoundError, which lists what there is, for a part that Rankless does not have.
        """
        name = fullname.partition(".")[0]
        alias = self._find_alias(name)
        if alias is None or self._searching:
            return None
        if self.is_real_package(name):
            self._report_installed(alias, name, fullname)
            return None
        own = alias.target + fullname.removeprefix(name)
        found = _find_own(own)
        if found is None:
            raise ModuleNotFoundError(f"No module named {fullname!r}: {alias.missing_text}", name=fullname)
        is_package = found.submodule_search_locations is not None
        spec = ModuleSpec(fullname, _SameModule(own), origin=found.origin, is_package=is_package)
        if is_package:
            spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def is_real_package(self, name: str) -> bool:
        """Return whether an import of `name` is left to the real package, by the user's choice or what is installed."""
        if name not in self._is_real:
            alias = self._find_alias(name)
            choice = "never" if alias is None else environment.alias_choice(alias.variable)
            self._is_real[name] = choice == "never" or (choice == "missing" and self.installed_file(name) is not None)
        return self._is_real[name]

    def installed_file(self, name: str) -> str | None:
        """Return the file of the installed real package. A folder that happens to have the name is none."""
        self._searching = True
        try:
            spec = importlib.util.find_spec(name) if name not in sys.modules else None
        finally:
            self._searching = False
        return None if spec is None else spec.origin

    def _find_alias(self, name: str) -> ImportAlias | None:
        """Return what the extension of that name declares of its import name; None if there is none."""
        # Every import asks. So only the folder of Rankless's own extensions is looked at.
        extension = find_extension(name) if name in self.others or is_own(name) else None
        return None if extension is None else extension.import_alias

    def _report_installed(self, alias: ImportAlias, name: str, fullname: str) -> None:
        file = getattr(sys.modules.get(name), "__file__", None)
        if self._on_installed is not None and fullname == alias.reported_part and file is not None:
            report, self._on_installed = self._on_installed, None
            report(alias, file)


class _SameModule(Loader):
    """Loads nothing anew: the module is the one that has our own name."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._spec: ModuleSpec | None = None

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._own)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just replaced it by the alias's spec

    def get_code(self, _name: str) -> CodeType | None:
        """Return the code that `python -m` runs."""
        spec = _find_own(self._own)
        code = None if spec is None or spec.loader is None else spec.loader.get_code(self._own)  # type: ignore[attr-defined]  # a source file's has it
        return code if isinstance(code, CodeType) else None


def install(on_installed: InstalledObserver | None = None, *, other: str | None = None) -> AliasFinder:
    """Put a finder at the front of `sys.meta_path`, unless one is there, and return it.

    Args:
        on_installed: Called with the alias and the file of an installed real package when a script imports that.
        other: An extension of another package, whose import name the finder answers too.
    """
    finder = next((each for each in sys.meta_path if isinstance(each, AliasFinder)), None)
    if finder is None:
        finder = AliasFinder(on_installed)
        sys.meta_path.insert(0, finder)
    if other is not None:
        finder.others.add(other)
    return finder


def installed_package(name: str) -> str | None:
    """Return the file of the real package that imports of `name` get in this interpreter; None if they get ours."""
    finder = install()
    return finder.installed_file(name) if finder.is_real_package(name) else None


def is_alias_active(name: str) -> bool:
    """Return whether imports of `name` get ours, by the path that this interpreter has before a script has run.

    Leaves nothing behind: a fork of this process, with the script's folder on its path, may decide otherwise.
    """
    finder = install()  # a finder outside `sys.meta_path` would be answered by the one that a `.pth` file puts there
    try:
        return not finder.is_real_package(name)
    finally:
        sys.meta_path.remove(finder)


def _find_own(own: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(own)
    except ModuleNotFoundError:
        return None  # not even the package that it would be in
