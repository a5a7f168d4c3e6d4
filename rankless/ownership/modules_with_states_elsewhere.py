"""Modules of extensions whose states are no tensors of the module, such as tables of rows."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


class ExtensionModule(nn.Module):
    """A module whose states are elsewhere. Its extension shares them between ranks, and steps them.

    A class of an extension derives from it, and has the methods that fit its states.
    """

    rankless_participant = ""
    """The module of the extension's `JointParticipant`."""
    weight: nn.Parameter
    """A parameter that stands for its states. Optimizers step it, and all workers have it whole."""

    def join_gradients(self, before: Any, factors: tuple[float, float]) -> Any:  # noqa: ARG002  # for other states
        """Join the gradients of a job's last call with those of earlier ones, for one step of all.

        Args:
            before: What the method has returned for earlier calls.
            factors: By what to multiply these, and those of the last call.
        """
        return before

    def restore_gradients(self, joint: Any) -> None:
        """Let the next step have what `join_gradients` has returned, without calls since then."""

    def list_rows(self) -> Mapping[str, Tensor]:
        """Return the states as tensors by name, for `rankless verify`."""
        return {}


def find_extension_modules(module: nn.Module) -> dict[str, ExtensionModule]:
    """Return the modules of extensions in a module, itself included, by their names in it."""
    return {name: part for name, part in module.named_modules() if isinstance(part, ExtensionModule)}


def list_extension_modules(modules: Iterable[nn.Module]) -> list[ExtensionModule]:
    """Return the modules of extensions in some modules, each once, in their order."""
    return list(dict.fromkeys(part for module in modules for part in find_extension_modules(module).values()))


def list_participants(modules: Iterable[nn.Module]) -> list[str]:
    """Return the participants that modules and their parts name, each once.

    Modules of a script are not asked: their `__getattr__` may answer anything.
    """
    names = (part.rankless_participant for part in list_extension_modules(modules))
    return list(dict.fromkeys(name for name in names if name))


def list_extension_packages() -> set[str]:
    """Return the packages of extensions whose modules a script may have, each with a dot at its end."""
    return {kind.__module__.rpartition(".")[0] + "." for kind in ExtensionModule.__subclasses__()}
