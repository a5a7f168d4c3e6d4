"""Records of plans as runs write them, for tests of their pictures: of any mesh, model and division."""

from collections.abc import Callable, Sequence
from math import prod

from rankless.compiler.pipeline_parallel.schedules import StageWorkers, describe_timeline, make_schedule
from rankless.plan_picture.picture_data import PicturedPlan, collect_plan
from rankless.records.job_programs import (
    DefinedJob,
    JobMemory,
    JobProgram,
    PipelineRecord,
    PipelineStage,
    ProgramCommunication,
    ProgramInputRecord,
    ProgramRecord,
)
from rankless.records.parallel_plan import JobPlan, PipelinePlan, PlannedAxis, StateDivision, StatePlan

LINE = "/home/someone/train.py:12"
LONG = "transformer_with_a_name_that_goes_on"


def make_axes(**sizes: int) -> tuple[PlannedAxis, ...]:
    return tuple(PlannedAxis(name=name, role=name, size=size) for name, size in sizes.items())


def gpt(layers: int = 12) -> dict[str, int]:
    """Return the parameters of a small language model, with their bytes."""
    sizes = {"model.words.weight": 40_000_000, "model.positions.weight": 1_000_000}
    for layer in range(layers):
        sizes |= {f"model.layers.{layer}.attention.weight": 4_000_000, f"model.layers.{layer}.mlp.weight": 8_000_000}
    return sizes | {"model.norm.weight": 4_000, "model.head.weight": 40_000_000}


def make_move(kind: str, value: str, size: int, *, axis: str = "data", **others: object) -> ProgramCommunication:
    fields = {"purpose": "gradient", "line": "/home/someone/train.py:14", "backward": True, "reason": "a reason"}
    return ProgramCommunication(
        kind=kind, value=value, bytes=size, sent_bytes=size, axis=axis, overlapped=True, **{**fields, **others}
    )


def make_program(sizes: dict[str, int], moves: Sequence[ProgramCommunication] = (), **others: object) -> JobProgram:
    """Return a program that takes parameters of these bytes, and moves the sum of their gradients."""
    gradients = make_move("all_reduce", ", ".join(sizes), sum(sizes.values()))
    argument = ProgramInputRecord(
        kind="argument", name="words", shape=(16, 8), dtype="int64", bytes=1024, placement="dim 0 split 8+8"
    )
    parameters = [
        ProgramInputRecord(kind="parameter", name=name, shape=(size,), dtype="uint8", bytes=size, placement="any")
        for name, size in sizes.items()
    ]
    fields = {"job": "train", "line": LINE, "trains": True, "workers": 2, "operators": 517, "without_rule": ()}
    return JobProgram(**{"inputs": (argument, *parameters), "moves": (gradients, *moves), **fields, **others})


def make_states(
    sizes: dict[str, int], divide: Callable[[str, int], StateDivision | None], kinds: Sequence[str]
) -> dict[str, StatePlan]:
    return {
        name: StatePlan(shape=(size,), dtype="uint8", **dict.fromkeys(kinds, list_divisions(divide(name, size))))
        for name, size in sizes.items()
    }


def list_divisions(division: StateDivision | None) -> tuple[StateDivision, ...]:
    return () if division is None else (division,)


def make_records(program: JobProgram, plan: JobPlan | None, held: int) -> list[ProgramRecord]:
    """Return the records of a run: a program, its job, and a job that was not called."""
    memory = JobMemory(parameters=held, buffers=0, gradients=held, optimizer_state=2 * held, activations=30_000_000)
    return [
        program,
        DefinedJob(job="train", line=LINE, called=True, memory=memory, plan=plan),
        DefinedJob(job="predict", line="/home/someone/train.py:18", called=False),
    ]


def collect(records: Sequence[ProgramRecord], axes: Sequence[PlannedAxis]) -> PicturedPlan:
    return collect_plan("train.py", records, axes)


