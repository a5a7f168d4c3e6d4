"""The profile of torchrun's programs: its environment variables, its tree of log files, its signals and prefixes."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.config.environment import snapshot, user_visible_devices
from rankless.config.process_configs import WorkerConfig
from rankless.config.run_config import AgreedJobConfig, LauncherSpec, RunConfig, decode_settings, make_launcher_spec
from rankless.launch.launcher_profile import (
    LauncherProfile,
    SignalForwarding,
    VisibleDevices,
    WorkerLogFiles,
    log_file_of,
)
from rankless.launch.worker_output import FollowedFile, Source


class ShownStream(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of one worker that the terminal shows. Other streams go to their log files only."""

    rank: int
    source: Source
    prefix: str = ""
    """The text before each of its lines."""
    filters: tuple[str, ...] = ()
    """Lines that contain one of these texts are copied to a file."""


class TorchrunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How torchrun runs a program."""

    role: str = "default"
    run_id: str | None = None
    """None: the name of the log folder."""
    signals: tuple[int, ...] = ()
    """The signals that the agent forwards to the workers before it ends the run."""
    shutdown_seconds: float = 30.0
    """The time that workers have to end after such a signal."""
    virtual_local_rank: bool = False
    """Each worker sees one GPU, and LOCAL_RANK 0."""
    streams: tuple[ShownStream, ...] = ()


def make_torchrun_spec(settings: TorchrunSettings) -> LauncherSpec:
    """Return the spec of this launcher for a `RunRequest`."""
    return make_launcher_spec("torchrun", settings)


_FIRST_ATTEMPT = "attempt_0"
"""torchrun's folder of logs until it restarts the workers, which Rankless never does."""
_STREAM_NAMES: Mapping[Source, str] = {"out": "stdout", "err": "stderr"}


def make_profile(settings: bytes) -> LauncherProfile:
    """Return the profile for the settings of a `LauncherSpec`."""
    return TorchrunProfile(decode_settings(settings, TorchrunSettings))


@dataclass(frozen=True)
class TorchrunProfile(LauncherProfile):
    """How torchrun runs a program."""

    settings: TorchrunSettings
    output_hosts = "each"
    """Each host shows its own workers."""
    shows_summary = False
    """torchrun writes none."""
    withholds_tracebacks = False
    """torchrun shows every worker's output as it comes."""
    uses_rankless_api = False
    """The program is plain PyTorch."""
    plain_process_option = "--start-method spawn"
    """torchrun's own option."""
    has_private_logs = False
    """The umask of the user decides who may read them."""

    @property
    def run_name(self) -> str | None:
        """`--rdzv-id`."""
        return self.settings.run_id

    @property
    def signal_forwarding(self) -> SignalForwarding:
        """`--signals-to-handle` and `--shutdown-timeout`."""
        return SignalForwarding(self.settings.signals, self.settings.shutdown_seconds)

    def folder_name(self, run_id: str, host_index: int) -> str:
        """Return a name of its own for each host: files are numbered from 0 on each, and hosts may share a disk."""
        return f"{run_id}-host{host_index}" if host_index else run_id

    def log_files(self, folder: str, rank: int, local_rank: int) -> WorkerLogFiles:
        """Return the paths of a worker's two log files, as torchrun has them."""
        own = os.path.join(folder, _FIRST_ATTEMPT, str(local_rank))
        return WorkerLogFiles(os.path.join(own, "stdout.log"), os.path.join(own, "stderr.log"))

    def shown_streams(self, config: RunConfig, folder: str, workers: Sequence[WorkerConfig]) -> list[FollowedFile]:
        """Return the streams that `--redirects`, `--tee` and the filters leave on the terminal."""
        return [
            FollowedFile(
                path=log_file_of(workers[stream.rank], stream.source),
                sink=stream.source,
                prefix=stream.prefix,
                filters=stream.filters,
                copy=_copy_file(folder, stream),
            )
            for stream in self.settings.streams
        ]

    def visible_devices(self, devices: Sequence[str]) -> VisibleDevices:
        """Return the devices: workers see every GPU of the host and choose by LOCAL_RANK, or see one GPU each."""
        is_alone = self.settings.virtual_local_rank
        return VisibleDevices(["cuda:0" if is_alone and device != "cpu" else device for device in devices])

    def worker_environment(
        self, worker: WorkerConfig, start: AgreedJobConfig, *, elastic_host: str | None = None
    ) -> Mapping[str, str | None]:
        """Return the variables that torchrun sets besides those of every run. PYTHONPATH stays the user's own."""
        settings = self.settings
        variables: dict[str, str | None] = {
            "ROLE_NAME": settings.role,
            "TORCHELASTIC_RUN_ID": settings.run_id or worker.run_id,
            "TORCHELASTIC_ERROR_FILE": os.path.join(os.path.dirname(worker.log_file), "error.json"),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signal.Signals(number).name for number in settings.signals),
            # Rank 0 serves the store at MASTER_PORT: the agent has no torch.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": snapshot().get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        if settings.virtual_local_rank:
            visible = user_visible_devices()
            device = str(worker.local_rank) if visible is None else visible[worker.local_rank]
            variables |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}
        return variables


def _copy_file(folder: str, stream: ShownStream) -> str | None:
    if not stream.filters:
        return None
    return os.path.join(folder, _FIRST_ATTEMPT, f"filtered_{_STREAM_NAMES[stream.source]}.log")
