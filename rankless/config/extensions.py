"""What extensions declare. An extension is the API or the command line of another system, built on Rankless.

The core imports no extension and names none. It reads the `extension.toml` of each: those in `rankless/extensions`, and
those of installed packages with an entry point in the group `rankless.extensions`, whose value is a top-level package.
It imports a module of an extension only when a script or a command uses it.
"""

import functools
import importlib
import importlib.util
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Protocol, get_origin

from rankless.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "extensions"
"""The extensions that come with Rankless."""
FILE = "extension.toml"
ENTRY_POINTS = "rankless.extensions"


class _Declared:
    """A part of a declaration, whose fields have the types that the class says."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # its subclasses are dataclasses
            value: Any = getattr(self, each.name)
            kind: Any = each.type if isinstance(each.type, UnionType) else get_origin(each.type) or each.type
            is_right = isinstance(value, kind)
            if not is_right or (each.type == tuple[str, ...] and not all(isinstance(item, str) for item in value)):
                raise TypeError(f"{each.name} = {value!r}")


@dataclass(frozen=True, kw_only=True)
class Command(_Declared):
    """A command `rankless NAME`."""

    help: str
    """What `rankless --help` shows."""
    module: str
    """Where the command is. `rankless.cli` says what such a module has."""


@dataclass(frozen=True, kw_only=True)
class ImportAlias(_Declared):
    """The name of the extension is also an import name that a package answers, unless the real package is installed."""

    target: str
    """The package that answers."""
    variable: str
    """The environment variable by which users choose: 0 never takes ours, 1 always does."""
    preload: tuple[str, ...] = ()
    """What the fork server imports for programs that name the package."""
    missing_text: str
    """What a ModuleNotFoundError says of a part that the package does not have."""
    reported_part: str
    """The part of an installed real package whose import is reported."""
    launcher_variables: tuple[str, ...] = ()
    """The environment variables under which the real package finds the other ranks, so that no warning is due."""
    warning: str
    """For the user, if a real package is alone in each worker: with the package's `file`, and `world_size`."""


@dataclass(frozen=True, kw_only=True)
class LaunchedProcesses(_Declared):
    """Processes that a launcher of another system starts, and that `rankless.init` brings together."""

    variable: str
    """The environment variable by which that launcher is recognized."""
    module: str
    """Has `read_worker(variables)`, which returns a `LaunchedWorker`."""


class LaunchedWorker(Protocol):
    """One process of a job, as the environment variables of its launcher describe it."""

    @property
    def rank(self) -> int:
        """Its rank."""
        ...

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        ...

    def join(self, notify: Callable[[str], None]) -> Any:
        """Wait for the other ranks, and return the `RendezvousInfo` of this process. Raises `JoinError`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Stacks(_Declared):
    """How the watchdog reads the extension's frames. Files are relative to the extension's folder."""

    waits: tuple[str, ...] = ()
    """Files, or beginnings of them, in which a rank waits for other ranks."""
    joins: tuple[str, ...] = ()
    """Those in which it waits for ranks that have not joined."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What a report calls a wait within a file."""
    calls: Mapping[str, str] = field(default_factory=dict)
    """The name under which scripts call the functions of a folder."""
    asks: tuple[str, ...] = ()
    """Those of `labels` in which a rank waits for the processes of the extension's role, and for no rank."""


@dataclass(frozen=True, kw_only=True)
class Failures(_Declared):
    """How the extension's errors say which rank or process is at fault."""

    secondary: tuple[str, ...] = ()
    """Regular expressions for messages of a rank that another rank's failure has ended."""
    stalled: str = ""
    """A regular expression for the message that names ranks for which others waited too long. Its first group is the
    seconds, its second lines of a rank and what it has not submitted, such as `1: [loss]`."""
    lost: str = ""
    """A regular expression for the message of a rank that has lost its connection to a process of the extension's role.
    Its only group is the number of the process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for pattern in self.secondary:
            re.compile(pattern)
        if self.stalled and re.compile(self.stalled).groups != 2:
            raise TypeError(f"stalled = {self.stalled!r}, which has not two groups")
        if self.lost and re.compile(self.lost).groups != 1:
            raise TypeError(f"lost = {self.lost!r}, which has not one group")


@dataclass(frozen=True, kw_only=True)
class Option(_Declared):
    """An option `--NAME` of `rankless run`, `plan` and `verify`, which the runs on several workers of these get."""

    help: str
    type: str = "text"
    """What its value is: "text", "int", "float", or "flag" for an option without a value."""
    metavar: str = ""
    """What `--help` shows for its value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.type not in ("text", "int", "float", "flag"):
            raise TypeError(f"type = {self.type!r}, which is none of text, int, float and flag")


