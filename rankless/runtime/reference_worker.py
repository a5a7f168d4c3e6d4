"""Records a worker whose script calls no job, for `rankless verify`: a plain script, or one of another framework."""

import atexit

import torch

from rankless.config.worker_config import WorkerConfig
from rankless.context.step_limit import StepLimit
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
    )
    reference.start()
    atexit.register(recorder.finish)
