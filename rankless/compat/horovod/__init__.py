"""Horovod's API for PyTorch, on Rankless: nothing to compile.

Enters: scripts' calls, as `import horovod.torch as hvd`. The folders are named as Horovod's, so that every
`import horovod.…` of a script finds its counterpart; `negotiated`, `context`, `settings` and `selftest` are ours.
"""

from rankless.compat.horovod.runner import run

__all__ = ["run"]
__version__ = "0.28.1"
"""The release whose API and behaviour this is."""
