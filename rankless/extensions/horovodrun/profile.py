"""The profile of Horovod's programs: HOROVOD_ variables, `rank.N` folders, prefixed output, and a rendezvous server."""

import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rankless.config.environment import alias_choice, loopback_name
from rankless.config.process_configs import WorkerConfig
from rankless.config.run_config import AgreedJobConfig, Program, RunConfig, decode_settings
from rankless.extensions.horovodrun.launched_worker import rank_variables
from rankless.extensions.horovodrun.run_config import is_this_python
from rankless.extensions.horovodrun.settings import HorovodrunSettings
from rankless.launch.launcher_profile import LauncherProfile, VisibleDevices, WorkerLogFiles, log_file_of
from rankless.launch.worker_output import SOURCES, FollowedFile
from rankless.records.elastic_driver_protocol import RankAssignment
from rankless.runtime.hooks.import_aliases import install

STOP_GRACE_SECONDS = 5.0
"""How long Horovod's workers have to end after SIGTERM."""


def make_profile(settings: bytes) -> LauncherProfile:
    """Return the profile for the settings of a `LauncherSpec`."""
    return HorovodrunProfile(decode_settings(settings, HorovodrunSettings))


@dataclass(frozen=True)
class HorovodrunProfile(LauncherProfile):
    """How horovodrun runs a program."""

    settings: HorovodrunSettings
    stop_grace_seconds = STOP_GRACE_SECONDS
    """Horovod's GRACEFUL_TERMINATION_TIME_S."""
    elastic_driver = "rankless.extensions.horovodrun.elastic.driver"
    """See `rankless.extensions.horovodrun.elastic`."""
    output_hosts = "gathered"
    """Host 0 shows all workers; other hosts send it their output."""
    exports_environment = True
    """Other hosts get the whole environment, as from Horovod's own launcher."""
    shows_summary = False
    """horovodrun writes none."""
    withholds_tracebacks = False
    """horovodrun shows every worker's output as it comes."""
    uses_rankless_api = False
    """The program uses Horovod's API."""
    plain_process_option = None
    """horovodrun has none."""
    has_private_logs = False
    """The umask of the user decides who may read them."""

    def log_files(self, folder: str, rank: int, local_rank: int) -> WorkerLogFiles:
        """Return the paths of a worker's two log files, below `--output-filename` if that is given."""
        own = os.path.join(self.settings.output_folder or folder, f"rank.{self.settings.padded_rank(rank)}")
        return WorkerLogFiles(os.path.join(own, "stdout"), os.path.join(own, "stderr"))

    def shown_streams(self, config: RunConfig, folder: str, workers: Sequence[WorkerConfig]) -> list[FollowedFile]:
        """Return both streams of every worker, with Horovod's prefix."""
        timestamps = self.settings.timestamps
        return [
            FollowedFile(
                path=log_file_of(each, source),
                sink=source,
                prefix=f"[{each.rank}]<std{source}>:",
                has_timestamps=timestamps,
            )
            for each in workers
            for source in SOURCES
        ]

    def visible_devices(self, devices: Sequence[str]) -> VisibleDevices:
        """Return the devices unchanged: workers see every GPU of the host and choose by their local rank."""
        return VisibleDevices(list(devices))

    def worker_environment(
        self, worker: WorkerConfig, start: AgreedJobConfig, *, elastic_host: str | None = None
    ) -> Mapping[str, str | None]:
        """Return Horovod's variables besides those of a plain run.

        The ranks and sizes of a worker of an elastic job change. Until `hvd.init` sets those of its round, its number
        stands for its rank, as in torchrun's variables.
        """
        if elastic_host is None:
            own = self._rank_variables(worker.rank)
        else:
            own = {
                "HOROVOD_ELASTIC": "1",
                "HOROVOD_HOSTNAME": elastic_host,
                **rank_variables(_make_elastic_assignment(worker)),
            }
        return {
            **super().worker_environment(worker, start),
            **own,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": worker.interface or loopback_name(),
            "PYTHONUNBUFFERED": "1",
            **dict(self.settings.variables),
        }

    @contextlib.contextmanager
    def open_services(
        self, config: RunConfig, *, addresses: Sequence[str], worker_counts: Sequence[int], store_address: str
    ) -> Iterator[Mapping[str, str | None]]:
        """Serve the rendezvous of an installed Horovod's ranks, if workers may import one; yield where."""
        if not may_be_imported(config.program):
            # Variables of an outer job would name that job's server.
            yield _rendezvous_variables(None, None)
            return
        # Imported here: its HTTP server, of the standard library, costs 20 ms that most jobs need not pay.
        server = importlib.import_module("rankless.extensions.horovodrun.rendezvous_server")
        with server.rendezvous_server(store_address) as port:
            yield _rendezvous_variables(store_address, str(port))

    def failure_note(self, rank: int, exit_code: int) -> str:
        """Return horovodrun's own sentence about the first process that failed."""
        return (
            "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            "terminated. "
            f"The first process to do so was:\nProcess name: {rank}\nExit code: {exit_code}\n"
        )

    def _rank_variables(self, rank: int) -> dict[str, str]:
        assignment = self.settings.assignment_of(rank)
        return {"HOROVOD_HOSTNAME": self.settings.host_of(rank), **rank_variables(assignment)}


def _make_elastic_assignment(worker: WorkerConfig) -> RankAssignment:
    return RankAssignment(
        rank=worker.rank,
        size=worker.world_size,
        local_rank=worker.local_rank,
        local_size=worker.local_world_size,
        cross_rank=0,
        cross_size=1,
    )


def _rendezvous_variables(address: str | None, port: str | None) -> Mapping[str, str | None]:
    return {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": port}


VARIABLE = "RANKLESS_HOROVOD"


def may_be_imported(program: Program) -> bool:
    """Whether `import horovod` may find an installed one.

    True if one is installed here, or if another Python runs the program, whose packages are unknown.
    """
    if install().is_real_package("horovod"):
        return True
    is_python = program.kind == "command" and os.path.basename(program.target).startswith("python")
    return is_python and alias_choice(VARIABLE) == "missing" and not is_this_python(program.target)
