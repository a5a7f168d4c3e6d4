"""Records a worker whose script calls no job, for `rankless verify`: a plain script, or one of another framework."""

import atexit
import functools
import sys

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as groups

from rankless.config.worker_config import WorkerConfig
from rankless.context.step_events import StepLimit
from rankless.records.recorded_calls import ScriptSurvey
from rankless.verify.recording.reference_recorder import ReferenceRecorder
from rankless.verify.recording.run_recorder import RunRecorder


def record_reference_run(config: WorkerConfig) -> None:
    """Record the training of this process from now on, until the process ends."""
    assert config.recording is not None
    limit, seed = config.observation.stop_after_steps, config.perturbation_seed
    recorder = RunRecorder(
        config.recording, config.rank, survey=lambda _models: ScriptSurvey(layers=reference.list_layers())
    )
    steps = None if limit is None else StepLimit(limit, at_end=lambda: recorder.finish(stopped=True))
    reference = ReferenceRecorder(
        recorder,
        on_step=lambda: None if steps is None else steps.count_step(),
        dtype=None if config.dtype is None else getattr(torch, config.dtype),
        noise=None if seed is None else torch.Generator().manual_seed(seed),
        is_logical=config.is_logical,
    )
    reference.start()
    if dist.is_available():
        _gather_before_destruction(recorder)
    atexit.register(recorder.finish)


def _gather_before_destruction(recorder: RunRecorder) -> None:
    """Let a script that destroys its process group leave its distributed tensors to the recorder before."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if sys.exc_info()[1] is None:  # other ranks may not come here after an error
            recorder.gather_distributed_tensors()
        destroy(group)

    dist.destroy_process_group = groups.destroy_process_group = destroy_process_group
