"""What a program written for another launcher is given of that launcher's ways."""

from typing import Literal

import msgspec

Source = Literal["out", "err"]
SOURCES: tuple[Source, ...] = ("out", "err")


class ShownStream(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of one worker that is shown on the terminal; streams that are not shown are in their files only."""

    rank: int
    source: Source
    prefix: str = ""
    """What stands before each of its lines."""
    needles: tuple[str, ...] = ()
    """If there are any, the lines that contain one of them go to a file, too."""


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """The hosts of a run, and where they and their workers meet."""

    least: int = 1
    most: int = 1
    number: int = 0
    """This host's."""
    master_address: str = "127.0.0.1"
    master_port: int | None = None
    """None: a free one."""
    local_address: str | None = None
    rendezvous: str = "static"
    endpoint: str = ""
    settings: tuple[tuple[str, str], ...] = ()


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """How torchrun runs a program. A plan without it follows Rankless's own ways."""

    role: str = "default"
    run_id: str | None = None
    """None: the name of the log folder."""
    signals: tuple[int, ...] = ()
    """The signals that the agent hands on to the workers, and then ends the run."""
    shutdown_seconds: float = 30.0
    """How long workers may take to end once they are asked to."""
    virtual_local_rank: bool = False
    """Each worker sees one GPU, and LOCAL_RANK 0."""
    streams: tuple[ShownStream, ...] = ()
