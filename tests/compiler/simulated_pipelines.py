"""Run all workers of a pipeline in one process: one thread each, of which one computes at a time.

Each worker has a state of PyTorch's generator of its own, as processes have.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from queue import Queue
from typing import Any

import torch
from support.devices import DEVICE
from torch import Tensor, nn

from rankless.compiler.capture.capture import ArgumentShape, JobSource, capture
from rankless.compiler.capture.trace_to_program import named_tensors
from rankless.compiler.capture.value_reads import ValueReads
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.ir.memory_order import find_memory_order
from rankless.compiler.local_program import LocalProgram
from rankless.compiler.pipeline_parallel.build_pipeline_program import build_pipeline_program
from rankless.compiler.pipeline_parallel.schedules import StageWorkers, make_schedule
from rankless.compiler.pipeline_parallel.stages import PipelineOptions, Stages, find_stages
from rankless.compiler.scheduling.gradient_buckets_and_state_storage import StateStorage
from rankless.parallel.mesh import Mesh, MeshAxis
from rankless.parallel.tensor_placement import Replicate, Shard, split_lengths
from rankless.records.parallel_plan import PipelineSchedule

PATIENCE_SECONDS = 60


class SimulatedTransport:
    """Moves tensors between threads. A thread that waits lets others compute."""

    def __init__(
        self,
        worker: int,
        turn: threading.Lock,
        queues: Mapping[tuple[int, int], "Queue[Tensor]"],
        generators: Sequence[torch.Generator],
    ) -> None:
        self._worker = worker
        self._turn = turn
        self._queues = queues
        self._generators = generators
        self.sent_bytes = 0

    def send(self, value: Tensor, target: int) -> None:
        self.sent_bytes += value.numel() * value.element_size()
        self._queues[self._worker, target].put(value.clone())

    def receive(self, out: Tensor, source: int) -> None:
        states = read_states(self._generators)
        self._turn.release()
        try:
            value = self._queues[source, self._worker].get(timeout=PATIENCE_SECONDS)
        finally:
            self._turn.acquire()
        write_states(self._generators, states)
        assert value.shape == out.shape, (value.shape, out.shape)
        assert value.dtype == out.dtype
        out.copy_(value)

    def finish(self) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class PipelineOutcome:
    """What the workers of a pipeline have computed; results are asserted to be equal on all of them."""

    results: list[Tensor]
    gradients: dict[str, Tensor]
    mutations: dict[str, Tensor]
    random_states: list[Tensor]
    programs: list[LocalProgram]
    stages: Stages
    sent_bytes: list[int]


def capture_job(
    function: Callable[..., Any],
    modules: Mapping[str, nn.Module],
    arguments: Sequence[Tensor],
    trains: bool,
    reads: Sequence[Any] = (),
    **settings: Any,
) -> LogicalProgram:
    """Return the program of a job; `settings` are those of `JobSource`, `reads` the values that its Python reads."""
    shapes = [
        ArgumentShape(shape=tuple(item.shape), dtype=item.dtype, order=find_memory_order(item.shape, item.stride()))
        for item in arguments
    ]
    source = JobSource(name="job", function=function, modules=modules, trains=trains, **settings)
    return capture(source, lambda tensors: (tuple(tensors), {}), shapes, DEVICE, reads=ValueReads(reads)).program


def cut(
    program: LogicalProgram, modules: Mapping[str, nn.Module], count: int, owners: Mapping[str, int] | None = None
) -> Stages:
    """Return the stages of a program."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(item), name)
        for name, item in named_tensors(modules).items()
        if isinstance(item, nn.Parameter)
    }
    return find_stages(program, count, names, owners)


