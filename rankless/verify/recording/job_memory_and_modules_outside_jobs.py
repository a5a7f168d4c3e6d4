"""Survey what a script holds at the end of a run: jobs, and modules that belong to no job."""

import gc
from collections.abc import Iterable

from torch import Tensor, nn

from rankless.jobs.job import Job
from rankless.jobs.job_definition import JobDefinition
from rankless.jobs.memory_meter import count_tensor_bytes
from rankless.ownership.state_owner import StateOwner
from rankless.records.job_programs import DefinedJob, JobMemory
from rankless.records.parallel_plan import JobPlan
from rankless.records.verify_recording_format import ScriptSurvey


def measure_job_memory(job: JobDefinition, owner: StateOwner, plan: JobPlan | None) -> JobMemory:
    """Return the memory of a job's models, gradients and optimizers in this process.

    Args:
        job: The job.
        owner: Knows of which tensors this worker has only a shard.
        plan: How the job is divided, if it is.
    """
    parameters = job.parameters()
    owned = [value for optimizer in job.optimizers for values in optimizer.state.values() for value in values.values()]
    return JobMemory(
        parameters=count_tensor_bytes(map(owner.get_value, parameters)),
        buffers=count_tensor_bytes(item for module in job.modules.values() for item in module.buffers()),
        gradients=count_tensor_bytes(list_gradients(job, owner, plan)),
        optimizer_state=count_tensor_bytes(owned),
        copies=owner.measure_copies(parameters, job.optimizers),
        is_offloaded=plan is not None and any(state.offloaded for state in plan.states.values()),
    )


def list_gradients(job: JobDefinition, owner: StateOwner, plan: JobPlan | None) -> list[Tensor | None]:
    """Return the gradients that this worker has, or tensors of their sizes.

    If workers have shards of gradients, a script finds none in `.grad`. Then each parameter that an optimizer steps
    stands for its gradient if a worker has this whole.
    """
    hides = plan is not None and any(state.gradient for state in plan.states.values())
    stepped = set(map(id, job.optimized_parameters())) if hides else set()
    parameters = job.parameters()
    return [
        parameter if holder is parameter and id(parameter) in stepped and holder.grad is None else holder.grad
        for parameter, holder in zip(parameters, owner.get_holders(parameters), strict=True)
    ]


def survey_script(models: Iterable[nn.Module]) -> ScriptSurvey:
    """Return the living jobs, and modules whose parameters belong to none of `models` and no job."""
    jobs: list[DefinedJob] = []
    known = {id(parameter) for model in models for parameter in model.parameters()}
    candidates: list[nn.Module] = []
    # type(thing), not thing.__class__, which may run code of the script.
    for thing in gc.get_objects():
        if issubclass(type(thing), Job):
            definition = thing.definition
            jobs.append(
                DefinedJob(
                    job=definition.name,
                    line=definition.line,
                    called=thing.was_called,
                    memory=measure_job_memory(definition, thing.owner, thing.plan),
                    plan=thing.plan,
                )
            )
            known.update(id(parameter) for parameter in definition.parameters())
        elif issubclass(type(thing), nn.Module) and "_parameters" in thing.__dict__:
            candidates.append(thing)
    inner = {id(child) for module in candidates for child in module.modules() if child is not module}
    outside = [
        f"{type(module).__name__} ({sum(parameter.numel() for parameter in module.parameters()):,} parameters)"
        for module in candidates
        if id(module) not in inner
        and any(True for _ in module.parameters())
        and not any(id(parameter) in known for parameter in module.parameters())
    ]
    return ScriptSurvey(tuple(sorted(jobs, key=lambda job: job.line)), tuple(sorted(outside)))
