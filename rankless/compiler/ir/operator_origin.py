"""Where an operator of a program comes from: the script's line, and the module of the model that computes it.

PyTorch hands one text from forward operators to those of their gradients, the stack trace. The capture writes all
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
    generator: int | None = None
    """The number of the script's generator that a random operator draws from; None for PyTorch's own."""

    def encode(self) -> str:
        """Return the origin as one text. `decode_origin` ignores what PyTorch adds at its end."""
        path, kind = (self.module.path, self.module.kind) if self.module is not None else ("", "")
        generator = "" if self.generator is None else str(self.generator)
        return SEPARATOR.join((self.line, path, kind, generator, ""))


def decode_origin(text: str | None) -> OperatorOrigin:
    """Return the origin in a stack trace of the capture."""
    line, *rest = (text or "").split(SEPARATOR)
    if len(rest) < 3:
        return OperatorOrigin(line)
    path, kind, generator = rest[:3]
    return OperatorOrigin(line, ModuleName(path, kind) if path else None, int(generator) if generator else None)
