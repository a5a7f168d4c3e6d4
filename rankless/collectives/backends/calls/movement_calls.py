"""The checks of the arguments of the collectives that only move values, and what each then runs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rankless.collectives.backends.calls.call_arguments import (
    PreparedCall,
    flatten_bytes,
    require_count,
    require_dense,
    require_one_dtype,
    require_values,
    split_bytes,
    write_back,
)
from rankless.collectives.backends.shared_movement import SharedMovement


def prepare_broadcast(movement: SharedMovement, tensor: Tensor, root: int) -> PreparedCall:
    """Copy the tensor of the root to all ranks. Raises `CallError` for a tensor that is not dense and on the CPU."""
    require_dense([tensor])

    def run() -> None:
        flat = flatten_bytes(tensor)
        movement.broadcast(flat, root)
        write_back(tensor, flat)

    return PreparedCall(run, [tensor], [tensor])


def prepare_all_gather(movement: SharedMovement, calls: Sequence[tuple[Sequence[Tensor], Tensor]]) -> PreparedCall:
    """Copy the tensor of each rank into the list of all ranks, for each pair of a list and a tensor.

    Raises:
        CallError: A tensor is not dense and on the CPU, or lists, dtypes or sizes do not match.
    """
    written = [output for outputs, _ in calls for output in outputs]
    for outputs, value in calls:
        require_count(outputs, movement.size, "outputs")
        require_dense([*outputs, value])
        require_one_dtype([*outputs, value])
        require_values(outputs[movement.rank], value.numel(), "this rank's output of an all_gather")

    def run() -> None:
        for outputs, value in calls:
            flats = [flatten_bytes(output) for output in outputs]
            movement.all_gather(flatten_bytes(value), flats)
            for output, flat in zip(outputs, flats, strict=True):
                write_back(output, flat)

    return PreparedCall(run, written, [list(calls[0][0])] if len(calls) == 1 else written)


def prepare_all_gather_single(
    movement: SharedMovement, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> PreparedCall:
    """Copy the tensors of all ranks, one after the other, into the output; for each output and input.

    Raises:
        CallError: As `prepare_all_gather`.
    """
    require_count(outputs, len(inputs), "outputs")
    require_dense([*outputs, *inputs])
    for output, value in zip(outputs, inputs, strict=True):
        require_one_dtype([output, value])
        require_values(output, movement.size * value.numel(), "the output of an all_gather")

    def run() -> None:
        for output, value in zip(outputs, inputs, strict=True):
            flat, flat_value = flatten_bytes(output), flatten_bytes(value)
            if len(flat):
                movement.all_gather(flat_value, flat.split(len(flat_value)))
            write_back(output, flat)

    return PreparedCall(run, outputs, list(outputs))


def prepare_gather(movement: SharedMovement, outputs: list[Tensor], value: Tensor, root: int) -> PreparedCall:
    """Copy the tensor of each rank into the root's list. Others pass no outputs. Raises as `prepare_all_gather`."""
    require_dense([*outputs, value])
    require_one_dtype([*outputs, value])
    if movement.rank == root:
        require_count(outputs, movement.size, "outputs")
        for output in outputs:
            require_values(output, value.numel(), "the outputs of a gather")

    def run() -> None:
        flats = [flatten_bytes(output) for output in outputs]
        movement.gather(flatten_bytes(value), flats or None, root)
        for output, flat in zip(outputs, flats, strict=True):
            write_back(output, flat)

    return PreparedCall(run, outputs, [outputs])


def prepare_scatter(movement: SharedMovement, output: Tensor, inputs: list[Tensor], root: int) -> PreparedCall:
    """Copy the tensors of the root's list to the ranks. Other ranks pass no inputs. Raises as `prepare_all_gather`."""
    require_dense([*inputs, output])
    require_one_dtype([*inputs, output])
    if movement.rank == root:
        require_count(inputs, movement.size, "inputs")
        for value in inputs:
            require_values(value, output.numel(), "the inputs of a scatter")

    def run() -> None:
        flat, values = flatten_bytes(output), [flatten_bytes(value) for value in inputs]
        movement.scatter(flat, values or None, root)
        write_back(output, flat)

    return PreparedCall(run, [output], [output])


def prepare_all_to_all(movement: SharedMovement, outputs: list[Tensor], inputs: list[Tensor]) -> PreparedCall:
    """Copy `inputs[j]` of rank i to `outputs[i]` of rank j. Raises as `prepare_all_gather`."""
    require_count(outputs, movement.size, "outputs")
    require_count(inputs, movement.size, "inputs")
    require_dense([*outputs, *inputs])
    require_one_dtype([*outputs, *inputs])
    require_values(outputs[movement.rank], inputs[movement.rank].numel(), "what a rank sends to itself")

    def run() -> None:
        flats = [flatten_bytes(output) for output in outputs]
        movement.all_to_all(flats, [flatten_bytes(value) for value in inputs])
        for output, flat in zip(outputs, flats, strict=True):
            write_back(output, flat)

    return PreparedCall(run, outputs, outputs)


def prepare_all_to_all_single(
    movement: SharedMovement,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
) -> PreparedCall:
    """Copy rows of the input to all ranks, and theirs to rows of the output.

    Raises:
        CallError: As `prepare_all_gather`, or the split sizes do not fit the rows.
    """
    require_dense([output, input])
    require_one_dtype([output, input])
    output_bytes = split_bytes(output, output_split_sizes, movement.size)
    input_bytes = split_bytes(input, input_split_sizes, movement.size)

    def run() -> None:
        flat = flatten_bytes(output)
        movement.all_to_all(flat.split(output_bytes), flatten_bytes(input).split(input_bytes))
        write_back(output, flat)

    return PreparedCall(run, [output], [output])


def prepare_barrier(movement: SharedMovement) -> PreparedCall:
    """Wait for all ranks."""
    outputs: list[Any] = []
    return PreparedCall(movement.barrier, [], outputs)