def run_on_simulated_pipeline(
    program: LogicalProgram,
    modules: Mapping[str, nn.Module],
    arguments: Sequence[Tensor],
    *,
    workers: int,
    microbatches: int,
    schedule: PipelineSchedule = "1f1b",
    divided: bool = True,
    batch_dims: Sequence[int | None] | None = None,
    owners: Mapping[str, int] | None = None,
    generators: Sequence[torch.Generator] = (),
    stage_workers: StageWorkers | None = None,
) -> PipelineOutcome:
    """Cut a program into stages, and run all of its workers.

    Args:
        program: The program of a job.
        modules: The job's modules.
        arguments: The job's arguments.
        workers: The number of workers.
        microbatches: The number of microbatches.
        schedule: The order of units.
        divided: Whether only the worker of a parameter's stage has it.
        batch_dims: The dim of each argument that microbatches divide, if any. Default: dim 0.
        owners: The stages of parameters that an earlier job has decided.
        generators: Those from which the job draws. Default: PyTorch's default generator.
        stage_workers: The workers of each stage. Default: one for each stage.
    """
    tensors, generators = named_tensors(modules), generators or (torch.default_generator,)
    stage_workers = stage_workers or find_stage_workers(workers, schedule)
    stages = cut(program, modules, len(stage_workers.of), owners)
    places = assign(stages, tensors, stage_workers) if divided else {}
    turn, programs = threading.Lock(), []
    transports = make_transports(workers, turn, generators)
    sizes = {"workers": workers, "microbatches": microbatches, "trains": has_backward(program)}
    order = make_schedule(schedule, stage_workers=stage_workers, **sizes)
    for transport in transports:
        options = PipelineOptions(
            axis=MeshAxis(name="pipeline", role="pipeline", rank=len(programs), size=workers),
            stages=stages,
            stage_workers=stage_workers,
            schedule=order,
            microbatches=microbatches,
            batch_lengths=divide(arguments, batch_dims, microbatches),
            transport=transport,
        )
        programs.append(build(program, tensors, options, places))
    values = run_threads(programs, places, tensors, arguments, turn, generators)
    return make_outcome(programs, values, stages, places, [item.sent_bytes for item in transports])


def split_workers(sizes: Sequence[int]) -> StageWorkers:
    """Return the workers of stages with these numbers of workers, which follow each other."""
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return StageWorkers(tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)))


def find_stage_workers(workers: int, schedule: PipelineSchedule) -> StageWorkers:
    """Return one worker for each stage; `interleaved` has two stages for each worker."""
    return StageWorkers.alternate(stages=workers * (2 if schedule == "interleaved" else 1), workers=workers)


def make_transports(
    workers: int, turn: threading.Lock, generators: Sequence[torch.Generator]
) -> list[SimulatedTransport]:
    """Return the transport of each worker; `turn` is held by the one that runs."""
    queues: dict[tuple[int, int], Queue[Tensor]] = {pair: Queue() for pair in product(range(workers), repeat=2)}
    return [SimulatedTransport(worker, turn, queues, generators) for worker in range(workers)]


def assign(stages: Stages, tensors: Mapping[str, Tensor], stage_workers: StageWorkers) -> dict[str, int]:
    """Return the worker that has each parameter: those of a stage in turns, and tied ones the same."""
    names = [name for name in stages.owners if tensors[name].dim()]
    first: dict[int, int] = {}
    for number, name in enumerate(names):
        workers = stage_workers.of[stages.owners[name]]
        first.setdefault(id(tensors[name]), workers[number % len(workers)])
    return {name: first[id(tensors[name])] for name in names}


def divide(
    arguments: Sequence[Tensor], dims: Sequence[int | None] | None, microbatches: int
) -> tuple[Shard | None, ...]:
    """Return how microbatches divide arguments, along dim 0 if nothing else is said."""
    if dims is None:
        dims = [0 if item.dim() else None for item in arguments]
    return tuple(
        None if dim is None else Shard(dim, split_lengths(item.shape[dim], microbatches))
        for item, dim in zip(arguments, dims, strict=True)
    )


