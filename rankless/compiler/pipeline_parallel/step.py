"""Run one worker's part of a program in a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankless.compiler.lowering.value_check import ValueCheck
from rankless.compiler.pipeline_parallel.data_flow import ValueKey
from rankless.compiler.pipeline_parallel.microbatch_lowering import ArgumentExchange
from rankless.compiler.pipeline_parallel.random_draws import RandomDraws
from rankless.compiler.pipeline_parallel.schedules import Unit
from rankless.compiler.pipeline_parallel.stage_value_streams import Streams, TransferredValue, Transport
from rankless.compiler.scheduling.parameter_gathers import copy_if_shared


@dataclass(frozen=True, kw_only=True)
class PartFunction:
    """The function of a part of a worker's step.

    Attributes:
        function (Callable[..., Sequence[Tensor]]): The function. One before or after all units takes the streams first.
        inputs (tuple[ValueKey, ...]): The values that it takes.
        outputs (tuple[ValueKey, ...]): Those that it returns and that others need.
        sums (tuple[str, ...]): Those that it returns after them, to be summed over all microbatches.
        owned (frozenset[str]): Those of them with memory that nothing else has.
        gathered (tuple[ValueKey, ...]): Parameters that it takes in pieces, and returns whole after all else.
    """

    function: Callable[..., Sequence[Tensor]]
    inputs: tuple[ValueKey, ...]
    outputs: tuple[ValueKey, ...] = ()
    sums: tuple[str, ...] = ()
    owned: frozenset[str] = frozenset()
    gathered: tuple[ValueKey, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PipelineStep:
    """One worker's part of a program, ready to run."""

    arguments: tuple[tuple[ValueKey, int, tuple[int, int, int] | None], ...]
    """For each input value its name, the number of the input, and dim, start and length of a microbatch's piece."""
    exchanges: tuple[tuple[int, ArgumentExchange], ...]
    """The inputs that are gathered first; see Note [arguments of microbatches]."""
    prepare: PartFunction
    units: tuple[tuple[Unit, PartFunction], ...]
    finish: PartFunction
    sends: Mapping[Unit, tuple[tuple[str, int, TransferredValue], ...]]
    """The values that each unit sends, to which worker, and what it must know of them."""
    receives: Mapping[Unit | None, tuple[tuple[ValueKey, int], ...]]
    """The values that a unit needs first of other workers' units, and from which worker; None for the end."""
    streams: Mapping[int, tuple[TransferredValue, ...]]
    uses: Mapping[ValueKey, int]
    outputs: tuple["StepOutput", ...]
    shared: tuple[int, ...]
    """The number of one input in each memory that workers share; see Note [shards in one memory]."""
    draws: RandomDraws
    worker: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """An output of the program.

    Attributes:
        worker (int): The worker that computes it.
        is_shared (bool): Whether the others get it.
        repeats (int | None): The number of an earlier output that is the same value; None for a value of its own.
        described (TransferredValue): Its shape, or that of what a worker without it returns.
        check (ValueCheck | None): Compares it after the step, if Python has read it.
    """

    worker: int
    is_shared: bool
    is_gradient: bool
    repeats: int | None
    described: TransferredValue
    check: ValueCheck | None = None


class PipelineRun:
    """Runs one worker's part of a program, once per call."""

    def __init__(self, step: PipelineStep, transport: Transport) -> None:
        self.step = step
        self._transport = transport

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Return the program's outputs from its inputs.

        Raises:
            OtherValueRead: A value that Python read is another one. All workers raise the same.
        """
        step = self.step
        streams = Streams(self._transport, step.streams)
        values: dict[ValueKey, Tensor] = {}
        remaining = dict(step.uses)
        gathered = {number: exchange.run(inputs[number]) for number, exchange in step.exchanges}
        given = [gathered.get(number, value) for number, value in enumerate(inputs)] if gathered else inputs
        for key, number, piece in step.arguments:
            if key in remaining:
                values[key] = given[number] if piece is None else given[number].narrow(*piece)
        self._run(step.prepare, values, remaining, streams)
        for unit, function in step.units:
            values.update((key, streams.receive(key, source)) for key, source in step.receives[unit])
            self._run(function, values, remaining)
            for name, target, described in step.sends[unit]:
                streams.send(take(ValueKey(name, unit.microbatch), values, remaining), target, described)
        values.update((key, streams.receive(key, source)) for key, source in step.receives[None])
        found = self._run(step.finish, values, remaining, streams)
        step.draws.end()
        outputs = list(self._exchange(found, streams))
        self._transport.finish()
        outputs = self._copy_shared(outputs, inputs)
        for output, value in zip(step.outputs, outputs, strict=True):
            if output.check is not None:
                output.check(value)
        return outputs

    def _copy_shared(self, outputs: list[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return outputs with copies of those that lie in memory of parameters which workers share.

        Gradients have memory of their own.
        """
        shared = [inputs[number] for number in self.step.shared]
        if not shared:
            return outputs
        places = [place for place, output in enumerate(self.step.outputs) if not output.is_gradient]
        for place, value in zip(places, copy_if_shared([outputs[place] for place in places], shared), strict=True):
            outputs[place] = value
        return outputs

    def _run(
        self,
        part: PartFunction,
        values: dict[ValueKey, Tensor],
        remaining: dict[ValueKey, int],
        streams: Streams | None = None,
    ) -> Sequence[Tensor]:
        """Run a part of the step, and keep what others need of it. Return all that it returns."""
        before = () if streams is None else (streams,)
        found = part.function(*before, *[take(key, values, remaining) for key in part.inputs])
        values.update(zip(part.outputs, found, strict=False))
        for name, value in zip(part.sums, found[len(part.outputs) :], strict=False):
            key = ValueKey(name, is_sum=True)
            known = values.get(key)
            if known is not None:
                known.add_(value)
            else:  # later terms are added in place, so the first one needs memory that nothing else has
                values[key] = value if name in part.owned else value.clone()
        values.update(zip(part.gathered, found[len(part.outputs) + len(part.sums) :], strict=False))
        return found

    def _exchange(self, found: Sequence[Tensor], streams: Streams) -> Sequence[Tensor]:
        """Return all outputs of the program: send those of this worker, and receive those of others."""
        step, own = self.step, iter(found)
        outputs: list[Tensor] = []
        for number, output in enumerate(step.outputs):
            is_own = output.worker == step.worker
            if is_own:
                value = next(own)
            elif output.repeats is not None:
                value = outputs[output.repeats]
            elif output.is_shared:
                value = streams.receive(("output", number), output.worker)
            else:
                described = output.described
                value = torch.empty(described.require_shape(), dtype=described.dtype, device=described.device)
            # An output that equals an earlier one is not sent again: the others take the earlier one.
            if is_own and output.is_shared and output.repeats is None:
                for target in range(step.workers):
                    if target != step.worker:
                        streams.send(value, target, output.described)
            outputs.append(value)
        return outputs


def take(key: ValueKey, values: dict[ValueKey, Tensor], remaining: dict[ValueKey, int]) -> Tensor:
    """Return a value, and forget it after its last use."""
    remaining[key] -= 1
    return values[key] if remaining[key] else values.pop(key)
