"""Write what objects with a `state_dict` hold to a folder, and read it back, on any number of ranks.

Input: a path, objects by name, the mesh. Output: a folder that safetensors alone can read (`manifest` describes its
layout), or the restored objects. `rankless.api` calls it on every rank. The runtime makes the one `Saver` of a
process.

`saving` agrees with the other ranks within the step, and says what each rank writes. The writing then needs only the
disk, and may run in a thread: ranks communicate through the folder, never by collectives. `loading` gives objects
tensors that `lazy_tensor_reading` reads when something needs them. Decisions 0031 and 0051 have the reasons.
"""

from rankless.checkpoint.checkpoint_series import Mode, Retention
from rankless.checkpoint.checkpoints import Checkpoints, Restored, RunFunctions
from rankless.checkpoint.loading import Loaded, load
from rankless.checkpoint.save_on_preemption import Autosave
from rankless.checkpoint.saving import Layout, SaveOptions, Saver

__all__ = [
    "Autosave",
    "Checkpoints",
    "Layout",
    "Loaded",
    "Mode",
    "Restored",
    "Retention",
    "RunFunctions",
    "SaveOptions",
    "Saver",
    "load",
]