def data_parallel(workers: int = 2, sizes: dict[str, int] | None = None) -> PicturedPlan:
    """Return a plan in which every worker holds everything."""
    sizes = gpt() if sizes is None else sizes
    program = make_program(sizes, workers=workers)
    plan = JobPlan(states=make_states(sizes, lambda _name, _size: None, ()))
    return collect(make_records(program, plan, sum(sizes.values())), make_axes(data=workers))


def divided(
    workers: int = 4,
    sizes: dict[str, int] | None = None,
    kinds: Sequence[str] = ("value", "gradient", "optimizer_state"),
) -> PicturedPlan:
    """Return a plan with states in pieces, except for parameters with fewer elements than workers."""
    sizes = gpt() if sizes is None else sizes

    def divide(_name: str, size: int) -> StateDivision | None:
        lengths = tuple(size // workers + (rank < size % workers) for rank in range(workers))
        return StateDivision(axis="data", dim=0, lengths=lengths) if size >= workers else None

    gathers = [
        make_move("all_gather", name, size, purpose="input", backward=backward)
        for backward in (False, True)
        for name, size in sizes.items()
    ]
    program = make_program(sizes, gathers, workers=workers)
    plan = JobPlan(states=make_states(sizes, divide, kinds))
    return collect(make_records(program, plan, sum(sizes.values()) // workers), make_axes(data=workers))


def pipelined(
    axes: dict[str, int], *, schedule: str = "1f1b", microbatches: int = 8, sizes: dict[str, int] | None = None
) -> PicturedPlan:
    """Return a plan with the axis `pipeline`, with two stages per worker for `interleaved`."""
    sizes, workers = gpt() if sizes is None else sizes, axes["pipeline"]
    count = workers * (2 if schedule == "interleaved" else 1)
    stage_of = {name: number * count // len(sizes) for number, name in enumerate(sizes)}

    def divide(name: str, size: int) -> StateDivision:
        lengths = tuple(size if rank == stage_of[name] % workers else 0 for rank in range(workers))
        return StateDivision(axis="pipeline", dim=0, lengths=lengths)

    order = make_schedule(
        schedule,
        workers=workers,
        stage_workers=StageWorkers.alternate(stages=count, workers=workers),
        microbatches=microbatches,
        trains=True,
    )
    stages = tuple(
        PipelineStage(
            workers=(stage % workers,),
            begins="model",
            operators=9,
            parameters=2,
            parameter_bytes=9,
            held_microbatches=2,
        )
        for stage in range(count)
    )
    record = PipelineRecord(
        schedule=schedule,
        microbatches=microbatches,
        idle_fraction=order.idle_fraction,
        stages=stages,
        timeline=describe_timeline(order),
    )
    sends = [
        make_move("send", "float32[16, 8] of add", 65_536, axis="pipeline", module="model.layers.3", backward=backward)
        for backward in (False, True)
    ]
    program = make_program(sizes, sends, workers=prod(axes.values()), pipeline=record)
    plan = JobPlan(
        states=make_states(sizes, divide, ("value", "gradient", "optimizer_state")),
        pipeline=PipelinePlan(schedule=schedule, microbatches=microbatches, stages=stage_of),
    )
    held = sum(size for name, size in sizes.items() if stage_of[name] % workers == 0)
    return collect(make_records(program, plan, held), make_axes(**axes))


def many_modules() -> dict[str, int]:
    """Return modules with names that markup, fonts and layouts find hard."""
    names = [
        LONG * 6 + ".weight",
        "model.a<b>&\"c\"'d'.weight",
        "model.层归一化" + "注意力" * 20 + ".weight",
        "model.Überschrift_é" + "e\u0301" * 30 + ".weight",
        "model.🚀" + "👩\u200d🔬" * 20 + ".weight",
        "model.\u202eright_to_left" + "שלום" * 20 + ".weight",
        "model.bell\x07_null\x00_line\nbreak_tab\t" + "\ud800" + ".weight",
        "model." + "W" * 200 + ".weight",
        "model." + "i" * 200 + ".weight",
        "model.layers.0.weight",
        "model.layers.7.weight",
        "weight",
    ]
    return {name: 1000**number // 7**number for number, name in enumerate(names)}
