"""Capture: turn a job's function into a logical program.

PyTorch's AOTAutograd traces the function, forward and backward, on fake tensors of logical shapes into one functional
ATen graph. docs/decisions/0002-capture.md gives the reasons.

Note [setting .data]: a job may set `.data` of a parameter or buffer to another tensor. It then has other memory, and
what autograd has saved keeps the old. The trace copies the new values into the tensor instead, and the program's caller
sets `.data` to them. Both are the same training if no gradient needs the old values, and if the new memory belongs to
no other tensor. Otherwise the job is refused. A change in place of `.data`, as `p.data.clamp_(…)`, is traced as it is:
autograd uses the changed values, in the plain script too.

Note [strides in half precision]: PyTorch traces elementwise operators in half precision as if their arguments were
first copied to float32. A copy of an expanded tensor lies in memory in another order than the tensor. So a trace would
give the result other strides than the kernel, which copies nothing.
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._prims_common import wrappers
from torch._subclasses.fake_tensor import FakeTensorMode

from rankless.compiler.capture.decompositions import CORRECTED, DECOMPOSITIONS, autograd_kernels
from rankless.compiler.capture.global_modes import (
    apply_autocast_state,
    disable_autocast,
    get_autocast_state,
    require_grad_enabled,
)
from rankless.compiler.capture.refused_training_calls import RETURN_LOSS, leave_recurrent_weights
from rankless.compiler.capture.result_structure import ResultStructure, find_live, flatten_result, get_memory
from rankless.compiler.capture.side_effects import SideEffects, require_traceable_modules
from rankless.compiler.capture.tensors_kept_between_calls import find_kept, restore_after_failure
from rankless.compiler.capture.trace_errors import convert_trace_errors, offer_whole_batch
from rankless.compiler.capture.trace_to_program import (
    add_generator_starts,
    clean_up,
    name_checks,
    name_inputs_and_outputs,
)
from rankless.compiler.capture.value_reads import LateQuestion, ValueNeeded, ValueReads
from rankless.compiler.guards.guards import GuardSet
from rankless.compiler.ir.counter_operators import mark_counter_draws
from rankless.compiler.ir.logical_program import LogicalProgram
from rankless.compiler.ir.memory_order import make_empty
from rankless.compiler.tracing.activation_checkpoints import CheckpointNumbers, trace_checkpoints
from rankless.compiler.tracing.operator_lines import SourceLineMode, TracedFunction, name_modules, record_origins
from rankless.compiler.tracing.refused_tensor_functions import ModuleTensors
from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.compiler.tracing.replaced_functions import average_with_tensors, take_paths_of_plain_run
from rankless.compiler.tracing.script_generators import ScriptGenerators, trace_forks
from rankless.compiler.tracing.symbolic_sizes import LineTrackingShapeEnv, SymbolicSizes, specialize_on_repr
from rankless.errors import CaptureError
from rankless.ownership.partitioned_tensor import as_plain_parameters

BuildArguments = Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Puts the tensor arguments of a call among its plain ones; returns positional and keyword arguments."""


@dataclass(frozen=True, kw_only=True)
class ArgumentShape:
    """The logical shape and dtype of one tensor argument."""

    shape: tuple[int, ...]
    """Sizes that vary from call to call are symbols (see `symbolic_sizes`)."""
    dtype: torch.dtype
    order: tuple[int, ...] | None = None
    """The order of its dims in memory, or None for contiguous memory; see Note [memory layout]."""


@dataclass(frozen=True, kw_only=True)
class JobSource:
    """The input of a capture: the function, the modules it may use (by name), and whether it trains."""

    name: str
    function: Callable[..., Any]
    modules: Mapping[str, nn.Module]
    trains: bool
    line: str = ""
    """Where the function is defined; errors without a more precise line use it."""
    draws_by_counter: bool = False
    """Whether its random operators draw by counter; see `rankless.compiler.ir.counter_distributions`."""
    recompute: float = 0.0
    """How much of what the model's blocks compute is computed again for gradients, from 0 to 1."""
    sequence_parallel: bool = False
    """Whether the axis `tensor` divides activations between layers too."""


@dataclass(frozen=True)
class ValueRead:
    """A value that the job's Python read, and the line that read it."""

    value: Any
    line: str


@dataclass(frozen=True, kw_only=True)
class CapturedJob:
    """A logical program, and how to rebuild the job's result from its outputs."""

    program: LogicalProgram
    result_structure: ResultStructure
    result_leaves: tuple[Any, ...]
    """One entry per leaf of the job's result: `TENSOR_LEAF` for the next tensor result, a `LiveResult` in its place for
    one that shares memory with a parameter or buffer, otherwise the plain value."""
    guards: GuardSet
    """The Python values that the job read. The program is stale once they change."""
    changed_modes: Sequence[tuple[nn.Module, bool]]
    """The modules that the job puts into train or eval mode."""
    print_line: str | None
    """The line of the first print in the job; the program does not print."""
    reads: tuple[ValueRead, ...] = ()
    """What the job's Python read of tensors, in the order of the program's checks."""