@dataclass(frozen=True, kw_only=True)
class Role(_Declared):
    """The kind of process that the extension adds to a run, beside its workers."""

    module: str
    """Has `make_role(config)`, which returns a `rankless.launch.extension_process_role.ProcessRole` for one host."""
    title: str
    """What a message calls all its processes, as in "the clocks"."""
    process: str
    """What a message calls one of its processes; its number follows, as in "clock 1"."""


@dataclass(frozen=True, kw_only=True)
class DoctorCheck(_Declared):
    """A check of `rankless doctor` on each host."""

    name: str
    progress: str
    """What the doctor says meanwhile, as in "asking a clock on each host"."""
    module: str
    """Has `run_check()`, which returns a `CheckResult`."""
    timeout_seconds: float
    starts: str = ""
    """What it starts, which `--quick` leaves out; "" for nothing."""


@dataclass(frozen=True, kw_only=True)
class PrivateFile(_Declared):
    """A file or folder that Rankless or an extension makes for itself, for the table of all files of a run."""

    name: str
    pattern: str
    """A pattern of its path in the run's log folder, or a path elsewhere that begins with / or ~."""
    mode: int
    kinds: tuple[str, ...] = ()
    """The kinds of runs that may have it; none means all."""


@dataclass(frozen=True, kw_only=True)
class ListeningSocket(_Declared):
    """A socket that accepts connections, for the table of all sockets of a run."""

    name: str
    kinds: tuple[str, ...] = ()
    """The kinds of runs that may have it; none means all."""
    holder: str
    """The process that has it: agent, worker, or one of a role."""
    address: str
    """Where it listens on one host: an address, or the beginning of the path or name of a Unix socket."""
    on_hosts: str = ""
    """Where it listens in runs on several hosts; "" if only runs on one host have it."""
    lasts: str
    access: str
    """What a client must show."""


@dataclass(frozen=True, kw_only=True)
class Extension(_Declared):
    """What an extension adds, as its `extension.toml` says."""

    name: str = ""
    """The name of its folder, or of its entry point."""
    folder: str = ""
    commands: Mapping[str, Command] = field(default_factory=dict)
    launcher: str = ""
    """A module with `make_profile(settings)`, which returns the `LauncherProfile` of runs whose launcher has the
    extension's name."""
    import_alias: ImportAlias | None = None
    launched: LaunchedProcesses | None = None
    variables: tuple[str, ...] = ()
    """Beginnings of the environment variables that other hosts get too."""
    options: Mapping[str, Option] = field(default_factory=dict)
    options_title: str = ""
    """Over the options in `--help`; the name of the extension if it is empty."""
    shared_options: tuple[str, ...] = ()
    """The options of Rankless that its options module gets, too, without dashes before them."""
    options_module: str = ""
    """A module with `make_options()`. It returns a `RunOptions` of `rankless.config.meaning_of_extension_options`: how
    the options are checked, and what they mean for a run."""
    participant: str = ""
    """A module with `make_participant(config)`, which returns a `StepParticipant` for the worker with that
    `WorkerConfig`, in runs whose command line has an option of the extension."""
    joint_participant: str = ""
    """A module with `make_joint_participant(events, config, workers)`, which returns a `JointParticipant` of
    `rankless.context.extension_participants`: in runs with a role or an option of the extension, and for models whose
    modules name the module in `rankless_participant`."""
    worker_kinds: bool = False
    """Whether the joint participant says what each kind of workers computes, in runs with heterogeneous workers."""
    saved_rows: str = ""
    """A module of an extension whose checkpoints have rows. Its `STATE_COUNTS` has, by the name of an optimizer, how
    many states as long as its values a row has."""
    operators: str = ""
    """A module with `OPERATORS`: for each operator of programs that the extension adds, in the namespace of its name,
    an `ExtensionOperator` (`rankless.compiler.rules.extension_operators`)."""
    role: Role | None = None
    doctor_check: DoctorCheck | None = None
    stacks: Stacks = Stacks()
    failures: Failures = Failures()
    run_kinds: tuple[str, ...] = ()
    """The kinds of runs that it adds to the table of sockets and files. If it has a launcher, their logs have the modes
    that the other system's users expect."""
    spanning_kinds: tuple[str, ...] = ()
    """Those of them that may have several hosts."""
    sockets: tuple[ListeningSocket, ...] = ()
    files: tuple[PrivateFile, ...] = ()


_PARTS: Mapping[str, type] = {
    "import_alias": ImportAlias,
    "launched": LaunchedProcesses,
    "role": Role,
    "doctor_check": DoctorCheck,
    "stacks": Stacks,
    "failures": Failures,
}


