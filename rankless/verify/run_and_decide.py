"""Make the runs of `rankless verify`, and decide: the same training, not the same, or undecided.

Note [three outcomes]: a comparison in the script's own precision decides if its limits are small. If rounding could
explain a difference, or the noise could hide one, the runs are repeated in float64, which then decides. Nothing else is
ever called the same training, and a difference is called one only if rounding cannot explain it. What remains is
undecided, with its reason: a run that failed, a script that does not repeat itself, noise that hides faults.

Note [shorter runs]: a long script costs less than three whole runs in each precision. A perturbed run stops early. That
is enough for "same": with its noise kept from there on, no limit is higher than a whole perturbed run would make it
(see Note [what is allowed]). If something exceeds such a limit, float64 decides, or the perturbed run is made whole
before anything is decided. In the script's own precision all runs make the beginning first. If float64 must decide in
any case, or if the beginning is not the same training, the rest in this precision would decide nothing, and is not run.
If float64 then fails, it is. The runs that call a training the same are whole, so they find a fault however late it
begins.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rankless.errors import ConfigError
from rankless.records.job_programs import JobProgram, ProgramRecord
from rankless.records.verify_recording_format import TEXT, JobCalled, ModelRegistered, StepRecorded, TensorState
from rankless.verify.causes import CERTAIN, Cause, find_cause, find_other_inputs, find_undivided
from rankless.verify.comparison_with_reference_script import ReferenceRun, compare_with_reference
from rankless.verify.differences_beyond_tolerance import Comparison, Divergence, compare
from rankless.verify.first_differing_value import FirstDifferingValue
from rankless.verify.read_and_combine_recordings import Recording, take_beginning
from rankless.verify.runs import INTERRUPTED, RunFailed, VerifyRuns

Outcome = Literal["same", "different", "undecided"]

EXTRA_NOISE_RUNS = 2
LONG_RUN_SECONDS = 60.0
"""A run on one worker that takes longer is worth a word about `--steps`."""
SUGGESTED_STEPS = 20
BEGINNING_STEPS = 20
"""How many steps are compared first in the script's own precision, and the fewest steps of a perturbed run."""
LONG_SCRIPT_STEPS = 3 * BEGINNING_STEPS
"""A script with fewer steps makes all its runs whole: starting one more would cost more than it spares."""
NEAR_LIMIT = 1e3
"""A difference beyond its limit by less than this factor is measured against more noise runs before it counts."""

Tell = Callable[[str], None]
"""Shows the user a line about what is being done."""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """How to compare the runs."""

    workers: int
    noise_runs: int
    tolerance: float | None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The outcome, and everything that led to it."""

    outcome: Outcome
    reason: str = ""
    """Why nothing was decided."""
    next_step: str = ""
    """What to do next."""
    finding: Divergence | None = None
    """The difference that decided, or that could not be decided."""
    comparison: Comparison | None = None
    """The comparison that decided; None if a run failed before there was one."""
    not_covered: tuple[str, ...] = ()
    own_comparison: Comparison | None = None
    """The comparison in the script's own precision, if float64 was asked to decide."""
    float64_failure: str | None = None
    is_foreign: bool = False
    """Whether the script calls no job, and was recorded from outside."""
    is_logical: bool = False
    """Whether several workers ran the script in the logical view."""
    reference: str | None = None
    """The name of the plain script that the runs were compared with too."""
    first_value: FirstDifferingValue | None = None
    cause: Cause | None = None
    """Why a script that divides its own data trains otherwise on several ranks, or why a script trains otherwise than
    its plain reference, if that is known.
    """


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One precision's comparison with the recordings it is made of."""

    runs: VerifyRuns
    comparison: Comparison
    one: Recording
    many: list[Recording]
    noise: list[Recording]
    reference: ReferenceRun | None
    is_shortened: bool = False
    """Whether runs stopped early, although the comparison finds something, because float64 is to decide."""

    def list_not_covered(self) -> tuple[str, ...]:
        """Return what the comparison does not cover."""
        return list_not_covered(self.comparison, self.one, self.runs.read_programs())


