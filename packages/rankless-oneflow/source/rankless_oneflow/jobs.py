"""`oneflow.global_function`: a function of blobs becomes a job of Rankless."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy
import torch
from torch import Tensor

import rankless
from rankless.errors import ConfigError
from rankless.user_code import display_name

from .function_config import FunctionConfig
from .graph import BuildCall, RunCall, Variables, during
from .missing import refuse
from .optimizer.schedules import Scheduler
from .results import ResultType, merge_lists, to_arrays
from .session import current_session
from .typing import ListNumpy, Numpy, Placeholder

JobType = Literal["train", "predict"]


def global_function(
    type: JobType = "predict", function_config: FunctionConfig | None = None
) -> Callable[[Callable[..., Any]], "GlobalFunction"]:
    """Make a function of blobs a job: its calls take and return NumPy arrays.

    Args:
        type: "train" for a function that calls `minimize`: each call makes a step. "predict" for one that does not.
        function_config: The settings. Default: the consistent view, float32.

    Returns:
        A decorator. The function annotates its arguments with placeholders and its result with `tp.Numpy`; in the
        mirrored view with those of `tp.ListNumpy`.

    Raises:
        ConfigError: An argument is invalid, or an annotation is missing or does not fit the view.

    Example:
        >>> import rankless_oneflow as flow, rankless_oneflow.typing as tp, numpy
        >>> @flow.global_function(type="predict")
        ... def double(values: tp.Numpy.Placeholder((3,))) -> tp.Numpy:
        ...     return values * 2
        >>> double(numpy.ones(3, "float32"))
        array([2., 2., 2.], dtype=float32)
    """
    if type not in get_args(JobType):
        found = "no parentheses" if callable(type) else f"type={type!r}"
        raise refuse("flow.global_function", found, 'write @flow.global_function(type="train"), or "predict"')
    if function_config is not None and not isinstance(function_config, FunctionConfig):
        fix = "pass function_config=flow.function_config(), with its settings made before"
        raise refuse("flow.global_function", f"function_config={function_config!r}", fix)
    settings = function_config or FunctionConfig()

    def decorate(function: Callable[..., Any]) -> GlobalFunction:
        job = GlobalFunction(function, trains=type == "train", settings=settings)
        current_session().add_job(job)
        return job

    return decorate


class GlobalFunction:
    """A job. `flow.global_function` makes it."""

    def __init__(self, function: Callable[..., Any], *, trains: bool, settings: FunctionConfig) -> None:
        functools.update_wrapper(self, function)
        self.name: str = function.__name__
        self._function = function
        self._trains = trains
        self._view, self._dtype = settings.view, settings.dtype
        self._line = f"{display_name(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"
        self._signature = inspect.signature(function, eval_str=True)
        self._placeholders = self._read_placeholders()
        self._result = ResultType(self._signature.return_annotation)
        self._require_view()
        self._job: Any = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Scheduler | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the job on a whole batch, or on a list with one for each device. Return arrays, equal on all workers.

        A train job also makes a step. Raises `DataError` if an argument does not match its placeholder, `ConfigError`
        if the variables have no values yet, and what `rankless.Job` raises.
        """
        bound = self._signature.bind(*args, **kwargs).arguments
        session = current_session()
        session.start()
        session.require_values(self.name, self._line)
        for name, placeholder in self._placeholders.items():
            placeholder.check(name, bound[name], self._line)
        if self._optimizer is not None and self._scheduler is not None:
            (group,) = self._optimizer.param_groups
            group["lr"] = self._scheduler.rate(group["steps"])
        result = self._job(*map(_prepare, bound.values()))
        if self._optimizer is not None:
            self._optimizer.param_groups[0]["steps"] += 1
        if self._view == "consistent":
            return to_arrays(result[-1])
        return merge_lists([to_arrays(each[-1]) for each in result])

    def build(self) -> None:
        """Find the variables and the optimizer, and make the job of Rankless, unless that was done."""
        if self._job is not None:
            return
        call = BuildCall(trains=self._trains)
        blobs = [torch.empty(item.shape, dtype=item.dtype, device="meta") for item in self._placeholders.values()]
        with during(call):
            result = self._function(*blobs)
        self._result.check(result, self.name, self._line)
        variables = current_session().add_variables(list(call.specs.values()), self._line)
        options: dict[str, Any] = {}
        if self._trains:
            chosen = self._require_one_optimizer(call)
            self._scheduler = chosen.lr_scheduler
            trained = [variables.find(name) for name, spec in call.specs.items() if spec.is_trainable]
            self._optimizer = chosen.make(trained)
            options = {"optimizer": self._optimizer}
            self.reset()
        decorate = rankless.job(model=variables, view=self._view, dtype=self._dtype, **options)
        self._job = decorate(_make_body(self._function, variables, trains=self._trains))

    def list_states(self) -> dict[str, Any]:
        """Return the optimizer, for a checkpoint: the number of steps is in its settings."""
        return {} if self._optimizer is None else {f"{self.name}_optimizer": self._optimizer}

    def reset(self) -> None:
        """Forget the states of the optimizer, and count steps from 0."""
        if self._optimizer is not None:
            self._optimizer.state.clear()
            self._optimizer.param_groups[0]["steps"] = 0

    def _read_placeholders(self) -> Mapping[str, Placeholder]:
        found: dict[str, Placeholder] = {}
        for each in self._signature.parameters.values():
            if not isinstance(each.annotation, Placeholder) or each.default is not each.empty:
                fix = f"write {each.name}: tp.Numpy.Placeholder((100, 3), dtype=flow.float), without a default"
                raise refuse(f"the arguments of job {self.name!r}", str(each), fix, self._line)
            found[each.name] = each.annotation
        return found

    def _require_view(self) -> None:
        """Raise `ConfigError` for annotations of the other view."""
        kind: Any = ListNumpy if self._view == "mirrored" else Numpy
        wrong = [name for name, each in self._placeholders.items() if not isinstance(each, kind.Placeholder)]
        if wrong or any(each is not kind for each in self._result.leaves):
            raise ConfigError(
                expected=f"tp.{kind.__name__} for arguments and results of job {self.name!r}, in the {self._view} view",
                found=f"another placeholder of argument {wrong[0]!r}" if wrong else str(self._result),
                fix="for lists, pass a function_config with default_logical_view(flow.scope.mirrored_view())"
                if kind is Numpy
                else "write tp.ListNumpy.Placeholder(…) and -> tp.ListNumpy; tp.Numpy is for the consistent view",
                where=self._line,
            )

    def _require_one_optimizer(self, call: BuildCall) -> Any:
        if len(call.optimizers) != 1:
            fix = "call flow.optimizer.SGD(lr_scheduler).minimize(loss) once; two losses go in one list"
            raise refuse(f"train job {self.name!r}", f"{len(call.optimizers)} calls of minimize", fix, self._line)
        if not call.loss().requires_grad:
            fix = "make layers with trainable=True, and compute the loss from them"
            raise refuse(f"train job {self.name!r}", "a loss without trainable variables", fix, self._line)
        return call.optimizers[0]


def _make_body(function: Callable[..., Any], variables: Variables, *, trains: bool) -> Callable[..., Any]:
    """Return the function of Rankless's job: it returns the loss, if it trains, and the function's result."""

    def body(*blobs: Tensor) -> tuple[Any, ...]:
        return _run(function, RunCall(variables, trains=trains), blobs)

    body.__name__ = function.__name__
    # Rankless names a job's line in errors: it is the script's, not this one.
    place = {"co_filename": function.__code__.co_filename, "co_firstlineno": function.__code__.co_firstlineno}
    body.__code__ = body.__code__.replace(**place)
    return body


def _run(function: Callable[..., Any], call: RunCall, blobs: Sequence[Tensor]) -> tuple[Any, ...]:
    with during(call):
        result = function(*blobs)
    loss = call.loss() if call.trains else result
    return (loss,) if result is loss else (loss, result)  # a result that is the loss need not be gathered twice


def _prepare(value: Any) -> Any:
    """Return an argument for Rankless: PyTorch takes no arrays with negative strides."""
    if isinstance(value, list | tuple):
        return [numpy.ascontiguousarray(each) for each in value]
    return numpy.ascontiguousarray(value)
