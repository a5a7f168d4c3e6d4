"""List what a comparison did not cover. `rankless verify` shows it beside every verdict."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rankless.records.job_programs import JobProgram, ProgramRecord
from rankless.records.recorded_calls import TEXT, JobCalled, ModelRegistered, StepRecorded, TensorState
from rankless.verify.comparison import Comparison
from rankless.verify.recordings import Recording

NAMES_SHOWN = 4


def list_not_covered(comparison: Comparison, one: Recording, facts: Iterable[ProgramRecord]) -> tuple[str, ...]:
    """Return what the comparison does not cover, from the recording on one worker and the programs on several."""
    return (
        *_list_unreached(comparison),
        *_list_job_gaps(one),
        *_list_tensor_gaps(one),
        *_format_names("not compared in effect, because their gradients are all rounding", comparison.all_rounding),
        *_list_program_gaps([fact for fact in facts if isinstance(fact, JobProgram)]),
    )


def _list_unreached(comparison: Comparison) -> Iterator[str]:
    if comparison.stopped:
        yield f"what the script does after step {comparison.steps}"


def _list_job_gaps(one: Recording) -> Iterator[str]:
    calls = Counter(result.job for result in one.results if isinstance(result, JobCalled))
    for job in one.survey.jobs:
        if not job.called:
            yield f"job {job.job} ({_shorten(job.line)}): it was never called"
        elif calls[job.job] == 1:
            yield f"job {job.job} ({_shorten(job.line)}): it was called only once, so its program was not used again"
    yield from _format_names("modules that belong to no job", one.survey.outside)
    texts = {
        f"{leaf.path or 'result'} of {result.job}"
        for result in one.results
        if isinstance(result, JobCalled)
        for leaf in result.leaves
        if leaf.dtype == TEXT
    }
    yield from _format_names("results without numbers were compared as text only", sorted(texts))


def _list_tensor_gaps(one: Recording) -> Iterator[str]:
    first: dict[str, TensorState] = {}
    with_gradient: set[str] = set()
    changed: set[str] = set()
    stepped: set[str] = set()
    for result in one.results:
        if isinstance(result, ModelRegistered):
            first.update({state.name: state for state in result.tensors})
        if isinstance(result, StepRecorded):
            for state in result.tensors:
                stepped.add(state.name)
                with_gradient |= {state.name} if state.gradient is not None else set()
                changed |= {state.name} if state.name in first and state.value != first[state.name].value else set()
    parameters = [final.name for final in one.described if final.kind == "parameter"]
    buffers = [final.name for final in one.described if final.kind == "buffer"]
    yield from _format_names(
        "parameters of a model that trains which never got a gradient",
        [name for name in parameters if name in stepped and name not in with_gradient],
    )
    yield from _format_names(
        "models that never train", sorted({name.partition(".")[0] for name in first.keys() - stepped})
    )
    yield from _format_names("buffers that never changed", [name for name in buffers if name in stepped - changed])


def _list_program_gaps(programs: Sequence[JobProgram]) -> Iterator[str]:
    without_rule = {
        f"{item.operator} ({_shorten(item.line)})": None for program in programs for item in program.without_rule
    }
    yield from _format_names("operators without a sharding rule, replicated on every worker", list(without_rule))
    probed = {f"{item.operator} ({_shorten(item.line)})": None for program in programs for item in program.probed}
    yield from _format_names("operators without a sharding rule, split as sample data showed", list(probed))
    constants = {
        f"{program.job}: {item.dtype}{list(item.shape)}": None
        for program in programs
        for item in program.inputs
        if item.kind == "constant"
    }
    yield from _format_names("tensors that a job reads from outside its models and arguments", list(constants))


def _format_names(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        rest = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        yield f"{what}: {', '.join(names[:NAMES_SHOWN])}{rest}"


def _shorten(line: str) -> str:
    return os.path.basename(line)
