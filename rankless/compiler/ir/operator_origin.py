"""Where an operator of a program comes from: the script's line, and the module of the model that computes it.

PyTorch hands one text from forward operators to those of their gradients, the stack trace. The capture writes all
parts into this text.
"""

from dataclasses import dataclass

SEPARATOR = "\x1f"
PARTS = 4
"""The parts of an encoded origin after its line."""


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
    checkpoint: int | None = None
    """The number of the activation checkpoint that computes it; None outside of checkpoints."""

    def encode(self) -> str:
        """Return the origin as one text. `decode_origin` ignores what PyTorch adds at its end."""
        path, kind = (self.module.path, self.module.kind) if self.module is not None else ("", "")
        numbers = ["" if number is None else str(number) for number in (self.generator, self.checkpoint)]
        return SEPARATOR.join((self.line, path, kind, *numbers, ""))


def decode_origin(text: str | None) -> OperatorOrigin:
    """Return the origin in a stack trace of the capture."""
    line, *rest = (text or "").split(SEPARATOR)
    if len(rest) < PARTS:
        return OperatorOrigin(line)
    path, kind, *numbers = rest[:PARTS]
    generator, checkpoint = (int(number) if number else None for number in numbers)
    return OperatorOrigin(line, ModuleName(path, kind) if path else None, generator, checkpoint)
