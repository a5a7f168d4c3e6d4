"""Discover what a job reads: from its function, its modules and the trace of a pass, down to plain values.

The bytecode of a function says which names it uses.
"""

import argparse
import dataclasses
import dis
import functools
import gc
import hashlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ReferenceType

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rankless.compiler.guards.guards import (
    ContainerGuard,
    Guard,
    GuardSet,
    ModuleGuard,
    NamespaceGuard,
    QueryGuard,
    describe_tensor,
    make_guard_set,
    read_cell,
)
from rankless.compiler.guards.python_tracer import PythonTracer
from rankless.compiler.tracing.recomputed_weights import find_recomputed_weights
from rankless.compiler.tracing.value_snapshots import (
    BUFFERS,
    CONTAINERS,
    MAX_COMPARED_BYTES,
    MISSING,
    is_plain,
    list_elements,
    snapshot,
)
from rankless.errors import CaptureError
from rankless.ownership.modules_with_states_elsewhere import list_extension_packages
from rankless.user_code import is_user_code

DYNAMIC_ACCESS_NAMES = frozenset(
    {"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "methodcaller", "asdict", "astuple", "fields"}
    | {"copy", "deepcopy"}
)
"""Code that uses one of these names may read attributes that it does not name."""

GLOBAL_OPCODES = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


@dataclass(frozen=True, eq=False)
class ReadNames:
    """The names that a function and its nested functions read; with `includes_all` it may read any attribute."""

    names: frozenset[str]
    includes_all: bool = False
    global_names: frozenset[str] = frozenset()
    imported_modules: frozenset[str] = frozenset()
    """Modules imported inside the function."""

    @functools.cached_property
    def explicit(self) -> "ReadNames":
        """The same names without the attributes that the code may read but does not name."""
        if not self.includes_all:
            return self
        return ReadNames(self.names, global_names=self.global_names, imported_modules=self.imported_modules)

    def select(self, namespace: Any) -> list[str]:
        """Return the names that are in a namespace, in the same order in every process."""
        if self.includes_all:
            return sorted(name for name in namespace if isinstance(name, str) and not name.startswith("__"))
        return sorted(self.names & namespace.keys())


NO_NAMES = ReadNames(frozenset())


class BytecodeReader:
    """Reads the names in code objects, each once."""

    def __init__(self) -> None:
        self._cache: dict[CodeType, ReadNames] = {}

    def read_names(self, code: CodeType) -> ReadNames:
        """Return the names that this code reads."""
        if code not in self._cache:
            names = extract_names(code)
            instructions = [item for part in list_codes(code) for item in dis.get_instructions(part)]
            accessed_globally = frozenset(item.argval for item in instructions if item.opname in GLOBAL_OPCODES)
            self._cache[code] = ReadNames(
                names,
                includes_all=bool(names & DYNAMIC_ACCESS_NAMES),
                global_names=names if "globals" in names else accessed_globally,
                imported_modules=frozenset(item.argval for item in instructions if item.opname == "IMPORT_NAME"),
            )
        return self._cache[code]

    def imported_modules(self, code: CodeType, namespace: dict[str, Any]) -> list[tuple[str, ModuleType]]:
        """Return the modules that code imports when it runs."""
        package = namespace.get("__package__") or ""
        found = []
        for name in sorted(self.read_names(code).imported_modules):
            module = sys.modules.get(name) or sys.modules.get(f"{package}.{name}")
            if module is not None:
                found.append((name, module))
        return found


def list_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of its nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from list_codes(constant)


def extract_names(code: CodeType) -> frozenset[str]:
    """Return the names in a function's code, and identifiers in its string constants: `getattr(settings, "scale")`."""
    names = set[str]()
    for part in list_codes(code):
        names.update(part.co_names)
        names.update(item for item in part.co_consts if isinstance(item, str) and item.isidentifier())
    return frozenset(names)


def unwrap_functions(value: Any) -> list[FunctionType]:
    """Return the Python functions behind a method, property or decorated function."""
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, property):
        inner = [value.fget]
    else:
        inner = [getattr(value, "__func__", None), getattr(value, "__wrapped__", None)]
    return [function for item in inner if item is not None for function in unwrap_functions(item)]


MAX_COMPARED_ITEMS = 100_000
"""Capture refuses containers with more items, which would be compared at every call."""

CONTAINER_MODULES = ("collections", "configparser", "enum", "queue", "weakref")
"""Standard library modules whose classes hold the user's data under private attribute names."""