def build(
    program: LogicalProgram, tensors: Mapping[str, Tensor], options: PipelineOptions, places: Mapping[str, int]
) -> LocalProgram:
    """Return the program of one worker; `places` are the workers of parameters that one worker has."""
    workers = options.axis.size
    mesh = Mesh(rank=options.axis.rank, size=workers, device=DEVICE, axes=(options.axis,))
    owned = {name: Shard(0, one_owner(tensors[name].shape, worker, workers)) for name, worker in places.items()}
    shardings = [(Replicate(),)] * len(options.batch_lengths)
    return build_pipeline_program(program, shardings, mesh, options, storage=StateStorage(owned=owned))


def make_outcome(
    programs: Sequence[LocalProgram],
    values: Sequence[tuple[Sequence[Tensor], list[Tensor]]],
    stages: Stages,
    places: Mapping[str, int],
    sent_bytes: list[int],
) -> PipelineOutcome:
    """Return what all workers have computed."""
    found: dict[str, dict[str, Tensor]] = {"gradient": {}, "mutation": {}}
    results = []
    for number, output in enumerate(programs[0].outputs):
        if output.kind == "check":
            continue
        is_divided = output.kind == "gradient" and output.name in places
        owner = places[output.name] if is_divided else 0
        value = values[owner][0][number]
        if not is_divided:
            for other, _ in values:
                torch.testing.assert_close(other[number], value, rtol=0, atol=0, equal_nan=True)
        if output.kind == "result":
            results.append(value)
        else:
            found[output.kind][output.name] = value
    for outputs, _ in values:
        gradients = [
            item for item, output in zip(outputs, programs[0].outputs, strict=True) if output.kind == "gradient"
        ]
        memories = [item.untyped_storage().data_ptr() for item in gradients if item.numel()]
        assert len(memories) == len(set(memories)), "two gradients share memory"
    for _, states in values:
        assert all(map(torch.equal, states, values[0][1]))
    return PipelineOutcome(
        results=results,
        gradients=found["gradient"],
        mutations=found["mutation"],
        random_states=values[0][1],
        programs=list(programs),
        stages=stages,
        sent_bytes=sent_bytes,
    )


def has_backward(program: LogicalProgram) -> bool:
    """Return whether a program computes gradients."""
    return any(output.kind == "gradient" for _, output in program.outputs)


def read_states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Return the states of generators."""
    return [generator.get_state() for generator in generators]


def write_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    """Set the states of generators."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def one_owner(shape: Sequence[int], owner: int, workers: int) -> tuple[int, ...]:
    """Return the rows of a parameter on each worker: all on one."""
    return tuple(shape[0] if worker == owner else 0 for worker in range(workers))


def run_threads(
    programs: Sequence[LocalProgram],
    places: Mapping[str, int],
    tensors: Mapping[str, Tensor],
    arguments: Sequence[Tensor],
    turn: threading.Lock,
    generators: Sequence[torch.Generator],
) -> list[tuple[Sequence[Tensor], list[Tensor]]]:
    """Run all workers, and return the outputs of each, and the states of its generators."""
    start = read_states(generators)
    found: dict[int, Any] = {}

    def work(worker: int) -> None:
        turn.acquire()
        try:
            write_states(generators, start)
            inputs = []
            for described in programs[worker].inputs:
                if described.kind == "argument":
                    inputs.append(arguments[described.index])
                elif described.constant is not None:
                    inputs.append(described.constant)
                else:
                    value = tensors[described.name].detach()
                    is_here = places.get(described.name, worker) == worker
                    inputs.append(value if is_here else value[:0])
            found[worker] = programs[worker](inputs), read_states(generators)
        except BaseException as error:
            found[worker] = error
        finally:
            turn.release()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    failed = [item for item in found.values() if isinstance(item, BaseException)]
    if failed:
        raise next((item for item in failed if type(item).__name__ != "Empty"), failed[0])
    assert len(found) == len(programs), "a worker still waits"
    return [found[worker] for worker in range(len(programs))]