@functools.cache
def find_extension(name: str) -> Extension | None:
    """Return what the extension of that name declares; None if there is none."""
    if is_own(name):
        return _read(name, FOLDER / name)
    installed = _list_installed().get(name)
    return None if installed is None else _read(name, installed)


@functools.cache
def is_own(name: str) -> bool:
    """Return whether an extension of that name comes with Rankless."""
    return name.isidentifier() and os.path.exists(os.path.join(FOLDER, name, FILE))


@functools.cache
def list_extensions() -> tuple[Extension, ...]:
    """Return what all extensions declare: those that come with Rankless, and those of other packages, each by name.

    Leaves out those of other packages whose declaration cannot be read: they must not keep a run from its end.
    """
    return (*list_own(), *list_installed())


def list_installed() -> tuple[Extension, ...]:
    """Return what the extensions of other packages declare, without those whose declaration cannot be read."""
    return tuple(item for item in _read_installed() if isinstance(item, Extension))


def import_declared(extension: str, field_name: str, module: str, *, name: str = "") -> Any:
    """Return a module that the declaration of an extension names, or what the module has under a name.

    Args:
        extension: The name of the extension.
        field_name: The field of the declaration.
        module: The module.
        name: What to return of it; "" for the module.

    Raises:
        ConfigError: The module cannot be imported, or has nothing of that name.
    """
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            expected=f"the module {module}{f' with {name}' if name else ''}, which {FILE} of the extension {extension} "
            f"names as {field_name}",
            found=str(error),
            fix="correct the declaration, or install what the module needs",
        ) from error


def list_problems() -> list[ConfigError]:
    """Return what is wrong with extensions of other packages whose declaration cannot be read."""
    return [item for item in _read_installed() if isinstance(item, ConfigError)]


def find_command(name: str) -> Command | None:
    """Return the command of that name, if an extension has it."""
    own = (extension.commands.get(name) for extension in list_own())
    return next(filter(None, own), None) or list_commands().get(name)


def list_commands() -> dict[str, Command]:
    """Return the commands of all extensions by name."""
    return {name: command for extension in list_extensions() for name, command in extension.commands.items()}


def list_aliases() -> dict[str, ImportAlias]:
    """Return the import names that extensions answer."""
    return {each.name: each.import_alias for each in list_extensions() if each.import_alias is not None}


@functools.cache
def list_own() -> tuple[Extension, ...]:
    """Return what the extensions that come with Rankless declare, by name."""
    return tuple(_read(name, FOLDER / name) for name in sorted(os.listdir(FOLDER)) if is_own(name))


@functools.cache
def _list_installed() -> Mapping[str, Path]:
    """Return the folders of extensions in other packages, which are not imported."""
    found = {}
    # Imported here: it takes 50 ms, and most commands ask for no extension of another package.
    for entry in importlib.import_module("importlib.metadata").entry_points(group=ENTRY_POINTS):
        spec = importlib.util.find_spec(entry.value)
        for folder in (spec.submodule_search_locations if spec is not None else None) or ():
            if (Path(folder) / FILE).is_file() and not is_own(entry.name):
                found[entry.name] = Path(folder)
    return found


@functools.cache
def _read_installed() -> tuple[Extension | ConfigError, ...]:
    found: list[Extension | ConfigError] = []
    for name, folder in sorted(_list_installed().items()):
        try:
            found.append(_read(name, folder))
        except ConfigError as error:
            found.append(error)
    return tuple(found)


def _read(name: str, folder: Path) -> Extension:
    try:
        content = tomllib.loads((folder / FILE).read_text())
        return Extension(name=name, folder=str(folder), **_convert(content))
    except (OSError, TypeError, AttributeError, ValueError, re.error) as error:
        raise ConfigError(
            expected=f"the declaration of an extension in {folder / FILE}",
            found=str(error).replace("__init__() ", ""),
            fix="correct the file; `rankless.config.extensions.Extension` has the fields",
        ) from None


def _convert(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Extension` for the content of a file."""
    found: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in content.items()}
    for name, kind in _PARTS.items():
        if name in found:
            lists = {key: tuple(item) if isinstance(item, list) else item for key, item in found[name].items()}
            found[name] = kind(**lists)
    found["commands"] = {name: Command(**command) for name, command in content.get("commands", {}).items()}
    found["options"] = {name: Option(**option) for name, option in content.get("options", {}).items()}
    if wrong := [name for name in found["options"] if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)]:
        raise TypeError(f"options.{wrong[0]!r}, which is no name of an option, such as log-dir")
    for name, kind in (("sockets", ListeningSocket), ("files", PrivateFile)):
        found[name] = tuple(kind(**{**each, "kinds": tuple(each.get("kinds", ()))}) for each in content.get(name, ()))
    return found
