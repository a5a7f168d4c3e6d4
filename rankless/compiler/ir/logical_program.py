"""The logical program: the operators of a job in logical shapes, before shardings are assigned."""

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, fx

from rankless.compiler.ir.sparse_tensor_parts import list_dense_parts

InputKind = Literal["parameter", "buffer", "argument", "constant"]
OutputKind = Literal["result", "gradient", "mutation", "check"]
"""A "check" is a value that the job's Python read; see Note [values that Python reads]."""


@dataclass(frozen=True)
class LogicalValue:
    """A tensor of the program without its numbers: shape, strides, dtype and device.

    The methods have the names of a tensor's.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False
    """Whether it stores only some elements. Such a value has no pieces: every rank has the whole one."""

    def stride(self) -> tuple[int, ...]:
        """Return the strides per dim, in elements."""
        return self.strides

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self.dtype.itemsize


def describe_value(value: Any) -> Any:
    """Convert a traced value, or several, to `LogicalValue`s, without the fake tensors of the trace."""
    if isinstance(value, list | tuple):
        return tuple(describe_value(item) for item in value)
    if not isinstance(value, Tensor):
        return value
    is_sparse = value.layout != torch.strided
    return LogicalValue(tuple(value.shape), tuple(value.stride()), value.dtype, value.device, is_sparse)


@dataclass(frozen=True, kw_only=True)
class ProgramInput:
    """An input of the program: a parameter or buffer by name, the i-th tensor argument, or a constant's value."""

    kind: InputKind
    name: str
    index: int = 0
    constant: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ProgramOutput:
    """An output: the i-th tensor of the result, a parameter's gradient, or a parameter's or buffer's new value."""

    kind: OutputKind
    name: str
    index: int = 0
    renews_memory: bool = False
    """Whether the new value gets new memory, as after `tensor.data = value`."""
    expected: Any = None
    """For a check, the value that the program was captured for."""


@dataclass(frozen=True, kw_only=True)
class LogicalProgram:
    """A captured job: a functional ATen graph with named inputs and outputs and a script line on every node.

    Node `meta["val"]` is a `LogicalValue`, or a tuple of them; `meta["line"]` is "file.py:12"; `meta["module"]` is the
    `ModuleName` of the module that computes it, or None; `meta["backward"]` is whether it computes gradients;
    `meta["counter"]` is whether it draws random numbers by counter; `meta["checkpoint"]` is the number of the script's
    activation checkpoint that computes it, or None, and `meta["kept"]` whether the checkpoint keeps its value.
    """

    name: str
    graph: fx.Graph
    inputs: dict[fx.Node, ProgramInput]
    outputs: tuple[tuple[fx.Node, ProgramOutput], ...]
    recompute: float = 0.0
    """How much of what the model's blocks compute is computed again for gradients, from 0 to 1, besides checkpoints."""
    sequence_parallel: bool = False
    """Whether the axis `tensor` divides activations between layers too; see `sequence_parallel`."""

    def text(self) -> str:
        """Return the program as lines of text, equal on all ranks that captured the same program.

        Lines of the script are no part of it: hosts may keep the same script in different folders.
        """
        return "\n".join(text for text, _ in self.operations())

    def operations(self) -> list[tuple[str, str]]:
        """Return the lines of `text`, each with its line of the script; "" for those without one."""
        lines = []
        for node in self.graph.nodes:
            if node.op == "output":
                continue
            if node in self.inputs:
                program_input = self.inputs[node]
                description = f"{program_input.kind} {program_input.name}{hash_constant(program_input.constant)}"
            else:
                description = f"{node.target}({', '.join(map(repr, node.args))}, {node.kwargs})"
                description += " by counter" if draws_by_counter(node) else ""
                if node.meta.get("checkpoint") is not None:
                    description += f" in checkpoint {node.meta['checkpoint']}" + ", kept" * bool(node.meta.get("kept"))
                if "generator" in node.meta:
                    description += f" from generator {self.generators.index(node.meta['generator'])} of the script"
                if "start" in node.meta:
                    seed = node.meta["start"].seed
                    description += ", forked" if seed is None else f" with seed {seed}"
            lines.append((f"{node.name} = {description} : {format_value(node)}", node.meta.get("line", "")))
        lines += [(f"recompute {self.recompute}", "")] * bool(self.recompute)
        lines += [("sequence parallel", "")] * self.sequence_parallel
        lines += [(f"-> {node.name} : {output.kind} {output.name}", "") for node, output in self.outputs]
        return lines

    @cached_property
    def is_random(self) -> bool:
        """Whether the program draws random numbers."""
        return any(map(is_random_node, self.graph.nodes))

    @cached_property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The generators of the script from which it draws, each once."""
        return tuple(dict.fromkeys(node.meta["generator"] for node in self.graph.nodes if "generator" in node.meta))

    def digest(self) -> str:
        """Return the first sixteen hexadecimal digits of the SHA-256 of `text`."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]


def is_random_node(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def draws_by_counter(node: fx.Node) -> bool:
    """Return whether a node draws its numbers by counter; see `rankless.compiler.ir.counter_distributions`."""
    return bool(node.meta.get("counter"))


def is_fresh(node: fx.Node) -> bool:
    """Return whether a value shares no memory with another, according to its operator's schema."""
    if node.target is getitem:
        return is_fresh(node.all_input_nodes[0])
    operator = node.target
    return isinstance(operator, torch._ops.OpOverload) and all(
        result.alias_info is None for result in operator._schema.returns
    )


def format_operator(target: Any) -> str:
    """Return the short name of an operator, as "view" for aten._unsafe_view.default.

    "batch_norm" stands for PyTorch's variants native_batch_norm, _native_batch_norm_legit and so on.
    """
    name: str = target._schema.name if isinstance(target, torch._ops.OpOverload) else target.__name__
    short = name.rpartition("::")[2].strip("_")
    return re.sub(r"^(unsafe|native)_|_legit|_functional$", "", short)


def format_value(node: fx.Node) -> str:
    """Return the shapes and dtypes of a node's value as text."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return ", ".join(
        f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}" if isinstance(item, LogicalValue) else str(item)
        for item in values
    )


def hash_constant(constant: Tensor | None) -> str:
    """Return a digest of a constant's bytes, so that ranks with different constants are detected."""
    if constant is None:
        return ""
    digest = hashlib.sha256()
    for part in list_dense_parts(constant.detach()):
        plain = part.cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(plain.view(torch.uint8).numpy().tobytes() if plain.dim() else repr(plain.item()).encode())
    return " " + digest.hexdigest()[:8]
