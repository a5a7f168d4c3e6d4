"""Where an operator of a program comes from: the script's line, and the module of the model that computes it.

PyTorch hands one text from forward operators to those of their gradients, the stack trace. The capture writes both
parts into this text.
"""

from dataclasses import dataclass

SEPARATOR = "\x1f"


@dataclass(frozen=True)
class ModuleName:
    """The path of a module from the job's models, as "model.layers.2.attention", and the name of its class."""

    path: str
    kind: str


@dataclass(frozen=True)
class OperatorOrigin:
    """The script's line, as "file.py:12", and the innermost module of the job's models; None outside of modules."""

    line: str
    module: ModuleName | None = None

    def encode(self) -> str:
        """Return the origin as one text. `decode_origin` ignores what PyTorch adds at its end."""
        path, kind = (self.module.path, self.module.kind) if self.module is not None else ("", "")
        return SEPARATOR.join((self.line, path, kind, ""))


def decode_origin(text: str | None) -> OperatorOrigin:
    """Return the origin in a stack trace of the capture."""
    line, *rest = (text or "").split(SEPARATOR)
    if len(rest) < 2 or not rest[0]:
        return OperatorOrigin(line)
    return OperatorOrigin(line, ModuleName(rest[0], rest[1]))
