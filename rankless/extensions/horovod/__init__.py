"""Horovod's API for PyTorch, on Rankless. Nothing needs to be compiled.

Enters: the calls of scripts, as `import horovod.torch as hvd`. Leaves: the results, from `engine`. The folders have the
names of Horovod's, so that every `import horovod.…` of a script finds its counterpart. `engine`, `context`,
`exceptions`, `settings` and `selftest` are Rankless's own.
"""

from rankless.extensions.horovod.runner import run
from rankless.extensions.horovodrun.build_table import HOROVOD_VERSION

__all__ = ["run"]
__version__ = HOROVOD_VERSION
