"""The logical program: what a job computes, in whole (logical) shapes, before anything is placed on a mesh."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, fx

InputKind = Literal["parameter", "buffer", "argument", "constant"]
OutputKind = Literal["result", "gradient", "mutation"]


@dataclass(frozen=True)
class LogicalValue:
    """What is known of a tensor of the program: all but its numbers. The methods are named as a tensor's."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stride(self) -> tuple[int, ...]:
        """Steps in memory, in elements, per dim."""
        return self.strides

    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize


def describe_value(value: Any) -> Any:
    """A traced value, or several, without the fake tensors that tracing leaves behind."""
    if isinstance(value, list | tuple):
        return tuple(describe_value(item) for item in value)
    if not isinstance(value, Tensor):
        return value
    return LogicalValue(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)


@dataclass(frozen=True, kw_only=True)
class ProgramInput:
    """One input of the program: a parameter or buffer by name, the i-th tensor argument, or a constant's value."""

    kind: InputKind
    name: str
    index: int = 0
    constant: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ProgramOutput:
    """One output: the i-th tensor of the job's result, a parameter's gradient, or a buffer's (argument's) new value."""

    kind: OutputKind
    name: str
    index: int = 0


@dataclass(frozen=True, kw_only=True)
class LogicalProgram:
    """A job, captured: a functional ATen graph with its inputs and outputs named, every node with its line.

    Node `meta["val"]` is a `LogicalValue`, or a tuple of them; `meta["line"]` is "file.py:12".
    """

    name: str
    graph: fx.Graph
    inputs: dict[fx.Node, ProgramInput]
    outputs: tuple[tuple[fx.Node, ProgramOutput], ...]

    def text(self) -> str:
        """The program as lines of text, the same on every rank that captured the same program."""
        lines = []
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            if node in self.inputs:
                given = self.inputs[node]
                what = f"{given.kind} {given.name}{hash_constant(given.constant)}"
            else:
                what = f"{node.target}({', '.join(map(repr, node.args))}, {node.kwargs})"
            lines.append(f"{node.name} = {what} : {format_value(node)}  # {node.meta.get('line', '')}")
        lines += [f"-> {node.name} : {output.kind} {output.name}" for node, output in self.outputs]
        return "\n".join(lines)

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(map(is_random_node, self.graph.nodes))

    def digest(self) -> str:
        """Sixteen hexadecimal digits of `text`'s SHA-256."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]


def is_random_node(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def format_value(node: fx.Node) -> str:
    """The shapes and dtypes of a node's value."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return ", ".join(
        f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}" if isinstance(item, LogicalValue) else str(item)
        for item in values
    )


def hash_constant(constant: Tensor | None) -> str:
    """A digest of a constant's bytes, so that ranks with other constants are found."""
    if constant is None:
        return ""
    data = (
        constant.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        if constant.dim()
        else repr(constant.item()).encode()
    )
    return " " + hashlib.sha256(data).hexdigest()[:8]
