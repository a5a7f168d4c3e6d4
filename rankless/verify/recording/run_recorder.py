"""The recording of one rank for `rankless verify`."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rankless.compiler.capture.result_structure import list_named_leaves
from rankless.context.step_events import ObservedJob, StepParticipant
from rankless.ownership.modules_with_states_elsewhere import find_extension_modules
from rankless.records.verify_recording_format import (
    TEXT,
    FinalTensorMetadata,
    JobCalled,
    Leaf,
    ModelRegistered,
    RecordingFinished,
    ResultRecord,
    ScriptSurvey,
    StepInputs,
    StepRecorded,
    TensorKind,
    TensorState,
    encode_result,
    results_file,
    tensors_file,
)
from rankless.verify.recording.input_digests import InputDigests
from rankless.verify.recording.tensor_sketch import Sketcher, widen


class RunRecorder(StepParticipant):
    """One rank's file of results, open from the start of the script to its end.

    `inputs` collects what the models get as input, if the steps of jobs are recorded with it.
    """

    def __init__(
        self,
        folder: str,
        rank: int,
        *,
        survey: Callable[[Iterable[nn.Module]], ScriptSurvey] | None = None,
        inputs: InputDigests | None = None,
    ) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._tensors_file = tensors_file(folder, rank)
        self._stream = results_file(folder, rank).open("wb")
        self._models: dict[str, nn.Module] = {}
        self._calls: dict[str, int] = {}
        self._steps = 0
        self._sketches = Sketcher()
        self._gathered: dict[int, Tensor] = {}
        self._survey = survey
        self._inputs = inputs

    @property
    def compares_values(self) -> bool:
        """Whether it compares values with another run's: always."""
        return True

    def begin_call(self, job: ObservedJob) -> None:
        """Record the state of the job's models before their first step."""
        for name, module in job.modules.items():
            self.register(name, module)

    def end_call(self, job: ObservedJob, result: Any, _loss: Tensor | None) -> None:
        """Record a call and its whole results."""
        self.record_call(job=job.name, line=job.line, results=result)

    def end_step(self, job: ObservedJob) -> None:
        """Record the step of the latest call."""
        self.record_step(job=job.name, model=job.modules)

    def close(self, *, stopped: bool) -> None:
        """Write the end of the recording."""
        self.finish(stopped=stopped)

    def register(self, name: str, module: nn.Module) -> str:
        """Record a model's state before its first step under a unique name, and return that name. Idempotent."""
        for unique, known in self._models.items():
            if known is module:
                return unique
        unique, number = name, 1
        while unique in self._models:
            number += 1
            unique = f"{name}#{number}"
        self._models[unique] = module
        self._write(ModelRegistered(unique, self._describe_states(_list_named_tensors({unique: module}))))
        return unique

    def record_call(self, *, job: str, line: str, results: Any) -> None:
        """Record a job call and its whole results; `line` is the job's line, as "train.py:14"."""
        call = self._calls[job] = self._calls.get(job, 0) + 1
        leaves = [_make_leaf(path, value) for path, value in list_named_leaves(results)]
        self._write(JobCalled(job, call, self._steps, line, leaves))

    def record_step(self, *, job: str, model: Mapping[str, nn.Module]) -> None:
        """Record the step of the latest call: the tensors and gradients of its models."""
        for name, module in model.items():
            self.register(name, module)
        stepped = {id(module) for module in model.values()}
        ours = {name: known for name, known in self._models.items() if id(known) in stepped}
        inputs = None if self._inputs is None else self._inputs.take()
        self.record_tensors(job=job, tensors=_list_named_tensors(ours), inputs=inputs)

    def record_tensors(self, *, job: str, tensors: Mapping[str, Tensor], inputs: StepInputs | None = None) -> None:
        """Record a step with the parameters and buffers that it used, by their full names, and with its inputs."""
        self._steps += 1
        self._write(StepRecorded(job, self._steps, self._describe_states(tensors), inputs))

    def gather_distributed_tensors(self) -> None:
        """Keep the values of tensors that PyTorch distributes, before a process group ends. Collective."""
        tensors = _list_named_tensors(self._models).values()
        with contextlib.suppress(RuntimeError):  # their group has ended before: nothing has changed them since
            self._gathered = {id(tensor): widen(tensor).cpu() for tensor in tensors if isinstance(tensor, DTensor)}

    def finish(self, *, stopped: bool = False) -> None:
        """Write all models' parameters and buffers whole, and close. Later records are ignored.

        `stopped` means that the run ended before its script did.
        """
        if self._stream.closed:
            return
        tensors: dict[str, Tensor] = {}
        described = []
        for model, module in self._models.items():
            for name, tensor, kind in _iterate_tensors(module):
                known = self._gathered.get(id(tensor))
                tensors[f"{model}.{name}"] = widen(tensor).cpu().clone() if known is None else known
                dtype = str(tensor.dtype).removeprefix("torch.")
                described.append(FinalTensorMetadata(f"{model}.{name}", dtype, kind))
        safetensors.torch.save_file(tensors, self._tensors_file)
        survey = ScriptSurvey() if self._survey is None else self._survey(self._models.values())
        self._write(RecordingFinished(self._steps, described, stopped, survey))
        self._stream.close()

    def _write(self, result: ResultRecord) -> None:
        if self._stream.closed:
            return  # the script caught the exception by which `--steps` ends it, and continues
        self._stream.write(encode_result(result))
        self._stream.flush()

    def _describe_states(self, tensors: Mapping[str, Tensor]) -> list[TensorState]:
        states = []
        for name, tensor in tensors.items():
            gradient = None if tensor.grad is None else self._sketches.sketch(tensor.grad)
            dtype = str(tensor.dtype).removeprefix("torch.")
            states.append(TensorState(name, dtype, tensor.numel(), self._sketches.sketch(tensor), gradient))
        return states


def _list_named_tensors(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Parameters, buffers and rows of models, by their full names."""
    listed = ((model, *found) for model, module in models.items() for found in _iterate_tensors(module))
    return {f"{model}.{name}": tensor for model, name, tensor, _ in listed}


def _iterate_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, TensorKind]]:
    """Yield a module's parameters and buffers, tied ones once, and the ids and rows of its tables."""
    for name, parameter in module.named_parameters():
        yield name, parameter, "parameter"
    for name, buffer in module.named_buffers():
        yield name, buffer, "buffer"
    for part_name, part in find_extension_modules(module).items():
        for name, tensor in part.list_rows().items():
            yield f"{part_name}.{name}".removeprefix("."), tensor, "rows"


def _make_leaf(path: str, value: Any) -> Leaf:
    """Return a leaf of a result as a record; any value without numbers becomes the bytes of its text."""
    if isinstance(value, bool | int | float | complex):
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")
    dtype = TEXT
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
    else:
        value = torch.frombuffer(bytearray(repr(value).encode()), dtype=torch.uint8)
    numbers = widen(value).cpu()
    data = numbers.numpy().tobytes()
    return Leaf(path, dtype, tuple(numbers.shape), not numbers.is_floating_point(), data)
