"""What the runtime hands to the views, so that they never ask who they are."""

from collections.abc import Callable
from dataclasses import dataclass

from rankless.collectives.mesh import Mesh
from rankless.records.events import AnyRecord
from rankless.views.progress import ProgressMeter


@dataclass(frozen=True, kw_only=True)
class World:
    """The mesh, and the ways up: a notice said once, a record sent to whoever observes.

    `recording` is the folder into which job results are written for `rankless verify`, or None.
    `perturbation_seed` is set in `verify`'s noise-floor run only.
    """

    mesh: Mesh
    say: Callable[[str], None]
    record: Callable[[AnyRecord], None]
    recording: str | None = None
    perturbation_seed: int | None = None
    meter: ProgressMeter | None = None
    """Told of batches by loaders and of steps by train jobs; None where nobody watches."""


WorldSource = Callable[[], World]
"""Called at the first use, so that a job may be defined before the world is joined."""
