"""Names of Horovod's modules that have no counterpart here: they can be imported, and say at a call what to use."""

from collections.abc import Callable
from typing import Any, NoReturn


def make_lookup(module: str, instead: str) -> Callable[[str], type]:
    """Return a module's `__getattr__`, which gives a class for each name that the module does not define.

    Args:
        module: The module, as scripts name it.
        instead: What to use instead of its functions and classes.
    """

    def find(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def refuse(_: type, *arguments: Any, **keywords: Any) -> NoReturn:
            raise NotImplementedError(f"{module}.{name} has no counterpart in Rankless. Use {instead}.")

        return type(name, (), {"__new__": refuse, "__module__": module})

    return find
