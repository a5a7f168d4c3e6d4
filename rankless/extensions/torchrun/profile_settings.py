"""The settings of a run under torchrun's command line."""

import msgspec

from rankless.config.launcher_spec import LauncherSpec, make_launcher_spec
from rankless.launch.worker_output import Source


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
