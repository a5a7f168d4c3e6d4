"""The random generators that reading depends on: the process's own three, and others that objects hold.

Note [a sample's random numbers]: in split reading no rank reads what another reads, so a data set that draws
from the running generators would give every rank other numbers than one device. Instead the generators are
seeded from (seed, epoch, index) before each sample and restored after the batch: the same augmentation on any
number of workers. So are generators that the data set holds itself. The three numbers are mixed by SplitMix64
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, with the constants of
Vigna's reference code). CPU generators only: data sets that draw on a GPU are not covered.
"""

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from types import FunctionType, ModuleType
from typing import Any

import numpy
import torch

from rankless.errors import DataError

_MASK = (1 << 64) - 1
_DEEPEST = 4

Generator = torch.Generator | numpy.random.Generator | numpy.random.RandomState | random.Random
_NO_OWNERS = (torch.Tensor, numpy.ndarray, type, ModuleType, FunctionType)
ProcessStates = tuple[torch.Tensor, Any, Any]
"""Of torch's CPU generator, NumPy's and Python's."""


def split_mix_64(state: int) -> int:
    """64 well-mixed bits from 64 bits that may be close to others."""
    mixed = (state + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def derive_epoch_seed(seed: int, epoch: int) -> int:
    """The seed of an epoch; `epoch` counts from 0."""
    return split_mix_64(split_mix_64(seed & _MASK) ^ epoch)


def derive_sample_seed(seed_of_epoch: int, index: object) -> int:
    """The seed of one sample: of an integer index by mixing, of any other key by a digest of its `repr`."""
    try:
        number = int(index)  # type: ignore[call-overload]  # whatever a sampler yields
    except (TypeError, ValueError):
        number = int.from_bytes(blake2b(repr(index).encode(), digest_size=8).digest(), "little")
    return split_mix_64(seed_of_epoch ^ (number & _MASK))


def get_process_states() -> ProcessStates:
    """The states of the process's generators, as they are now."""
    return torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()


def set_process_states(states: ProcessStates) -> None:
    """Set the process's generators to what `process_states` gave."""
    torch_state, numpy_state, python_state = states
    torch.default_generator.set_state(torch_state)
    numpy.random.set_state(numpy_state)
    random.setstate(python_state)


def find_changed_generators(one: ProcessStates, other: ProcessStates) -> frozenset[str]:
    """The names of the process's generators that were drawn from between two moments."""
    same = {
        "torch": bool(torch.equal(one[0], other[0])),
        "NumPy": all(numpy.array_equal(left, right) for left, right in zip(one[1], other[1], strict=True)),
        "Python": one[2] == other[2],
    }
    return frozenset(name for name, unchanged in same.items() if not unchanged)


@contextmanager
def preserve_generators(held: Mapping[str, Generator]) -> Iterator[None]:
    """Whatever is drawn inside leaves the process's generators, and those `held`, as they were."""
    states, held_states = get_process_states(), get_states(held)
    try:
        yield
    finally:
        set_process_states(states)
        set_states(held, held_states)


def seed_generators(seed: int, held: Mapping[str, Generator]) -> None:
    """Start the process's generators, and those `held`, from one 64-bit seed."""
    torch.default_generator.manual_seed(seed)
    # Both are Mersenne twisters started from 32 bits, torch's from the lower: alike, they would draw alike.
    numpy.random.seed(seed >> 32)
    random.seed(seed)
    for number, generator in enumerate(held.values(), start=1):
        own = split_mix_64(seed ^ number)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(own)
        elif isinstance(generator, random.Random):
            generator.seed(own)
        elif isinstance(generator, numpy.random.RandomState):
            generator.seed(own >> 32)
        else:
            generator.bit_generator.state = type(generator.bit_generator)(own).state


def find_generators(*owners: object) -> dict[str, Generator]:
    """The generators found in the attributes of objects, by the way to them; each once."""
    found: dict[str, Generator] = {}
    # An object may hold a process's generator under a name of its own.
    seen = {id(torch.default_generator), id(vars(numpy.random.mtrand)["_rand"]), id(vars(random)["_inst"])}

    def visit(value: object, path: str, depth: int) -> None:
        if id(value) in seen or depth > _DEEPEST:
            return
        if isinstance(value, Generator):
            seen.add(id(value))
            found[path] = value
        elif isinstance(value, list | tuple) and len(value) <= 64:
            for place, part in enumerate(value):
                visit(part, f"{path}[{place}]", depth + 1)
        elif isinstance(value, dict) and len(value) <= 64:
            for key, part in value.items():
                visit(part, f"{path}[{key!r}]", depth + 1)
        elif not isinstance(value, _NO_OWNERS) and hasattr(value, "__dict__"):
            seen.add(id(value))
            for name, part in vars(value).items():
                visit(part, f"{path}.{name}", depth + 1)

    for owner in owners:
        visit(owner, type(owner).__name__, 0)
    return found


def get_states(held: Mapping[str, Generator]) -> dict[str, Any]:
    """The states of generators by their names."""
    return {name: _state(generator) for name, generator in held.items()}


def set_states(held: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Set generators to the states that stand under their names; raises DataError where one is missing."""
    for name, generator in held.items():
        if name not in states:
            raise DataError(
                expected=f"a saved state of the generator {name}",
                found=f"states of {', '.join(states) or 'none'}",
                fix="build the loader and its sampler as in the run that saved",
            )
        if isinstance(generator, torch.Generator):
            generator.set_state(states[name])
        elif isinstance(generator, random.Random):
            generator.setstate(states[name])
        elif isinstance(generator, numpy.random.RandomState):
            generator.set_state(states[name])
        else:
            generator.bit_generator.state = states[name]


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state


def to_plain(state: Any) -> Any:
    """A generator's state as a tensor or text, which any checkpoint can hold; `from_plain` is its inverse."""
    return state if isinstance(state, torch.Tensor) else json.dumps(_to_json(state))


def from_plain(plain: Any) -> Any:
    """A generator's state from what `as_plain` made of it."""
    return plain if isinstance(plain, torch.Tensor) else _from_json(json.loads(plain))


def _to_json(value: Any) -> Any:
    if isinstance(value, numpy.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.str}
    if isinstance(value, numpy.integer):
        return int(value)
    if isinstance(value, tuple):
        return {"tuple": [_to_json(part) for part in value]}
    return {key: _to_json(part) for key, part in value.items()} if isinstance(value, dict) else value


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"array", "dtype"}:
        return numpy.array(value["array"], dtype=value["dtype"])
    if value.keys() == {"tuple"}:
        return tuple(_from_json(part) for part in value["tuple"])
    return {key: _from_json(part) for key, part in value.items()}
