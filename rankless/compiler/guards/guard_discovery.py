"""Finds what a job reads: from its function, its modules, and what a watched pass has run, to plain values."""

import argparse
import dataclasses
import functools
import gc
import io
import logging
import os
import sys
from collections.abc import Callable, Container, Mapping
from contextvars import ContextVar
from enum import Enum
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ReferenceType

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rankless.compiler.guards.bytecode_names import NOTHING, Names, Reader, functions_in, names_in
from rankless.compiler.guards.guards import Answer, Cell, Entry, Guard, Guards, Items, contents, laid_out
from rankless.compiler.guards.module_state import ModuleState, kind_of
from rankless.compiler.guards.object_state import (
    cache_state,
    drawing_state,
    is_builtin_iterator,
    is_users_class,
    itself,
    methods_of,
    place_in,
    too_large,
    vars_of,
)
from rankless.compiler.guards.python_tracer import Watch
from rankless.compiler.tracing.plain_values import (
    BUFFERS,
    COMPARED_BYTES,
    CONTAINERS,
    MISSING,
    elements,
    frozen,
    is_simple,
)
from rankless.user_code import is_user_code

MOST_ITEMS = 100_000
"""A container with more items than this is not compared at every call."""

HOLDERS = ("collections", "configparser", "enum", "queue", "weakref")
"""Modules of Python whose classes hold data for their user under names of their own."""

