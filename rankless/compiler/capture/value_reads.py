"""Values of tensors that a job's Python reads while it is traced: conditions, checks, `.item()`.

See Note [values that Python reads]. A truth value is first taken for true, because nearly all are checks that pass. Any
other value is computed before the program is captured, by a program that ends where the value is read.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no stubs
import torch
from torch import Tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.functions import ToFloat

from rankless.compiler.capture.decompositions import autograd_kernels
from rankless.compiler.tracing.symbolic_sizes import READ_BY_JOB, LineTrackingShapeEnv, evaluate_with_assumed_counts
from rankless.errors import CaptureError
from rankless.user_code import user_line

aten = torch.ops.aten

MAX_GUESSES = 32
"""Truth values in a row that are taken for true: a loop `while tensor:` must end."""
MAX_READS = 256
MAX_COUNT_READS = 2048
"""The same for comparisons of counts of selected rows, one for each expert of each layer."""
COMPARISONS: dict[type, Any] = {
    sympy.Eq: aten.eq.Scalar,
    sympy.Ne: aten.ne.Scalar,
    sympy.StrictLessThan: aten.lt.Scalar,
    sympy.LessThan: aten.le.Scalar,
    sympy.StrictGreaterThan: aten.gt.Scalar,
    sympy.GreaterThan: aten.ge.Scalar,
}
"""The operators of comparisons of sizes."""


class ValueNeeded(BaseException):
    """Ends a trace at a value that is not known. Not an `Exception`: the job's own `except` must not catch it."""


class LateQuestion(BaseException):
    """Ends a trace in which the backward pass asks about counts; the next trace asks at the end of the function."""


