"""The random generators that reading depends on: the process's three generators, and those that objects hold.

Note [random numbers of a sample]: with reading="split" a rank does not read the samples of other ranks. A data set that
drew from the process's generators would therefore give each rank other numbers than one device. Instead
`seed_generators` seeds all generators from (seed, epoch, index) before each sample, and `preserve_generators` restores
them after the batch. Augmentation is then the same on any number of workers. Generators that the data set holds are
seeded too. SplitMix64 mixes the three numbers (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014, with the constants of Vigna's reference code). Only CPU generators are covered.
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

from rankless.collectives.value_encoding import decode_value, encode_value
from rankless.errors import DataError

_MASK = (1 << 64) - 1
_DEEPEST = 4

Generator = torch.Generator | numpy.random.Generator | numpy.random.RandomState | random.Random
_NO_OWNERS = (torch.Tensor, numpy.ndarray, type, ModuleType, FunctionType)
ProcessStates = tuple[torch.Tensor, Any, Any]
"""States of torch's CPU generator, NumPy's and Python's."""


def split_mix_64(state: int) -> int:
    """Return 64 well-mixed bits, also for inputs that are close to each other."""
    mixed = (state + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def derive_epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch; `epoch` counts from 0."""
    return split_mix_64(split_mix_64(seed & _MASK) ^ epoch)


def derive_sample_seed(seed_of_epoch: int, index: object) -> int:
    """Return the seed of one sample. An integer index is mixed in; any other key through a digest of its `repr`."""
    try:
        number = int(index)  # type: ignore[call-overload]  # whatever a sampler yields
    except (TypeError, ValueError):
        number = int.from_bytes(blake2b(repr(index).encode(), digest_size=8).digest(), "little")
    return split_mix_64(seed_of_epoch ^ (number & _MASK))


def get_process_states() -> ProcessStates:
    """Return the current states of the process's generators."""
    return torch.default_generator.get_state(), numpy.random.get_state(), random.getstate()


def take_process_states() -> ProcessStates:
    """Return the current states for another process, and draw once, so that the next call returns other states."""
    states = get_process_states()
    torch.empty((), dtype=torch.int64, device="cpu").random_()
    numpy.random.random()
    random.random()
    return states


def set_process_states(states: ProcessStates) -> None:
    """Set the process's generators to states from `get_process_states`."""
    torch_state, numpy_state, python_state = states
    torch.default_generator.set_state(torch_state)
    numpy.random.set_state(numpy_state)
    random.setstate(python_state)


def encode_changed_states(before: ProcessStates) -> list[bytes] | None:
    """Return the states of the process's generators for another process; None if nothing was drawn since `before`."""
    now = get_process_states()
    return [encode_value(to_plain(state)) for state in now] if find_changed_generators(before, now) else None


def take_encoded_states(states: list[bytes] | None) -> None:
    """Set the process's generators to what `encode_changed_states` has returned in another process."""
    if states is not None:
        torch_state, numpy_state, python_state = (from_plain(decode_value(state)) for state in states)
        set_process_states((torch_state, numpy_state, python_state))


def find_changed_generators(one: ProcessStates, other: ProcessStates) -> frozenset[str]:
    """Return the names of the process's generators whose states differ between two snapshots."""
    same = {
        "torch": bool(torch.equal(one[0], other[0])),
        "NumPy": all(numpy.array_equal(left, right) for left, right in zip(one[1], other[1], strict=True)),
        "Python": one[2] == other[2],
    }
    return frozenset(name for name, unchanged in same.items() if not unchanged)


@contextmanager
def preserve_generators(generators: Mapping[str, Generator]) -> Iterator[None]:
    """Restore the process's generators and `held` ones at exit, whatever the body draws."""
    states, generator_states = get_process_states(), get_states(generators)
    try:
        yield
    finally:
        set_process_states(states)
        set_states(generators, generator_states)


def seed_generators(seed: int, generators: Mapping[str, Generator]) -> None:
    """Seed the process's generators and `held` ones from one 64-bit seed."""
    torch.default_generator.manual_seed(seed)
    # torch seeds its Mersenne twister with the lower 32 bits. NumPy gets the upper ones, so that the two differ.
    numpy.random.seed(seed >> 32)
    random.seed(seed)
    for number, generator in enumerate(generators.values(), start=1):
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
    """Return the generators in the attributes of objects by path, each one once."""
    found: dict[str, Generator] = {}
    # Skip the process's generators, which an object may also hold.
    seen = {id(torch.default_generator), id(vars(numpy.random.mtrand)["_rand"]), id(vars(random)["_inst"])}

    def visit(value: object, path: str, depth: int) -> None:
        if id(value) in seen or depth > _DEEPEST:
            return
        if isinstance(value, Generator):
            seen.add(id(value))
            found[path] = value
        elif isinstance(value, list | tuple) and len(value) <= 64:
            for index, part in enumerate(value):
                visit(part, f"{path}[{index}]", depth + 1)
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


def get_states(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Return the states of generators by name."""
    return {name: _get_state(generator) for name, generator in generators.items()}


def set_states(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Set generators to the states of the same names. Raises `DataError` if a state is missing."""
    for name, generator in generators.items():
        if name not in states:
            raise DataError(
                expected=f"a saved state of the generator {name}",
                found=f"states of {', '.join(states) or 'none'}",
                fix="build the loader and its sampler as in the run that saved the state",
            )
        if isinstance(generator, torch.Generator):
            generator.set_state(states[name])
        elif isinstance(generator, random.Random):
            generator.setstate(states[name])
        elif isinstance(generator, numpy.random.RandomState):
            generator.set_state(states[name])
        else:
            generator.bit_generator.state = states[name]


def _get_state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state


def to_plain(state: Any) -> Any:
    """Return a generator's state as a tensor or text that any checkpoint can hold. Inverse: `from_plain`."""
    return state if isinstance(state, torch.Tensor) else json.dumps(_to_json(state))


def from_plain(plain: Any) -> Any:
    """Return a generator's state from the result of `to_plain`."""
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
