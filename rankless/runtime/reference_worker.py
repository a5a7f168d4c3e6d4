"""Records a worker that runs the plain reference script, for `rankless verify --against`."""

import atexit

import torch

from rankless.config.worker_config import WorkerConfig
from rankless.context.step_limit import StepLimit
from rankless.verify.recording.recorder import RunRecorder
from rankless.verify.recording.reference_recorder import ReferenceRecorder


def record_reference_run(config: WorkerConfig) -> None:
    """Record the training of this process from now on, until the process ends."""
    assert config.recording is not None
    recorder = RunRecorder(config.recording, config.rank)
    limit = config.observation.stop_after_steps
    steps = None if limit is None else StepLimit(limit, at_end=lambda: recorder.finish(stopped=True))
    dtype = None if config.dtype is None else getattr(torch, config.dtype)
    ReferenceRecorder(recorder, on_step=lambda: None if steps is None else steps.count_step(), dtype=dtype).start()
    atexit.register(recorder.finish)