class ValueReads:
    """The values that the job reads in one trace, in order.

    Args:
        known: The values of the first reads.
        ends_at_unknown: End the program at the first value that is not known, and return it.
    """

    def __init__(self, known: Sequence[Any] = (), *, ends_at_unknown: bool = False) -> None:
        self.known = list(known)
        self.ends_at_unknown = ends_at_unknown
        self.tensors: list[Tensor] = []
        self.values: list[Any] = []
        self.lines: list[str] = []
        self.environment: LineTrackingShapeEnv | None = None
        """Has the counts of selected rows, if the trace may ask about them."""
        self._late_questions: list[sympy.Basic] = []
        """In the numbers of counts, in the order in which a pass makes them."""
        self._late_answers: dict[sympy.Basic, Any] = {}
        self.has_returned = False
        """Whether the job's function has returned: the program can compare values that are read before."""

    def begin_pass(self) -> None:
        """Begin another trace of the same job."""
        self.tensors, self.values, self.lines = [], [], []
        self._late_answers = {}
        self.has_returned = False
        if self.environment is not None:
            self.environment.counts_made.clear()

    def ask_late_questions(self) -> None:
        """Ask at the end of the job's function what the backward pass asked about counts in the trace before."""
        for question in self._late_questions:
            environment = self.environment
            assert environment is not None
            asked = question.xreplace({number: count for count, number in self._number_counts().items()})
            node = SymNode(asked, environment, bool, None)
            self._late_answers[question] = self.read_count(node)

    def _number_counts(self) -> dict[sympy.Symbol, sympy.Symbol]:
        """Return a symbol with the number of each count that this pass has made."""
        made = [] if self.environment is None else self.environment.counts_made
        return {count: sympy.Symbol(f"count_{number}", integer=True) for number, count in enumerate(made)}

    def _answer_late(self, question: sympy.Basic) -> Any:
        """Return the answer to a question of the backward pass; end the trace if it has not been asked before."""
        numbers = self._number_counts()
        asked = question.xreplace(numbers)
        if asked in self._late_answers:
            return self._late_answers[asked]
        is_comparison = isinstance(question, sympy.core.relational.Relational)
        if asked in self._late_questions or not is_comparison or not question.free_symbols <= numbers.keys():
            self._require_running_function()
        self._late_questions.append(asked)
        raise LateQuestion

    @property
    def has_guesses(self) -> bool:
        """Whether the trace has read more than the known values."""
        return len(self.lines) > len(self.known)

    def read(self, tensor: Tensor, *, assumed: bool | None = None) -> Any:
        """Return the value of a tensor of one element. Raises `ValueNeeded` if it is not known.

        Args:
            assumed: What it is taken for if it is not known. Default: true for a truth value, and nothing for others.
        """
        self._require_running_function()
        position = len(self.values)
        self.lines.append(user_line(sys._getframe(1)))
        limit = MAX_READS if assumed is None else MAX_COUNT_READS
        if position >= limit:
            raise CaptureError(
                expected=f"a job that reads at most {limit} values of tensors",
                found="more, perhaps a loop until a tensor has some value",
                fix="compute with tensors, for example with torch.where, or read the values outside the job",
                where=self.lines[-1],
            )
        self.tensors.append(tensor.detach())
        if position < len(self.known):
            value = self.known[position]
        elif assumed is not None and not self.ends_at_unknown:
            value = assumed
        elif self.ends_at_unknown or tensor.dtype != torch.bool or position >= len(self.known) + MAX_GUESSES:
            raise ValueNeeded
        else:
            value = True
        self.values.append(value)
        return value

    def _require_running_function(self) -> None:
        """Raise `CaptureError` if the job's function has returned."""
        if self.has_returned:
            raise CaptureError(
                expected="values of tensors that Python reads in the job's function",
                found="one that is read in the backward pass, after the function has returned",
                fix="compute with tensors there, for example with torch.where",
                where=user_line(sys._getframe(2)),
            )

    def read_count(self, node: Any) -> Any:
        """Return the answer to a question about counts of selected rows; see Note [counts of selected rows].

        A comparison is read as its truth value, so that the program holds for all counts with the same answer.

        Args:
            node: PyTorch's `SymNode` of the question: a comparison, or a number.

        Raises:
            GuardOnDataDependentSymNode: An operator asks while it is traced, where nothing can be computed for it.
        """
        environment, question = node.shape_env, node.expr
        if self.has_returned:
            return self._answer_late(question)
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is None:
            raise GuardOnDataDependentSymNode(question, f"an operator needs {question}")
        is_comparison = isinstance(question, sympy.core.relational.Relational)
        number = as_whole_number(question.lhs - question.rhs if is_comparison else question)
        if not number.is_integer:
            raise GuardOnDataDependentSymNode(question, f"{number} is no whole number")
        size = environment.create_symintnode(number, hint=None)
        found = aten.full.default([], size, dtype=torch.int64, device="cpu")
        if is_comparison:
            found = COMPARISONS[type(question)](found, 0)
        value = self.read(found, assumed=evaluate_with_assumed_counts(node) if is_comparison else None)
        known = sympy.Eq(question, value) if not is_comparison else question if value else sympy.Not(question)
        environment.guard_or_defer_runtime_assert(known, READ_BY_JOB)
        return value

    def is_same(self, one: Tensor, other: Tensor) -> Any:
        """Return whether two tensors have the same shape and values: `torch.equal`."""
        if one.shape != other.shape:
            return False
        return self.read((one == other).all())

    def is_close(self, one: Tensor, other: Tensor, *tolerances: Any, **named: Any) -> Any:
        """Return whether two tensors are equal up to tolerances: `torch.allclose`, with its arguments."""
        return self.read(torch.isclose(one, other, *tolerances, **named).all())

    def require_success(self, info: Tensor, name: str, *, is_matrix: bool) -> None:
        """Raise the error of a function of `torch.linalg`, as of a singular matrix, if an `info` of it is not zero."""
        if self.read((info == 0).all()):
            return
        place = self.read((info.flatten() != 0).int().argmax())
        value = self.read(info.flatten()[place])
        # PyTorch's own operator makes the message, from a tensor with that value.
        with _disable_current_modes(), autograd_kernels({aten._linalg_check_errors.default: None}):
            found = torch.zeros(tuple(info.shape), dtype=torch.int32, device="cpu")
            found.view(-1)[place] = value
            aten._linalg_check_errors.default(found, name, is_matrix=is_matrix)

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Within the context, what reads the value of a traced tensor gets it from here."""
        kernels: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self.read,
            aten.equal.default: self.is_same,
            aten.allclose.default: self.is_close,
            aten._linalg_check_errors.default: self.require_success,
        }
        with autograd_kernels(kernels):
            yield


def as_whole_number(expression: sympy.Expr) -> sympy.Expr:
    """Return the expression without conversions of whole numbers to floating-point ones, which are exact."""
    plain = expression.replace(lambda item: isinstance(item, ToFloat), lambda item: item.args[0])
    whole = {number: sympy.Integer(int(number)) for number in plain.atoms(sympy.Float) if number == int(number)}
    return plain.xreplace(whole)
