"""Installs the import aliases at the start of every Python below a worker, and changes nothing else.

This module takes its folder off the path. It runs the `sitecustomize` that Python would have found otherwise. It
imports nothing of Rankless before a script asks for one of the aliases.
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
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER))))
EXTENSIONS = os.path.join(ROOT, "rankless", "extensions")
NAMES = frozenset(os.listdir(EXTENSIONS))
"""Only an extension that has the import's name may have an alias for it."""


class _OnDemand:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """Do what `AliasFinder` does; that finder replaces this one at the first such import."""
        if name.partition(".")[0] not in NAMES:
            return None
        sys.meta_path.remove(_OnDemand)
        is_added = ROOT not in sys.path
        if is_added:
            sys.path.append(ROOT)
        try:
            aliases = importlib.import_module("rankless.runtime.hooks.import_aliases")
        except (ImportError, SyntaxError, TypeError):  # another Python: an older one, or without what Rankless needs
            if is_added:
                sys.path.remove(ROOT)
            return None
        return aliases.install().find_spec(name, path, target)


def _run_next_sitecustomize() -> None:
    """Run the `sitecustomize` that this one hides."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":  # and not where it is imported as a part of Rankless
    sys.meta_path.insert(0, _OnDemand)
    _run_next_sitecustomize()