MODULE_TABLES = frozenset(
    {"training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
    | {"_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"}
    | {"_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights"}
)
"""Attributes that `ModuleGuard` covers, and those that recurrent modules rewrite whenever a parameter is set."""


NAMESPACE_TYPES = (SimpleNamespace, argparse.Namespace)
COMPREHENSION_NAMES = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


def discover_guards(
    function: Callable[..., Any], modules: Mapping[str, nn.Module], tracer: PythonTracer | None = None
) -> "GuardDiscovery":
    """Return a `GuardDiscovery` that has visited the function, the modules and the trace."""
    discovery = GuardDiscovery(None if tracer is None else tracer.codes)
    discovery.visit("job", function, NO_NAMES)
    for name, module in modules.items():
        discovery.visit_module(name, module)
    if tracer is not None:
        discovery.visit_trace(tracer)
    return discovery


class GuardDiscovery:
    """Walks from a function to everything that its code reads."""

    def __init__(self, executed: Container[CodeType] | None = None) -> None:
        self._executed = executed
        """The code that ran, if known. The walk skips other code, except code that runs in backward."""
        self.guards: dict[tuple[int, str], Guard] = {}
        self.read_only_states: list[QueryGuard] = []
        """State that a job may read but not advance: random number generators, open files."""
        self.iterators: dict[str, Any] = {}
        self.submodules: dict[str, nn.Module] = {}
        self._reader = BytecodeReader()
        self._visited_functions: set[int] = set()
        self._visited_codes: set[CodeType] = set()
        self._visited: set[tuple[int, int]] = set()
        self._visited_classes: set[tuple[int, int]] = set()
        self._visited_modules: set[int] = set()
        self._class_namespaces: dict[type, Mapping[str, Any]] = {}
        self._class_names: dict[type, ReadNames] = {}
        self._any_name = ReadNames(frozenset(), includes_all=True)

    def guard_set(self, training: Mapping[int, bool] | None) -> GuardSet:
        """Return the guards found; `ModuleGuard` explains `training`."""
        return make_guard_set(list(self.guards.values()), ModuleGuard(self.submodules, training))

    def visit_trace(self, tracer: PythonTracer) -> None:
        """Visit the code that ran: its globals, its closures, and the attributes of its objects."""
        for code, namespace in list(tracer.codes.items()):
            self._visit_globals(code, namespace)
        missing = [code for code in tracer.codes if code.co_freevars and code not in self._visited_codes]
        missing = [code for code in missing if code.co_name not in COMPREHENSION_NAMES]
        if missing:
            for item in gc.get_referrers(*missing):
                if isinstance(item, FunctionType):
                    self._visit_function(item)
        # Backward hooks and autograd functions run after the trace of the forward pass, which has not seen their code.
        executed, self._executed = self._executed, None
        for submodule in list(self.submodules.values()):
            for hook in (*submodule._backward_hooks.values(), *submodule._backward_pre_hooks.values()):
                self.visit("a backward hook", hook, NO_NAMES)
        for code, namespace in list(tracer.codes.items()):
            for name in sorted(self._reader.read_names(code).global_names & namespace.keys()):
                self._visit_autograd_function(namespace[name])
        self._executed = executed
        for (_, code), (label, value) in list(tracer.objects.items()):
            if is_plain(value):
                # A list or array that no name refers to. Immutable values are part of another object.
                if snapshot(value) is not value:
                    self._add_query(label, functools.partial(return_value, value), (id(value), "itself"))
            else:
                self.visit(label, value, self._reader.read_names(code))
        environment: Mapping[Any, Any] = vars(os.environ)["_data"]  # without a copy and decoding
        for name in sorted(tracer.environment):
            key: Any = os.fsencode(name)
            entry = NamespaceGuard(f"os.environ[{name!r}]", environment, key, environment.get(key, MISSING))
            self.guards.setdefault((id(environment), name), entry)

    def visit_module(self, path: str, module: nn.Module) -> None:
        """Visit a module with its submodules, and the attributes that their code reads."""
        for name, submodule in module.named_modules(prefix=path):
            if id(submodule) not in self._visited_modules:
                self._visited_modules.add(id(submodule))
                self.submodules[name] = submodule
                self._visit_attributes(name, submodule, self._names_read_by_class(type(submodule)))

    def _names_read_by_class(self, kind: type) -> ReadNames:
        """Return the names that the methods of a module's class read."""
        if kind not in self._class_names:
            read = frozenset({"forward"})
            for method in list_methods(kind):
                if not is_user_code(method.__code__.co_filename) or self._was_executed(method.__code__):
                    read |= extract_names(method.__code__)
                    self._visit_function(method)
            owner = next(parent for parent in kind.__mro__ if "forward" in vars(parent))
            self._visit_entry(f"{kind.__name__}.forward", self._class_namespace(owner), "forward", NO_NAMES)
            self._class_names[kind] = ReadNames(read)
        return self._class_names[kind]

    def _visit_function(self, function: FunctionType) -> None:
        """Visit the closure cells, globals and defaults that a user's Python function reads."""
        code = function.__code__
        if (
            id(function) in self._visited_functions
            or not is_user_code(code.co_filename)
            or not self._was_executed(code)
        ):
            return
        self._visited_functions.add(id(function))
        names = self._reader.read_names(code)
        self._visited_codes.add(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._add_query(name, functools.partial(read_cell, cell), (id(cell), name))
            self.visit(name, read_cell(cell), names)
        self._visit_globals(code, function.__globals__)
        label = function.__name__
        for name in ("__defaults__", "__kwdefaults__", "__code__"):
            self._add_query(f"{label}.{name}", functools.partial(getattr, function, name), (id(function), name))
        self.visit(label, function.__defaults__, names)
        self.visit(label, function.__kwdefaults__, names)
        self._visit_attributes(label, function, names)

    def _was_executed(self, code: CodeType) -> bool:
        return self._executed is None or code in self._executed

    def _visit_autograd_function(self, value: Any) -> None:
        """Visit the code of a user's autograd function, whose backward reads values too."""
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            for item in vars(value).values():
                for function in unwrap_functions(item):
                    self._visit_function(function)

    def _visit_globals(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Visit the globals that code names and the modules that it imports."""
        names = self._reader.read_names(code)
        for name in sorted(names.global_names & namespace.keys()):
            self._visit_entry(name, namespace, name, names)
        for name in sorted(names.global_names & vars(sys.modules["builtins"]).keys() - namespace.keys()):
            self.guards.setdefault((id(namespace), name), NamespaceGuard(name, namespace, name, MISSING))
        for name, module in self._reader.imported_modules(code, namespace):
            self.visit(name, module, names)

    def _visit_entry(self, label: str, namespace: Mapping[str, Any], name: str, names: ReadNames) -> None:
        """Guard an entry of a namespace and visit its value."""
        value = namespace[name]
        self._add_guard((id(namespace), name), value, lambda value: NamespaceGuard(label, namespace, name, value))
        self.visit(label, value, names)

    def _add_guard(self, key: tuple[int, str], value: Any, guard: Callable[[Any], Guard]) -> None:
        """Add a guard on a plain value, or on the identity of an object."""
        self.guards.setdefault(key, guard(snapshot(value) if is_plain(value) else value))

    def _add_query(self, label: str, query: Callable[[], Any], key: tuple[int, str]) -> None:
        value = query()
        self._add_guard(key, value, lambda value: QueryGuard(label, query, value))

    def visit(self, label: str, value: Any, names: ReadNames) -> None:
        """Visit a value that is not plain."""
        if value is MISSING or is_plain(value) or (id(value), id(names)) in self._visited:
            return
        self._visited.add((id(value), id(names)))
        if isinstance(value, FakeTensor | FunctionalTensor):
            return  # a value of the capture itself, such as an argument; the program's key and size guards cover it
        if isinstance(value, Tensor):
            self._add_query(
                f"{label}, its shape, dtype and requires_grad", lambda: describe_tensor(value), (id(value), "kind")
            )
        elif isinstance(value, nn.Module):
            self.visit_module(label, value)
            self._visit_attributes(label, value, names)
        elif isinstance(value, ModuleType):
            self._visit_python_module(label, value, names)
        elif isinstance(value, FunctionType | MethodType | functools.partial | property | staticmethod | classmethod):
            self._visit_callable(label, value, names)
        elif isinstance(value, CONTAINERS):
            self._visit_container(label, value, names)
        elif isinstance(value, type):
            self._visit_class(label, value, names)
        else:
            self._visit_object(label, value, names)

    def _visit_python_module(self, label: str, module: ModuleType, names: ReadNames) -> None:
        """Visit a user's module like any object; of other modules guard plain settings, functions and submodules."""
        namespace = vars(module)
        is_users = is_user_code(getattr(module, "__file__", None) or "<frozen")
        for name in sorted(names.names & namespace.keys()):
            value = namespace[name]
            if is_users or is_plain(value) or isinstance(value, ModuleType):
                self._visit_entry(f"{label}.{name}", namespace, name, names)
            elif callable(value):
                self.guards.setdefault((id(namespace), name), NamespaceGuard(f"{label}.{name}", namespace, name, value))

    def _visit_callable(self, label: str, value: Any, names: ReadNames) -> None:
        for function in unwrap_functions(value):
            self._visit_function(function)
        if isinstance(value, MethodType):
            inner = [self._reader.read_names(function.__code__) for function in unwrap_functions(value)]
            self.visit(label, value.__self__, inner[0] if inner else names)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self._add_query(f"{label}.{name}", functools.partial(getattr, value, name), (id(value), name))
                self.visit(label, getattr(value, name), names)

    def _visit_container(self, label: str, container: Any, names: ReadNames) -> None:
        """Guard a container's items and visit each."""
        if len(container) > MAX_COMPARED_ITEMS:
            raise make_size_error(label, f"a {type(container).__name__} of {len(container)} items")
        keys, values = map(tuple, list_elements(container))
        is_mapping = isinstance(container, Mapping)
        kept = tuple(snapshot(item) if is_plain(item) else item for item in values)
        items = ContainerGuard(label, container, keys if is_mapping else None, kept)
        self.guards.setdefault((id(container), "items"), items)
        for key, item in zip(keys if is_mapping else range(len(values)), values, strict=True):
            self.visit(f"{label}[{key!r:.40}]", item, names)
        if get_namespace(container) is not None:
            self._visit_attributes(label, container, names)

    def _visit_object(self, label: str, value: Any, names: ReadNames) -> None:
        """Visit an object of any class, as far as code names its state."""
        if isinstance(value, numpy.ndarray):
            raise make_size_error(label, f"a NumPy array of {value.nbytes} bytes and dtype {value.dtype}")
        if isinstance(value, BUFFERS):
            if memoryview(value).nbytes > MAX_COMPARED_BYTES:
                raise make_size_error(label, f"{memoryview(value).nbytes} bytes")
            self._add_query(label, lambda: bytes(value), (id(value), "bytes"))
        if isinstance(value, ReferenceType):
            self._add_query(f"{label}()", value, (id(value), "referent"))
            self.visit(label, value(), names)
        elif isinstance(value, ContextVar):
            self._add_query(label, lambda: value.get(MISSING), (id(value), "context"))
            self.visit(label, value.get(MISSING), names)
        elif isinstance(value, numpy.random.Generator | numpy.random.RandomState):
            self.read_only_states.append(QueryGuard(label, lambda: hash_rng_state(value), hash_rng_state(value)))
        elif isinstance(value, io.IOBase):
            self.read_only_states.append(QueryGuard(label, lambda: get_file_position(value), get_file_position(value)))
        elif isinstance(value, logging.Logger | logging.Handler) or holds_states_of_extension(value):
            return
        elif is_builtin_iterator(value):
            self.iterators[label] = value
        elif isinstance(value, functools._lru_cache_wrapper):
            self._add_query(f"{label}.cache_info()", lambda: get_cache_state(value), (id(value), "cache"))
            self.visit(label, value.__wrapped__, names)
        else:
            self._visit_attributes(label, value, names)
            if isinstance(value, Enum):
                self.visit(f"{label}.value", value._value_, names)

    def _visit_attributes(self, label: str, value: Any, names: ReadNames) -> None:
        """Visit the attributes of an object that code names: its own, its slots, and its class's."""
        kind = type(value)
        holds_data = kind.__module__ in CONTAINER_MODULES or dataclasses.is_dataclass(kind)
        if kind.__module__ in CONTAINER_MODULES:
            names = self._any_name
        elif not holds_data and not is_user_class(kind) and kind not in NAMESPACE_TYPES:
            names = names.explicit
        namespace = get_namespace(value)
        if namespace is not None:
            own = frozenset[str]()  # no Python state of the job: tables, and weights that a hook computes
            if isinstance(value, nn.Module):
                own = MODULE_TABLES.union(weight.name for weight in find_recomputed_weights([value]))
            for name in names.select(namespace):
                if name not in own:
                    # Dynamic access reads this object's attributes. Only plain data passes it on to their values.
                    self._visit_entry(f"{label}.{name}", namespace, name, names if holds_data else names.explicit)
        self._visit_class(label, kind, names)
        for parent in kind.__mro__:
            for name, item in vars(parent).items():
                if isinstance(item, MemberDescriptorType) and (names.includes_all or name in names.names):
                    self._visit_slot(f"{label}.{name}", value, item, names)
            if namespace is not None:
                for name in names.names & vars(parent).keys() - namespace.keys():
                    self.guards.setdefault(
                        (id(namespace), name), NamespaceGuard(f"{label}.{name}", namespace, name, MISSING)
                    )

    def _visit_slot(self, label: str, value: Any, slot: MemberDescriptorType, names: ReadNames) -> None:
        def query() -> Any:
            try:
                return slot.__get__(value, type(value))
            except AttributeError:
                return MISSING

        self._add_query(label, query, (id(value), slot.__name__))
        self.visit(label, query(), names)

    def _visit_class(self, label: str, kind: type, names: ReadNames) -> None:
        """Visit what a user's class defines or inherits under the names that code reads."""
        if (id(kind), id(names)) in self._visited_classes:
            return
        self._visited_classes.add((id(kind), id(names)))
        scopes = [(parent, self._class_namespace(parent)) for parent in kind.__mro__]
        for name in sorted(names.names | {"__call__", "__getattr__"}):
            for position, (parent, namespace) in enumerate(scopes):
                if not is_user_class(parent):
                    continue
                if name in namespace:
                    if not isinstance(namespace[name], MemberDescriptorType):
                        self._visit_entry(f"{label}.{name}", namespace, name, names)
                    break
                if any(name in later for _, later in scopes[position + 1 :]):
                    self.guards.setdefault(
                        (id(namespace), name), NamespaceGuard(f"{label}.{name}", namespace, name, MISSING)
                    )

    def _class_namespace(self, kind: type) -> Mapping[str, Any]:
        """Return a class's namespace, always as the same object."""
        return self._class_namespaces.setdefault(kind, vars(kind))


NOT_RUN_IN_FORWARD = frozenset({"__init__", "__repr__", "__setstate__", "extra_repr", "reset_parameters"})


def list_methods(kind: type) -> list[FunctionType]:
    """Return the methods of a module's class that may run in `forward`."""
    return [
        method
        for parent in kind.__mro__
        if parent not in (nn.Module, object)
        for name, method in vars(parent).items()
        if isinstance(method, FunctionType) and name not in NOT_RUN_IN_FORWARD
    ]


def get_namespace(value: Any) -> dict[str, Any] | None:
    """Return an object's `__dict__`, or None, without running code of its class."""
    try:
        # A threading.local has one namespace per thread.
        lookup = threading.local if isinstance(value, threading.local) else object
        namespace = lookup.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return namespace if isinstance(namespace, dict) else None


def return_value(value: Any) -> Any:
    """Return the value unchanged, for guards on objects without a name."""
    return value


def is_user_class(kind: type) -> bool:
    """Return whether a class is defined in the user's code."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return is_user_code(file)


def holds_states_of_extension(value: Any) -> bool:
    """Return whether a value belongs to an `ExtensionModule`, whose states operators read when a program runs."""
    packages = tuple(list_extension_packages())
    return type(value).__module__.startswith(packages) and not isinstance(value, nn.Module)


def is_builtin_iterator(value: Any) -> bool:
    """Return whether a value is an iterator without a readable position: a generator, `itertools.count`, `zip`, …"""
    if not isinstance(value, Iterator):
        return False
    return not any(isinstance(vars(kind).get("__next__"), FunctionType) for kind in type(value).__mro__)


def hash_rng_state(generator: Any) -> str:
    """Return the state of a NumPy generator as a short digest."""
    has_bits = isinstance(generator, numpy.random.Generator)
    state = generator.bit_generator.state if has_bits else generator.get_state(legacy=False)
    with numpy.printoptions(threshold=sys.maxsize):
        return hashlib.sha256(repr(state).encode()).hexdigest()[:8]


def get_file_position(file: io.IOBase) -> int:
    """Return the position in a file; -1 if it has none."""
    return file.tell() if not file.closed and file.seekable() else -1


def get_cache_state(function: Any) -> tuple[int, int]:
    """Return how often a cached function has computed, and how many results it keeps."""
    info = function.cache_info()
    return info.misses, info.currsize


def make_size_error(label: str, found: str) -> CaptureError:
    """Return the error for a value that is too large to compare at every call."""
    return CaptureError(
        expected=f"plain values small enough to compare at every call: up to {MAX_COMPARED_BYTES} bytes of numbers",
        found=f"the job reads {label}: {found}",
        fix="make it a tensor, or extract what the job needs before the call",
    )
