"""Checkpoints: what objects with a `state_dict` hold, written to a folder and read back, on any number of
ranks.

Enters: a path, objects by name, the mesh. Leaves: a folder that safetensors alone can read (its layout is
described in `manifest`), or the objects restored. Called by `rankless.api`, the facade, on every rank; the
runtime makes the one `Saver` of a process.
"""

from rankless.checkpoint.checkpoints import Checkpoints, Restored
from rankless.checkpoint.loading import load
from rankless.checkpoint.retention import Mode, Retention
from rankless.checkpoint.saving import Layout, SaveOptions, Saver

__all__ = ["Checkpoints", "Layout", "Mode", "Restored", "Retention", "SaveOptions", "Saver", "load"]