OWN_TABLES = frozenset(
    {"training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
    | {"_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"}
    | {"_flat_weights", "_flat_weight_refs", "_flat_weights_names", "_all_weights"}
)
"""What `ModuleState` watches, and what recurrent modules write anew whenever a parameter is set."""

NAMESPACES = (SimpleNamespace, argparse.Namespace)
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")


def guards_of(
    function: Callable[..., Any],
    modules: Mapping[str, nn.Module],
    watch: Watch | None = None,
    training: Mapping[int, bool] | None = None,
) -> Guards:
    """The guards for a job's function and its modules, and for what ran in a watched pass, with their values of now.

    `training` gives the modes that count, by the module's id, where they are not those of now.
    """
    return found_by(function, modules, watch).result(training or {})


def found_by(function: Callable[..., Any], modules: Mapping[str, nn.Module], watch: Watch | None) -> "Finder":
    """A finder that has walked."""
    found = Finder(None if watch is None else watch.codes)
    found.value("job", function)
    for name, module in modules.items():
        found.module(name, module)
    if watch is not None:
        found.watched(watch)
    return found


class Finder:
    """Walks from a function to all that its code reads."""

    def __init__(self, ran: Container[CodeType] | None = None) -> None:
        self._ran = ran
        """The code that ran, if that is known: other code is not read, but for what runs in backward."""
        self.guards: dict[tuple[int, str], Guard] = {}
        self.states: list[Answer] = []
        """Of things that may be read but not moved on by a job: generators of random numbers, open files."""
        self.iterators: dict[str, Any] = {}
        self.parts: dict[str, nn.Module] = {}
        self._reader = Reader()
        self._functions: set[int] = set()
        self._codes: set[CodeType] = set()
        self._walked: set[tuple[int, int]] = set()
        self._walked_classes: set[tuple[int, int]] = set()
        self._part_identities: set[int] = set()
        self._class_scopes: dict[type, Mapping[str, Any]] = {}
        self._names_of_class: dict[type, Names] = {}
        self._every = Names(frozenset(), every=True)

    def result(self, training: Mapping[int, bool] | None) -> Guards:
        """What has been found; see `ModuleState` for `training`."""
        return laid_out(list(self.guards.values()), ModuleState(self.parts, training))

    def watched(self, watch: Watch) -> None:
        """What ran: its globals, its closures, and the attributes of the objects that it had."""
        for code, scope in list(watch.codes.items()):
            self._globals(code, scope)
        missing = [code for code in watch.codes if code.co_freevars and code not in self._codes]
        missing = [code for code in missing if code.co_name not in COMPREHENSIONS]
        if missing:
            for item in gc.get_referrers(*missing):
                if isinstance(item, FunctionType):
                    self._function(item)
        ran, self._ran = self._ran, None
        for part in list(self.parts.values()):
            for hook in (*part._backward_hooks.values(), *part._backward_pre_hooks.values()):
                self._into("a backward hook", hook, NOTHING)
        for code, scope in list(watch.codes.items()):
            for name in sorted(self._reader.names(code).read_globally & scope.keys()):
                self._backward_of(scope[name])
        self._ran = ran
        for (_, code), (label, value) in list(watch.objects.items()):
            if is_simple(value):
                # A list or array that no name leads to; what cannot be changed in place is part of something else.
                if frozen(value) is not value:
                    self._ask(label, functools.partial(itself, value), (id(value), "itself"))
            else:
                self._into(label, value, self._reader.names(code))
        environment: Mapping[Any, Any] = vars(os.environ)["_data"]  # without a copy and decoding
        for name in sorted(watch.environment):
            key: Any = os.fsencode(name)
            entry = Entry(f"os.environ[{name!r}]", environment, key, environment.get(key, MISSING))
            self.guards.setdefault((id(environment), name), entry)

    def module(self, path: str, module: nn.Module) -> None:
        """A module with its parts, and the attributes that their code reads."""
        for name, part in module.named_modules(prefix=path):
            if id(part) not in self._part_identities:
                self._part_identities.add(id(part))
                self.parts[name] = part
                self._attributes(name, part, self._names_of(type(part)))

    def value(self, label: str, value: Any) -> None:
        """What stands behind a value, such as the job's function."""
        self._into(label, value, NOTHING)

    def _names_of(self, kind: type) -> Names:
        """What the methods of a module's class read."""
        if kind not in self._names_of_class:
            read = frozenset({"forward"})
            for method in methods_of(kind):
                if not is_user_code(method.__code__.co_filename) or self._has_run(method.__code__):
                    read |= names_in(method.__code__)
                    self._function(method)
            owner = next(parent for parent in kind.__mro__ if "forward" in vars(parent))
            self._entry(f"{kind.__name__}.forward", self._scope_of(owner), "forward", NOTHING)
            self._names_of_class[kind] = Names(read)
        return self._names_of_class[kind]

    def _function(self, function: FunctionType) -> None:
        """Closure cells, globals and defaults that a Python function of the user reads."""
        code = function.__code__
        if id(function) in self._functions or not is_user_code(code.co_filename) or not self._has_run(code):
            return
        self._functions.add(id(function))
        names = self._reader.names(code)
        self._codes.add(code)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._keep((id(cell), name), contents(cell), functools.partial(Cell, name, cell))
            self._into(name, contents(cell), names)
        self._globals(code, function.__globals__)
        label = function.__name__
        for name in ("__defaults__", "__kwdefaults__", "__code__"):
            self._ask(f"{label}.{name}", functools.partial(getattr, function, name), (id(function), name))
        self._into(label, function.__defaults__, names)
        self._into(label, function.__kwdefaults__, names)
        self._attributes(label, function, names)

    def _has_run(self, code: CodeType) -> bool:
        return self._ran is None or code in self._ran

    def _backward_of(self, value: Any) -> None:
        """What an autograd function of the user's reads when its gradient is made."""
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            for item in vars(value).values():
                for function in functions_in(item):
                    self._function(function)

    def _globals(self, code: CodeType, scope: dict[str, Any]) -> None:
        """The globals that code names, and the modules that it imports."""
        names = self._reader.names(code)
        for name in sorted(names.read_globally & scope.keys()):
            self._entry(name, scope, name, names)
        for name in sorted(names.read_globally & vars(sys.modules["builtins"]).keys() - scope.keys()):
            self.guards.setdefault((id(scope), name), Entry(name, scope, name, MISSING))
        for name, module in self._reader.modules(code, scope):
            self._into(name, module, names)

    def _entry(self, label: str, scope: Mapping[str, Any], name: str, names: Names) -> None:
        """An entry of a namespace, and what stands behind it."""
        value = scope[name]
        self._keep((id(scope), name), value, lambda value: Entry(label, scope, name, value))
        self._into(label, value, names)

    def _keep(self, key: tuple[int, str], value: Any, guard: Callable[[Any], Guard]) -> None:
        """A guard on a plain value, or on which object stands there."""
        self.guards.setdefault(key, guard(frozen(value) if is_simple(value) else value))

    def _ask(self, label: str, ask: Callable[[], Any], key: tuple[int, str]) -> None:
        value = ask()
        self._keep(key, value, lambda value: Answer(label, ask, value))

    def _into(self, label: str, value: Any, names: Names) -> None:
        """Go on into what is no plain value."""
        if value is MISSING or is_simple(value) or (id(value), id(names)) in self._walked:
            return
        self._walked.add((id(value), id(names)))
        if isinstance(value, FakeTensor | FunctionalTensor):
            return  # a value of the capture itself, as an argument; the program's key and guards of sizes know it
        if isinstance(value, Tensor):
            self._ask(f"{label}, its shape, dtype and requires_grad", lambda: kind_of(value), (id(value), "kind"))
        elif isinstance(value, nn.Module):
            self.module(label, value)
            self._attributes(label, value, names)
        elif isinstance(value, ModuleType):
            self._python_module(label, value, names)
        elif isinstance(value, FunctionType | MethodType | functools.partial | property | staticmethod | classmethod):
            self._callable(label, value, names)
        elif isinstance(value, CONTAINERS):
            self._items(label, value, names)
        elif isinstance(value, type):
            self._class(label, value, names)
        else:
            self._object(label, value, names)

    def _python_module(self, label: str, module: ModuleType, names: Names) -> None:
        """A user's module like any object; of others plain settings, functions and modules in them."""
        scope = vars(module)
        is_users = is_user_code(getattr(module, "__file__", None) or "<frozen")
        for name in sorted(names.read & scope.keys()):
            value = scope[name]
            if is_users or is_simple(value) or isinstance(value, ModuleType):
                self._entry(f"{label}.{name}", scope, name, names)
            elif callable(value):
                self.guards.setdefault((id(scope), name), Entry(f"{label}.{name}", scope, name, value))

    def _callable(self, label: str, value: Any, names: Names) -> None:
        for function in functions_in(value):
            self._function(function)
        if isinstance(value, MethodType):
            inner = [self._reader.names(function.__code__) for function in functions_in(value)]
            self._into(label, value.__self__, inner[0] if inner else names)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self._ask(f"{label}.{name}", functools.partial(getattr, value, name), (id(value), name))
                self._into(label, getattr(value, name), names)

    def _items(self, label: str, container: Any, names: Names) -> None:
        """A container's items, and what stands behind each."""
        if len(container) > MOST_ITEMS:
            raise too_large(label, f"a {type(container).__name__} of {len(container)} items")
        keys, values = map(tuple, elements(container))
        is_mapping = isinstance(container, Mapping)
        kept = tuple(frozen(item) if is_simple(item) else item for item in values)
        items = Items(label, container, keys if is_mapping else None, kept)
        self.guards.setdefault((id(container), "items"), items)
        for key, item in zip(keys if is_mapping else range(len(values)), values, strict=True):
            self._into(f"{label}[{key!r:.40}]", item, names)
        if vars_of(container) is not None:
            self._attributes(label, container, names)

    def _object(self, label: str, value: Any, names: Names) -> None:
        """An object of any class: what it is made of, as far as code names it."""
        if isinstance(value, numpy.ndarray):
            raise too_large(label, f"a NumPy array of {value.nbytes} bytes and dtype {value.dtype}")
        if isinstance(value, BUFFERS):
            if memoryview(value).nbytes > COMPARED_BYTES:
                raise too_large(label, f"{memoryview(value).nbytes} bytes")
            self._ask(label, lambda: bytes(value), (id(value), "bytes"))
        if isinstance(value, ReferenceType):
            self._ask(f"{label}()", value, (id(value), "referent"))
            self._into(label, value(), names)
        elif isinstance(value, ContextVar):
            self._ask(label, lambda: value.get(MISSING), (id(value), "context"))
            self._into(label, value.get(MISSING), names)
        elif isinstance(value, numpy.random.Generator | numpy.random.RandomState):
            self.states.append(Answer(label, lambda: drawing_state(value), drawing_state(value)))
        elif isinstance(value, io.IOBase):
            self.states.append(Answer(label, lambda: place_in(value), place_in(value)))
        elif isinstance(value, logging.Logger | logging.Handler):
            return
        elif is_builtin_iterator(value):
            self.iterators[label] = value
        elif isinstance(value, functools._lru_cache_wrapper):
            self._ask(f"{label}.cache_info()", lambda: cache_state(value), (id(value), "cache"))
            self._into(label, value.__wrapped__, names)
        else:
            self._attributes(label, value, names)
            if isinstance(value, Enum):
                self._into(f"{label}.value", value._value_, names)

    def _attributes(self, label: str, value: Any, names: Names) -> None:
        """The attributes of an object that code names: its own, its slots, and its class's."""
        kind = type(value)
        holds_data = kind.__module__ in HOLDERS or dataclasses.is_dataclass(kind)
        if kind.__module__ in HOLDERS:
            names = self._every
        elif not holds_data and not is_users_class(kind) and kind not in NAMESPACES:
            names = names.named
        scope = vars_of(value)
        if scope is not None:
            own = OWN_TABLES if isinstance(value, nn.Module) else frozenset()
            for name in names.among(scope):
                if name not in own:
                    # What is not named is read of this object; not of all that it leads to, but for plain data.
                    self._entry(f"{label}.{name}", scope, name, names if holds_data else names.named)
        self._class(label, kind, names)
        for parent in kind.__mro__:
            for name, item in vars(parent).items():
                if isinstance(item, MemberDescriptorType) and (names.every or name in names.read):
                    self._slot(f"{label}.{name}", value, item, names)
            if scope is not None:
                for name in names.read & vars(parent).keys() - scope.keys():
                    self.guards.setdefault((id(scope), name), Entry(f"{label}.{name}", scope, name, MISSING))

    def _slot(self, label: str, value: Any, slot: MemberDescriptorType, names: Names) -> None:
        def ask() -> Any:
            try:
                return slot.__get__(value, type(value))
            except AttributeError:
                return MISSING

        self._ask(label, ask, (id(value), slot.__name__))
        self._into(label, ask(), names)

    def _class(self, label: str, kind: type, names: Names) -> None:
        """What a user's class holds or inherits under the names that code reads."""
        if (id(kind), id(names)) in self._walked_classes:
            return
        self._walked_classes.add((id(kind), id(names)))
        scopes = [(parent, self._scope_of(parent)) for parent in kind.__mro__]
        for name in sorted(names.read | {"__call__", "__getattr__"}):
            for place, (parent, scope) in enumerate(scopes):
                if not is_users_class(parent):
                    continue
                if name in scope:
                    if not isinstance(scope[name], MemberDescriptorType):
                        self._entry(f"{label}.{name}", scope, name, names)
                    break
                if any(name in later for _, later in scopes[place + 1 :]):
                    self.guards.setdefault((id(scope), name), Entry(f"{label}.{name}", scope, name, MISSING))

    def _scope_of(self, kind: type) -> Mapping[str, Any]:
        """A class's namespace; the same object whenever it is asked for."""
        return self._class_scopes.setdefault(kind, vars(kind))