TENSOR_LEAF = object()
UNKNOWN = object()
"""Stands for the result of a job that was traced up to a value that it needs."""
SYMBOLIC_SHAPES_LOGGER = "torch.fx.experimental.symbolic_shapes"


class TraceableJobModule(nn.Module):
    """The job's function as a module whose parameters are those of the modules it may use."""

    def __init__(
        self, source: JobSource, arguments: BuildArguments, device: torch.device, reads: ValueReads | None
    ) -> None:
        super().__init__()
        for name, module in source.modules.items():
            self.add_module(name, module)
        self.source = source
        self.arguments = arguments
        self.autocast = get_autocast_state(device.type)
        self.effects = SideEffects(source.function, source.modules)
        self.result_structure: ResultStructure | None = None
        self.result_leaves: tuple[Any, ...] = ()
        self.originals = self.describe_tensors()
        self.module_tensors = ModuleTensors({})
        self.generators = ScriptGenerators()
        self.checkpoints = CheckpointNumbers()
        self.reads = reads
        self.kept = find_kept(source.function, source.modules)
        self.traced = TracedFunction(TraceableJobModule.forward.__code__, source.line)

    def describe_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the modules by description: within the trace, what stands for them."""
        found: dict[str, Tensor] = {f"parameter {name!r}": item for name, item in self.named_parameters()}
        return found | {f"buffer {name!r}": item for name, item in self.named_buffers()}

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call `forward` directly, without the hooks that the script registered for all modules."""
        return self.forward(*tensors)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the job; return the loss (if the job trains) and then every tensor of the result, detached."""
        traced = self.describe_tensors()
        names, self.module_tensors = name_modules(self.source.modules), ModuleTensors(traced, self.originals)
        known = self.module_tensors
        self.generators.begin_pass()
        self.checkpoints.begin_pass()
        if self.reads is not None:
            self.reads.begin_pass()
        with (
            self.effects.trace_pass() as call_log,
            record_origins(SourceLineMode(known, self.generators, names, call_log, self.traced, self.checkpoints)),
            specialize_on_repr(),
        ):
            args, kwargs = self.arguments(tensors)
            with self.kept.observe_pass(), apply_autocast_state(self.autocast):
                try:
                    result = self.source.function(*args, **kwargs)
                    if self.reads is not None:
                        self.reads.ask_late_questions()
                except ValueNeeded:
                    if self.reads is None or not self.reads.ends_at_unknown:
                        raise
                    result = UNKNOWN
        self.kept.compute()
        if result is UNKNOWN and self.reads is not None:
            # This program computes the value that Python needs. The next trace goes on with it.
            self.result_structure, self.result_leaves = flatten_result(None)[1], (TENSOR_LEAF,)
            return tuple(item.clone() for item in (self.reads.tensors[-1], *self.reads.tensors[:-1]))
        leaves, self.result_structure = flatten_result(result)
        named = (*self.named_parameters(), *self.named_buffers())
        states = {memory: (name, item) for name, item in named if (memory := get_memory(item)) is not None}
        self.result_leaves = tuple(
            (find_live(leaf, states) or TENSOR_LEAF) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        )
        # A result may be an argument, or a view of one. A clone makes it a value of the program.
        values = tuple(leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor))
        checks = () if self.reads is None else tuple(item.clone() for item in self.reads.tensors)
        if self.reads is not None:
            self.reads.has_returned = True
        if not self.source.trains:
            return (*values, *checks)
        loss = extract_loss(result, self.source.name)
        self.module_tensors.note_graph(loss)
        return (loss, *values, *checks)


def extract_loss(result: Any, job: str) -> Tensor:
    """Return the scalar that a train job minimizes: its loss, or the mean of its losses per sample."""
    loss = getattr(result, "loss", result)
    if isinstance(result, Mapping):
        loss = result.get("loss")
    elif isinstance(result, tuple | list):
        loss = result[0] if result else None
    if not isinstance(loss, Tensor) or not loss.is_floating_point() or not loss.requires_grad:
        raise CaptureError(
            expected=f"train job {job!r} to return its loss: a tensor that depends on the model's parameters, "
            'alone, first in a tuple, as "loss" in a dict, or as an attribute "loss"',
            found=describe_result(loss),
            fix=RETURN_LOSS,
        )
    return loss if loss.dim() == 0 else loss.mean()


def describe_result(value: Any) -> str:
    """Describe a value briefly, for an error."""
    if isinstance(value, Tensor):
        gradient = "" if value.requires_grad else ", without gradient"
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}{gradient}"
    return f"a value of type {type(value).__name__}"


def capture(
    source: JobSource,
    arguments: BuildArguments,
    shapes: Sequence[ArgumentShape],
    device: torch.device,
    *,
    sizes: SymbolicSizes | None = None,
    reads: ValueReads | None = None,
) -> CapturedJob:
    """Return the logical program of a job for arguments of the given logical shapes.

    Raises `CaptureError`, with the line of the user's script, if the job cannot be one program.

    Args:
        source: The job.
        arguments: Puts the tensor arguments back among the plain ones.
        shapes: The logical shapes and dtypes of the tensor arguments.
        device: The device of the tensor arguments.
        sizes: Created the symbols in `shapes`, if there are any.
        reads: Gives the values of tensors that the job's Python reads. Without it they are refused.
    """
    if source.trains:
        require_grad_enabled(source.name, source.line)
    job = TraceableJobModule(source, arguments, device, reads)
    shape_env = LineTrackingShapeEnv() if sizes is None else sizes.shape_env
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env)
    with contextlib.ExitStack() as stack:
        # Afterwards PyTorch dispatches as before, also if an error leaves keys excluded.
        keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        stack.enter_context(torch._C._ForceDispatchKeyGuard(*keys))
        # PyTorch keeps the last capture's fake tensors here; their destructors warn when the interpreter exits.
        stack.callback(PhiloxStateTracker.reset)
        # Trace the backward outside of an autocast context around the call.
        stack.enter_context(disable_autocast(device.type))
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.set_grad_enabled(source.trains))
        stack.enter_context(silence_trace_loggers())
        stack.enter_context(trace_half_precision_layouts())
        stack.enter_context(trace_checkpoints(source.modules, job.checkpoints))
        with fake:
            inputs = tuple(make_empty(item.shape, item.order, dtype=item.dtype, device=device) for item in shapes)
        with (
            restore_after_failure(job.kept, source.modules),
            offer_whole_batch(),
            convert_trace_errors(source.name, source.line),
            run_compiled_functions_eagerly(),
            autograd_kernels(CORRECTED),
            contextlib.nullcontext() if reads is None else reads.observe(),
            take_paths_of_plain_run(),
            leave_recurrent_weights(),
            average_with_tensors(),
            contextlib.nullcontext() if source.draws_by_counter else trace_forks(job.generators),
            restore_module_tensors(source.modules),
            as_plain_parameters([item for module in source.modules.values() for item in module.parameters()]),
        ):
            require_traceable_modules(source.modules)
            with refuse_use_of_old_data(lambda: job.module_tensors):
                if reads is not None:
                    reads.environment, shape_env.read_count = shape_env, reads.read_count
                traced = trace_until_stable(stack, job, inputs, fake)
                shape_env.is_traced = True
            tensors = job.module_tensors
            program = name_inputs_and_outputs(source.name, source.line, traced, tensors, job.generators.found)
            add_generator_starts(program.graph, job.generators.starts)
            if reads is not None:
                program = name_checks(program, reads.values)
            program = clean_up(program, source.modules, compares=reads is None or not reads.ends_at_unknown)
            require_own_data(program, tensors)
            program = replace(program, recompute=source.recompute, sequence_parallel=source.sequence_parallel)
            if source.draws_by_counter:
                mark_counter_draws(program.graph)
    assert job.result_structure is not None
    return CapturedJob(
        program=program,
        result_structure=job.result_structure,
        result_leaves=job.result_leaves,
        guards=job.effects.collect_guards(),
        changed_modes=job.effects.changed_modes(),
        print_line=job.effects.first_print_line(),
        reads=() if reads is None else tuple(map(ValueRead, reads.values, reads.lines)),
    )


def trace_until_stable(
    stack: contextlib.ExitStack, job: TraceableJobModule, inputs: tuple[Tensor, ...], fake: FakeTensorMode
) -> fx.GraphModule:
    """Return the traced graph of a job, forward and backward; raise `CaptureError` if its passes differ.

    The first trace may have initialized the model. Two more passes then agree, or the job never becomes stable.
    """
    joint = trace_once(stack, job, inputs, fake)
    job.effects.raise_if_found()
    if job.kept.apply() or not job.effects.is_stable():
        joint = trace_once(stack, job, inputs, fake)
        job.effects.raise_if_found()
        job.effects.require_stable()
        job.kept.require_stable()
    graph_module: fx.GraphModule = joint.graph_module
    return graph_module


def trace_once(
    stack: contextlib.ExitStack, job: TraceableJobModule, inputs: tuple[Tensor, ...], fake: FakeTensorMode
) -> Any:
    """Return PyTorch's trace of a job; again while the backward pass asks other questions about counts of rows."""
    while True:
        # PyTorch keeps the count of what a mask selects with the mask, for one epoch. Each trace makes its own counts.
        fake.epoch += 1
        try:
            return aot_export_joint_with_descriptors(stack, job, inputs, decompositions=DECOMPOSITIONS)
        except LateQuestion:
            continue