def decide(runs: VerifyRuns, options: ComparisonOptions, tell: Tell) -> Decision:
    """Make all runs that are needed, and decide.

    Raises:
        ConfigError: The script calls no job.
        RunFailed: The user has interrupted a run. Any other failed run makes the outcome "undecided".
    """
    try:
        own = run_and_compare(runs, options, tell, try_beginning=runs.dtype is None)
    except RunFailed as end:
        return _decide_failure(end)
    if runs.dtype is not None or not own.comparison.needs_float64 or _is_certain(own):
        return _finish(own, options, tell)
    tell(f"{describe_doubt(own.comparison)}; repeating in float64:")
    try:
        exact = run_and_compare(replace(own.runs, dtype="float64"), options, tell, try_beginning=False)
    except RunFailed as end:
        if end.exit_code != INTERRUPTED and own.is_shortened:
            own = run_and_compare(own.runs, options, tell, try_beginning=False)
        return replace(_decide_without_float64(own, end), not_covered=own.list_not_covered())
    return replace(_finish(exact, options, tell), own_comparison=own.comparison)


def _is_certain(own: Compared) -> bool:
    """Whether the ranks of a script that divides its own data read other samples than one worker, or step otherwise."""
    finding = own.comparison.findings[0] if own.comparison.findings else None
    if not own.runs.is_foreign or own.runs.is_logical or finding is None:
        return False
    cause = find_cause(finding, own.one, own.many)
    return cause is not None and cause.name in CERTAIN


