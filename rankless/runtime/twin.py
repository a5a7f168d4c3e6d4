"""A worker that runs the plain twin of a script: it is recorded from outside, for `rankless verify --against`."""

import atexit

import torch

from rankless.plan.run_plan import WorkerPlan
from rankless.views.recording import Recorder
from rankless.views.stopping import StepLimit
from rankless.views.twin import TwinRecorder


def watch(plan: WorkerPlan) -> None:
    """Record this process's training from now to its end."""
    assert plan.recording is not None
    recorder = Recorder(plan.recording, plan.rank)
    limit = plan.watch.stop_after_steps
    steps = None if limit is None else StepLimit(limit, at_end=lambda: recorder.finish(stopped=True))
    dtype = None if plan.dtype is None else getattr(torch, plan.dtype)
    TwinRecorder(recorder, step_made=lambda: None if steps is None else steps.step_made(), dtype=dtype).start()
    atexit.register(recorder.finish)