@contextlib.contextmanager
def silence_trace_loggers() -> Iterator[None]:
    """Within the context, PyTorch does not log failed guards and operators, which it also raises.

    Nor does it warn that an exception has ended the backward pass, for example the KeyboardInterrupt of a Ctrl-C.
    """
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", SYMBOLIC_SHAPES_LOGGER)]
    with replace_attributes(*((logger, "disabled", True) for logger in loggers)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error detected in ")
        yield


@contextlib.contextmanager
def restore_module_tensors(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """On exit, restore every module's own tensors: PyTorch leaves traced ones in a module that has two names."""
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (table, dict(table))
        for module in modules.values()
        for submodule in module.modules()
        if not isinstance(submodule, torch.jit.ScriptModule)  # nothing can replace its tensors from Python
        for table in (submodule._parameters, submodule._buffers)
    ]
    try:
        yield
    finally:
        for table, before in tables:
            table.update(before)


@contextlib.contextmanager
def run_compiled_functions_eagerly() -> Iterator[None]:
    """Within the context, what the script gave to `torch.compile` runs as plain Python, so that it can be traced."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


aten = torch.ops.aten


@contextlib.contextmanager
def refuse_use_of_old_data(get_tensors: Callable[[], ModuleTensors]) -> Iterator[None]:
    """Within the context, autograd's error that a gradient needs the old values becomes a `CaptureError`.

    `get_tensors` returns the parameters and buffers of the latest trace.
    """
    try:
        yield
    except RuntimeError as error:
        lines = get_tensors().lines_of_set_data
        if not lines or "modified by an inplace operation" not in str(error):
            raise
        name, line = next(reversed(lines.items()))
        raise CaptureError(
            expected="a job that uses a parameter or buffer only after it has set its .data",
            found=f".data of {name} set after a use whose gradient needs the old values",
            fix="set it before the use, or after the job's call",
            where=line,
        ) from error.with_traceback(None)


def require_own_data(program: LogicalProgram, tensors: ModuleTensors) -> None:
    """Raise `CaptureError` if a job sets `.data` to memory of another tensor, because both would change together."""
    owners: dict[fx.Node, str] = {}
    for final, output in program.outputs:
        if not output.renews_memory:
            continue
        origin = find_origin(final)
        if origin in program.inputs or owners.setdefault(origin, output.name) != output.name:
            lines = [line for name, line in tensors.lines_of_set_data.items() if name.endswith(repr(output.name))]
            raise CaptureError(
                expected="a job that gives each parameter and buffer values of its own",
                found=f".data of {output.name} set to a tensor that shares memory with another",
                fix="set it to a copy: .data = other.data.clone()",
                where=lines[0] if lines else None,
            )


def find_origin(node: fx.Node) -> fx.Node:
    """Return the value that a value is a copy or a view of."""
    while node.op == "call_function" and (node.target is aten.copy.default or is_view(node)):
        node = node.all_input_nodes[-1]
    return node


def is_view(node: fx.Node) -> bool:
    """Return whether a value shares memory with the operator's input, according to its schema."""
    operator = node.target
    return isinstance(operator, torch._ops.OpOverload) and any(
        result.alias_info is not None for result in operator._schema.returns
    )


class ElementwiseTypes:
    """PyTorch's functions on types, except that shapes and strides in half precision are computed in that dtype."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def elementwise_dtypes(self, *args: Any, **kwargs: Any) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of an elementwise computation and of its result.

        Tensors on the meta device have no numbers: only the strides of their results count.
        """
        computed, result = self._original.elementwise_dtypes(*args, **kwargs)
        tensors = [item for item in args if isinstance(item, Tensor)]
        dtypes = {item.dtype for item in tensors}
        is_half = len(dtypes) == 1 and computed == torch.float32 and dtypes <= {torch.float16, torch.bfloat16}
        if is_half and all(item.is_meta for item in tensors):
            (computed,) = dtypes
        return computed, result


@contextlib.contextmanager
def trace_half_precision_layouts() -> Iterator[None]:
    """Within the context, traces give results in half precision the strides that kernels give them."""
    with replace_attributes((wrappers, "utils", ElementwiseTypes(vars(wrappers)["utils"]))):
        yield