def run_and_compare(runs: VerifyRuns, options: ComparisonOptions, tell: Tell, *, try_beginning: bool) -> Compared:
    """Make all runs in one precision and compare them; see Note [shorter runs].

    `try_beginning` compares the beginning of a long script first, and returns that if it differs or needs float64.
    """
    limit = LONG_SCRIPT_STEPS if try_beginning else None
    runs, one = _run_one(runs, limit=limit)
    noise: list[Recording] | None = None
    if one.steps == limit and one.stopped and limit != runs.steps:
        beginning = replace(runs, steps=BEGINNING_STEPS)
        many, noise = beginning.run_many(options.workers), beginning.run_perturbed(options.noise_runs)
        reference = beginning.run_reference()
        start = take_beginning(one, many[0])
        comparison = _compare_all(start, many, noise, reference, options, repeat=beginning)
        if comparison.findings or comparison.needs_float64:
            return Compared(
                runs=runs,
                comparison=comparison,
                one=start,
                many=many,
                noise=noise,
                reference=reference,
                is_shortened=True,
            )
        started = time.monotonic()
        one = runs.run_one()
        _suggest_steps(runs, one, time.monotonic() - started, tell)
    many = runs.run_many(options.workers)
    is_long = one.steps >= LONG_SCRIPT_STEPS
    if noise is None:
        shorter = replace(runs, steps=max(BEGINNING_STEPS, one.steps // 10)) if is_long else runs
        noise = shorter.run_perturbed(options.noise_runs)
    reference = runs.run_reference()
    comparison = _compare_all(one, many, noise, reference, options, repeat=None if is_long else runs)
    is_shortened = is_long and try_beginning and comparison.needs_float64
    if is_long and comparison.findings and not is_shortened:
        noise = runs.run_perturbed(options.noise_runs)
        comparison = _compare_all(one, many, noise, reference, options, repeat=runs)
    return Compared(
        runs=runs,
        comparison=comparison,
        one=one,
        many=many,
        noise=noise,
        reference=reference,
        is_shortened=is_shortened,
    )


def _suggest_steps(runs: VerifyRuns, one: Recording, seconds: float, tell: Tell) -> None:
    """Tell that `--steps` makes a long script's runs shorter."""
    if seconds > LONG_RUN_SECONDS and runs.steps is None:
        tell(
            f"  {one.steps} steps take {seconds:.0f} s, and verify makes two to four such runs; --steps "
            f"{SUGGESTED_STEPS} ends each run after {SUGGESTED_STEPS} steps"
        )


def _run_one(runs: VerifyRuns, *, limit: int | None) -> tuple[VerifyRuns, Recording]:
    """Run on one worker, at most `limit` steps; a script that calls no job runs once more, recorded from outside."""
    one = runs.run_one(limit)
    if not runs.is_foreign and not any(isinstance(result, JobCalled) for result in one.results):
        runs = replace(runs, is_foreign=True)
        one = runs.run_one(limit)
    if runs.is_foreign and not one.steps:
        raise ConfigError(
            expected="a script that trains: it calls at least one job, or steps an optimizer of torch.optim",
            found=f"{runs.program.target}, which does neither",
            fix="put @rankless.job(model=…, optimizer=…) on its training function, or name the script that trains",
        )
    return runs, one


def _compare_all(
    one: Recording,
    many: list[Recording],
    noise: list[Recording],
    reference: ReferenceRun | None,
    options: ComparisonOptions,
    *,
    repeat: VerifyRuns | None,
) -> Comparison:
    """Compare the runs. If a difference is near its limit, more noise runs as `repeat` are added to `noise`."""
    comparison = compare(one, many, noise, tolerance=options.tolerance)
    if reference is not None:
        comparison = compare_with_reference(comparison, reference, one, many, noise)
    if repeat is None or options.tolerance is not None or not _is_near_limit(comparison):
        return comparison
    noise += repeat.run_perturbed(EXTRA_NOISE_RUNS, first=options.noise_runs)
    return _compare_all(one, many, noise, reference, options, repeat=None)


def _is_near_limit(comparison: Comparison) -> bool:
    """Whether the first finding is a number that exceeds its limit by less than `NEAR_LIMIT`."""
    first = comparison.findings[0] if comparison.findings else None
    return first is not None and first.cause == "values" and first.excess < NEAR_LIMIT


def _finish(compared: Compared, options: ComparisonOptions, tell: Tell) -> Decision:
    """Decide by one comparison, and find the first value that differs if there is one."""
    comparison = compared.comparison
    decision = replace(
        classify(comparison),
        comparison=comparison,
        not_covered=compared.list_not_covered(),
        reference=None if compared.reference is None else compared.reference.name,
        is_logical=compared.runs.is_logical,
    )
    if decision.finding is not None and decision.finding.is_of_reference:
        return _add_cause_of_reference(replace(decision, is_foreign=compared.runs.is_foreign), compared)
    if compared.runs.is_foreign:
        decision = replace(decision, is_foreign=True)
        return decision if decision.is_logical else _add_cause(decision, compared)
    if decision.outcome != "different":
        return decision
    return replace(decision, first_value=_find_first_value(compared.runs, options, comparison, tell))


def _add_cause(decision: Decision, compared: Compared) -> Decision:
    """Name the cause of a difference in a script that divides its own data; N copies of one training decide nothing."""
    if decision.outcome == "same":
        cause = find_undivided(compared.one, compared.many)
        if cause is None:
            return decision
        return replace(decision, outcome="undecided", reason=cause.text, next_step=cause.fix, cause=cause)
    if decision.finding is None:
        return decision
    cause = find_cause(decision.finding, compared.one, compared.many)
    return decision if cause is None else replace(decision, cause=cause, next_step=cause.fix)


def _add_cause_of_reference(decision: Decision, compared: Compared) -> Decision:
    """Name the cause of a difference from the plain reference."""
    assert decision.finding is not None
    assert compared.reference is not None
    cause = find_other_inputs(decision.finding, compared.reference, compared.one)
    return decision if cause is None else replace(decision, cause=cause, next_step=cause.fix)


def classify(comparison: Comparison) -> Decision:
    """Return the outcome of a comparison that must decide by itself."""
    first = comparison.findings[0] if comparison.findings else None
    if first is None:
        return _decide_without_finding(comparison)
    if first.cause == "repetition":
        return Decision(
            outcome="undecided",
            finding=first,
            reason=f"the script on one worker does not repeat itself: {describe_finding(first)}",
            next_step="seed all random generators of the script, and read no file that an earlier run wrote",
        )
    if first.cause == "branch" and "repeated" in first.found:
        return Decision(
            outcome="undecided",
            finding=first,
            reason=f"the script decides by numbers that rounding changes: {describe_finding(first)}",
            next_step=f"compare the steps before: --steps {max(1, first.location.step - 1)}",
        )
    if comparison.tolerance is not None and comparison.tolerance.unmet is not None and first.cause == "values":
        return Decision(
            outcome="undecided",
            finding=first,
            reason=f"the script on one worker does not meet the tolerance either: {describe_finding(first)}",
            next_step="pass a --tolerance above the noise floor that is printed below",
        )
    return Decision(outcome="different", finding=first, next_step=_advise(first))


def _advise(first: Divergence) -> str:
    if first.is_of_reference:
        return "look at what the two scripts do differently up to this step: data, order, seeds, loss, optimizer"
    if first.cause == "ranks":
        return "look for what only some ranks do: code under `if rank == 0`, files, clocks, unseeded random numbers"
    if first.cause in ("structure", "branch"):
        return "look for what depends on the number of workers: lengths of loaders, RANK and WORLD_SIZE, file names"
    return "look at this line for what depends on the number of workers; `rankless plan` shows how it is divided"


def _decide_without_finding(comparison: Comparison) -> Decision:
    hidden = comparison.too_noisy
    if not comparison.steps and not comparison.calls:
        return Decision(outcome="undecided", reason="no job was called", next_step="call a job in the script")
    if comparison.is_mostly_rounding:
        return Decision(
            outcome="undecided",
            reason="the gradients of most parameters are rounding errors only, so almost nothing was compared",
            next_step="check that the loss depends on the model, and that the learning rate has not destroyed it",
        )
    if hidden is None:
        return Decision(outcome="same")
    fewer = "compare a smaller model or a smoother loss: the first step is already too sensitive to rounding"
    return Decision(
        outcome="undecided",
        reason=hidden.reason,
        next_step=f"compare the steps before: --steps {hidden.step - 1}" if hidden.step > 1 else fewer,
    )


def _decide_failure(end: RunFailed) -> Decision:
    if end.exit_code == INTERRUPTED:
        raise end
    return Decision(outcome="undecided", reason=str(end), next_step=end.next_step)


def _decide_without_float64(own: Compared, end: RunFailed) -> Decision:
    """Decide by the script's own precision, because the runs in float64 failed."""
    if end.exit_code == INTERRUPTED:
        raise end
    first = own.comparison.findings[0] if own.comparison.findings else None
    kept = Decision(
        outcome="undecided",
        comparison=own.comparison,
        finding=first,
        float64_failure=str(end),
        reference=None if own.reference is None else own.reference.name,
    )
    if first is not None and first.is_gross:
        return replace(kept, outcome="different", next_step=_advise(first))
    return replace(
        kept,
        reason=f"{describe_doubt(own.comparison)}, and the runs in float64 failed: {end}",
        next_step="make the script run with --dtype float64 (see the error above), or state your own --tolerance",
    )


def _find_first_value(
    runs: VerifyRuns, options: ComparisonOptions, comparison: Comparison, tell: Tell
) -> FirstDifferingValue | None:
    """Run the call in question again, and return the first value in it that differs."""
    finding = comparison.findings[0]
    unmet = comparison.tolerance is not None and comparison.tolerance.unmet is not None
    if finding.call is None or unmet:
        return None
    tell(f"searching for the first value that differs in call {finding.call.call} of {finding.call.job}:")
    try:
        return runs.find_first_value(
            finding.call, workers=options.workers, step=finding.location.step + 1, tolerance=options.tolerance
        )
    except RunFailed as end:
        if end.exit_code == INTERRUPTED:
            raise
        tell(f"  the search failed: {end}")
        return None


def describe_finding(finding: Divergence) -> str:
    """Describe a finding in one clause."""
    return f"step {finding.location.step}, {finding.tensor}: expected {finding.expected}, found {finding.found}"


def describe_doubt(own: Comparison) -> str:
    """Describe why the runs in the script's own precision do not suffice."""
    first = own.findings[0] if own.findings else None
    if first is not None:
        return f"in {own.precision} the runs part at step {first.location.step}, {first.tensor}"
    if own.too_noisy is not None:
        return f"in {own.precision}, {own.too_noisy.reason}"
    return f"in {own.precision} rounding decides where some parameters go"


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
        name = f"job {job.job} ({os.path.basename(job.line)})"
        if not job.called:
            yield f"{name}: it was never called"
        elif calls[job.job] == 1:
            yield f"{name}: it was called only once, so its program was not used again"
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
        f"{item.operator} ({os.path.basename(item.line)})": None
        for program in programs
        for item in program.without_rule
    }
    yield from _format_names("operators without a sharding rule, replicated on every worker", list(without_rule))
    probed = {
        f"{item.operator} ({os.path.basename(item.line)})": None for program in programs for item in program.probed
    }
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
