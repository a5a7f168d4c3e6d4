"""What every Python below a worker does at its start: the import names are there, and all else is as without it.

It takes itself off the path, makes room for the `sitecustomize` that would have been found without it, and imports
nothing of Rankless before a script asks for one of the names.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))


class _OnDemand:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """As `ImportNames` does, which takes this one's place."""
        if name != "horovod" and not name.startswith("horovod."):
            return None
        sys.meta_path.remove(_OnDemand)
        is_added = _ROOT not in sys.path
        if is_added:
            sys.path.append(_ROOT)
        try:
            names = importlib.import_module("rankless.runtime.hooks.horovod_imports")
            importlib.import_module("rankless.config.environment")  # which that one asks
        except (ImportError, SyntaxError, TypeError):  # another Python: an older one, or without what Rankless needs
            if is_added:
                sys.path.remove(_ROOT)
            return None
        return names.install().find_spec(name, path, target)


def _run_the_next() -> None:
    """Run the `sitecustomize` that stands behind this one."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":  # and not where it is imported as a part of Rankless
    sys.meta_path.insert(0, _OnDemand)
    _run_the_next()
