"""Read, check and write the file of a parallel plan."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rankless.config.mesh_option import AXES
from rankless.config.program_source_files import digest_source
from rankless.config.run_config import PlanFile, Program
from rankless.errors import ConfigError
from rankless.records.encoding import encode_json
from rankless.records.parallel_plan import (
    PLAN_FORMAT,
    ParallelPlan,
    PlannedAxis,
    PlanVersion,
    StateDivision,
    StatePlan,
)

DIVIDING_AXES = ("tensor", "expert", "pipeline", "data")
"""The axes that divide states, in the order in which they divide a tensor."""
NAME_A_PLAN = "name a file that `rankless plan --save` has written"


def name_axes(mesh: tuple[PlannedAxis, ...], workers: int) -> tuple[PlannedAxis, ...]:
    """Return the axes of a mesh; of one that is not given, the axis `data` of all workers."""
    return mesh or (PlannedAxis(name="data", role="data", size=workers),)


def write_plan(path: str, plan: ParallelPlan) -> None:
    """Write a plan to a file as JSON. Raises `ConfigError` if that fails."""
    try:
        Path(path).write_bytes(msgspec.json.format(encode_json(plan), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(
            expected=f"to write the plan to {path}",
            found=error.strerror,
            fix="name a file that you may write",
        ) from error


def read_plan(file: PlanFile) -> ParallelPlan:
    """Return the plan in a file. Raises `ConfigError` if the file is not the one that the command has read."""
    plan, digest = load_plan(file.path)
    if digest != file.sha256:
        raise ConfigError(
            expected=f"the same plan in {file.path} for all workers, from the start of the run on",
            found="another file",
            fix="copy the plan to all hosts, and do not change it while a run starts",
        )
    return plan


def find_plan(path: str, program: Program, *, workers: int) -> PlanFile:
    """Return the plan file that a command line names, after a check that it is for this run.

    Args:
        path: The file.
        program: The program to run.
        workers: The number of workers to run.

    Raises:
        ConfigError: The file has no plan, or one for another script or number of workers.
    """
    plan, digest = load_plan(path)
    if plan.workers != workers:
        raise ConfigError(
            expected=f"{plan.workers} workers, for which the plan {path} was made",
            found=f"{workers}",
            fix=f"set -n {plan.workers}, or make a plan with `rankless plan -n {workers} --save {path} {program.text}`",
        )
    unknown = [axis for axis in plan.axes if axis.name not in AXES or axis.role != axis.name]
    if unknown or len({axis.name for axis in plan.axes}) < len(plan.axes):
        raise ConfigError(
            expected=f"the axes {', '.join(sorted(AXES))} in the plan {path}, each at most once",
            found=", ".join(f"{axis.name} with the role {axis.role}" for axis in plan.axes),
            fix=f"make a new plan with `rankless plan --mesh … --save {path} {program.text}`",
        )
    for job, planned in plan.jobs.items():
        for name, state in planned.states.items():
            require_valid_division(f"{name} of job {job!r}", state, plan.axes)
    if plan.source_sha256 != digest_source(program):
        what = "changed since" if plan.program == program.text else f"the plan was made for {plan.program}"
        raise ConfigError(
            expected=f"the source of {program.text} as it was when the plan {path} was made",
            found=f"another one: {what}",
            fix=f"make a new plan with `rankless plan -n {workers} --save {path} {program.text}`",
        )
    return PlanFile(path=str(Path(path).absolute()), sha256=digest, axes=plan.axes)


def require_valid_division(name: str, state: StatePlan, axes: Sequence[PlannedAxis]) -> None:
    """Raise `ConfigError` for a state that cannot be divided as a plan says.

    Args:
        name: What errors call the state.
        state: Its plan.
        axes: The axes of the plan.
    """
    sizes = {axis.name: axis.size for axis in axes if axis.role in DIVIDING_AXES}
    value, gradient, divisions = state.value, state.gradient, state.optimizer_state
    if divisions[: len(gradient)] != gradient or gradient[: len(value)] != value:
        problem: str | None = "a value or gradient that is divided otherwise than its optimizer state"
    elif (axes_found := [division.axis for division in divisions]) != sorted(set(axes_found), key=place_division):
        problem = f"divisions along {', '.join(axes_found)}"
    else:
        problems = (find_problem(division, state.shape, sizes) for division in divisions)
        problem = next((found for found in problems if found), None)
    if problem is not None:
        raise ConfigError(
            expected=f"a plan that divides {name} in one way: optimizer state, also its gradient, or also its value, "
            f"once along each axis, in the order {', '.join(DIVIDING_AXES)}, with a length of at least 1 for each "
            "worker, or all rows on one worker",
            found=problem,
            fix="correct the plan, or make a new one with `rankless plan --save`",
        )


def place_division(axis: str) -> int:
    """Return the place of an axis among those that divide states; the last one for any other."""
    return DIVIDING_AXES.index(axis) if axis in DIVIDING_AXES else len(DIVIDING_AXES)


def find_problem(division: StateDivision, shape: Sequence[int], sizes: Mapping[str, int]) -> str | None:
    """Return what is wrong with a division; None if nothing is.

    Args:
        division: The division.
        shape: The shape of the whole tensor.
        sizes: The sizes of the axes that may divide states.
    """
    lengths = division.lengths
    if division.axis not in sizes:
        return f"the axis {division.axis!r}, which is none of {', '.join(sizes)}"
    if not 0 <= division.dim < len(shape):
        return f"dim {division.dim} of the shape {list(shape)}"
    is_owned = len([length for length in lengths if length]) == 1
    is_possible = {"pipeline": is_owned, "data": min(lengths) >= 1 or (min(lengths) == 0 and is_owned)}.get(
        division.axis, True
    )
    if division.blocks != 1 and division.axis != "tensor":
        return f"{division.blocks} blocks along the axis {division.axis}"
    if len(lengths) != sizes[division.axis] or not is_possible:
        return f"the lengths {list(lengths)} for {sizes[division.axis]} workers"
    if min(lengths) < 0 or division.blocks * sum(lengths) != shape[division.dim]:
        blocks = f"{division.blocks} times " if division.blocks > 1 else ""
        return f"{blocks}the lengths {list(lengths)} for {shape[division.dim]} rows"
    return None


def load_plan(path: str) -> tuple[ParallelPlan, str]:
    """Return the plan in a file, and the file's digest."""
    try:
        data = Path(path).read_bytes()
        found = msgspec.json.decode(data, type=PlanVersion)
        plan = None if found.format != PLAN_FORMAT else msgspec.json.decode(data, type=ParallelPlan)
    except OSError as error:
        raise ConfigError(
            expected=f"a plan in {path}",
            found=error.strerror,
            fix=NAME_A_PLAN,
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            expected=f"a parallel plan in {path}",
            found=str(error),
            fix=NAME_A_PLAN,
        ) from error
    if plan is None:
        raise ConfigError(
            expected=f"a plan of format {PLAN_FORMAT} in {path}",
            found=f"format {found.format}, of Rankless {found.rankless}",
            fix="make the plan again with this version",
        )
    return plan, hashlib.sha256(data).hexdigest()
