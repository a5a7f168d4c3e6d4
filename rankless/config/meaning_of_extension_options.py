"""What the options of an extension mean for a run, and the calls by which the core asks extensions.

An extension whose options do more than reach its role and its participant declares `options_module`. That module has
`make_options()`, which returns a `RunOptions`. Only a command line with an option of the extension imports it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rankless.config.extensions import find_extension, import_declared
from rankless.config.hosts_and_addresses import Host
from rankless.config.run_config import Cluster, RunRequest
from rankless.errors import ConfigError

GivenOptions = Mapping[str, Any]
"""The options of an extension that a user gives: the value of each, by its name without dashes before it."""
Settings = Mapping[str, Any]
"""What an extension makes of its options for a run: plain values, which every host and every worker gets."""


class NamedWorkers(NamedTuple):
    """The workers that the options of an extension name.

    Args:
        worker_count: The number of workers that are not heterogeneous, on each host or in a list; None if not given.
        heterogeneous: The number of those that are, on each host or in a list.
        hosts: The hosts of a list; none if all workers are on this host, or if there is no list.
    """

    worker_count: int | None = None
    heterogeneous: int = 0
    hosts: tuple[Host, ...] = ()


class RunOptions:
    """The options of an extension. Each method has a default, which changes nothing in a run."""

    def read(self, given: GivenOptions, command: str) -> Settings:
        """Return the settings for a run with these options; none if it has nothing of the extension.

        Args:
            given: The options.
            command: The command that has them: run, plan or verify.

        Raises:
            ConfigError: For options that no run can have.
        """
        return given

    def find_workers(self, given: GivenOptions, *, worker_count: int | None, names_hosts: bool) -> NamedWorkers | None:
        """Return the workers that the options name; None if they name none.

        Args:
            given: The options.
            worker_count: The number of `-n`; None without it.
            names_hosts: Whether options of Rankless name the hosts.

        Raises:
            ConfigError: The options contradict each other, or `-n`.
        """
        return None

    def check(self, settings: Settings, request: RunRequest, cluster: Cluster | None) -> None:
        """Raise `ConfigError` for settings that the run cannot have, before any process starts.

        Args:
            settings: Those of `read`.
            request: The run.
            cluster: Its hosts; None for this host alone.
        """

    def count_processes(self, settings: Settings, cluster: Cluster | None) -> int:
        """Return how many processes of the extension this host will have; each keeps a core if there are enough."""
        return 0

    def explain_required_workers(self, settings: Settings) -> str:
        """Return why a run cannot continue without a killed worker, for errors; "" if it can."""
        return "options of an extension that needs every worker"

    def count_row_holders(self, settings: Settings) -> int:
        """Return how many processes of the extension divide the rows of tables among them; 0 if workers have them."""
        return 0

    def describe(self, settings: Settings) -> str:
        """Return what a line about the run says of the extension's processes, as "2 servers"; "" for nothing."""
        return ""


def load_options(name: str) -> RunOptions:
    """Return what the options of an extension mean. Raises `ConfigError` without such an extension."""
    extension = find_extension(name)
    if extension is None:  # another host has requested the run
        raise ConfigError(
            expected=f"the extension {name!r}, whose options the run has, on every host",
            found="none of that name in the environment of this host",
            fix="install it here too",
        )
    if not extension.options_module:
        return RunOptions()
    make: Callable[[], RunOptions] = import_declared(
        name, "options_module", extension.options_module, name="make_options"
    )
    return make()


def iterate_options(request: RunRequest) -> Iterator[tuple[RunOptions, Settings]]:
    """Yield the options of each extension that a run has, with their settings."""
    for name, settings in request.options.items():
        yield load_options(name), settings


def read_options(given: Mapping[str, GivenOptions], command: str) -> dict[str, Settings]:
    """Return the settings of each extension for a run, by its name. Raises `ConfigError`."""
    found = {name: load_options(name).read(options, command) for name, options in given.items()}
    return {name: settings for name, settings in found.items() if settings}


def find_named_workers(
    given: Mapping[str, GivenOptions], *, worker_count: int | None, names_hosts: bool
) -> NamedWorkers:
    """Return the workers that `-n` and the options of extensions name.

    Raises:
        ConfigError: The options contradict each other, or those of two extensions name workers.
    """
    named = {
        name: load_options(name).find_workers(options, worker_count=worker_count, names_hosts=names_hosts)
        for name, options in given.items()
    }
    found = {name: workers for name, workers in named.items() if workers is not None}
    if len(found) > 1:
        raise ConfigError(
            expected="workers named by the options of one extension",
            found=" and ".join(sorted(found)),
            fix="give the options of only one of them",
        )
    return next(iter(found.values()), NamedWorkers(worker_count))


def check_options(request: RunRequest, cluster: Cluster | None) -> None:
    """Raise `ConfigError` for options of extensions that the run cannot have."""
    for options, settings in iterate_options(request):
        options.check(settings, request, cluster)


def count_processes(request: RunRequest, cluster: Cluster | None) -> int:
    """Return how many processes beside the workers this host will have."""
    return sum(options.count_processes(settings, cluster) for options, settings in iterate_options(request))


def explain_required_workers(request: RunRequest) -> str:
    """Return why the options of an extension keep a run from going on without a killed worker; "" if none does."""
    reasons = (options.explain_required_workers(settings) for options, settings in iterate_options(request))
    return next(filter(None, reasons), "")


def count_row_holders(request: RunRequest) -> int:
    """Return how many processes beside the workers divide the rows of tables; 0 if each worker has all rows."""
    return sum(options.count_row_holders(settings) for options, settings in iterate_options(request))


def describe_processes(request: RunRequest) -> tuple[str, ...]:
    """Return what a line about the run says of the processes of each extension."""
    return tuple(text for options, settings in iterate_options(request) if (text := options.describe(settings)))
