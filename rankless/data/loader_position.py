"""The position of a loader: what a pass started from and how many batches it yielded, as plain data for a checkpoint.

Note [resuming a pass]: a resumed pass starts again from the generators' states at its start and skips the batches that
were yielded. It draws their indices but does not read their samples. `DataLoader` draws at two moments: when iteration
starts and when the first batch is requested. A script may draw between them, so both states are saved. All other uses
of the process's generators, such as dropout, continue from their current states.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rankless.data.random_generators import (
    Generator,
    ProcessStates,
    from_plain,
    get_process_states,
    get_states,
    set_process_states,
    set_states,
    to_plain,
)
from rankless.errors import DataError

VERSION = 1
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class GeneratorSnapshot:
    """The states of the process's generators and of those that a sampler or stream holds."""

    process: ProcessStates
    generator_states: Mapping[str, Any]

    @staticmethod
    def now(generators: Mapping[str, Generator]) -> "GeneratorSnapshot":
        """Return a snapshot of the current states."""
        return GeneratorSnapshot(get_process_states(), get_states(generators))

    def restore(self, generators: Mapping[str, Generator]) -> None:
        """Set all generators to the snapshot's states."""
        set_process_states(self.process)
        set_states(generators, self.generator_states)

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"process": [to_plain(state) for state in self.process], "held": to_plain_states(self.generator_states)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> "GeneratorSnapshot":
        """Return a snapshot from the result of `to_plain`."""
        torch_state, numpy_state, python_state = (from_plain(state) for state in plain["process"])
        return GeneratorSnapshot((torch_state, numpy_state, python_state), from_plain_states(plain["held"]))


@dataclass(kw_only=True)
class Pass:
    """One pass over the data."""

    number: int
    """Number of the pass, from 0."""
    seed: int | None
    """Seed of the samples' random numbers; None if they are drawn from the process's generators."""
    at_start: GeneratorSnapshot
    sampler: list[dict[str, Any]]
    """The samplers' own states at the start."""
    first: GeneratorSnapshot | None = None
    """Snapshot when the first batch was requested; None until then."""
    position: int = 0
    """Number of batches yielded."""
    digest: bytes = b""
    """Digest of the requests of all yielded batches, in order."""
    is_over: bool = False
    resumed: bool = field(default=False, repr=False)
    """Whether another process started the pass, so that this one continues at `position`."""
    interleaved_draws: frozenset[str] = frozenset()
    """The process's generators that both the sampler or stream and the script draw from after the first batch."""
    has_lists: bool = False
    """Whether the batches hold lists of one plain value per sample."""

    def count_batch(self, digest: bytes) -> None:
        """Count a yielded batch by the digest of its request."""
        self.position += 1
        self.digest = chain_digests(self.digest, digest)

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for a checkpoint. Raises `DataError` if the pass cannot be resumed."""
        if self.interleaved_draws:
            raise DataError(
                expected="a sampler or stream that can be resumed in the middle of a pass",
                found=f"it draws from {' and '.join(sorted(self.interleaved_draws))}'s global generator at every "
                "batch, and so does the script",
                fix="pass it a generator of its own, or make all draws at the start of __iter__, or define "
                "state_dict() and load_state_dict() on the stream",
            )
        return {
            "number": self.number,
            "seed": self.seed,
            "begun": self.at_start.to_plain(),
            "sampler": self.sampler,
            "first": None if self.first is None else self.first.to_plain(),
            "position": self.position,
            "digest": self.digest,
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> "Pass":
        """Return a pass to resume from the result of `to_plain`."""
        first = plain["first"]
        return Pass(
            number=plain["number"],
            seed=plain["seed"],
            at_start=GeneratorSnapshot.from_plain(plain["begun"]),
            sampler=plain["sampler"],
            first=None if first is None else GeneratorSnapshot.from_plain(first),
            position=plain["position"],
            digest=plain["digest"],
            resumed=True,
        )


def chain_digests(digest: bytes, other: bytes) -> bytes:
    """Return the digest of a sequence that continues with `other`."""
    return blake2b(digest + other, digest_size=16).digest()


def require_same_batches(current: Pass, digests: Iterable[bytes]) -> None:
    """Raise `DataError` unless the skipped batches are those that the interrupted pass yielded."""
    digest, count = b"", 0
    for count, other in enumerate(digests, start=1):  # noqa: B007  # used below
        digest = chain_digests(digest, other)
    if digest != current.digest:
        found = "other batches" if count == current.position else f"only {count}"
        raise DataError(
            expected=f"the {current.position} batches that the interrupted pass yielded, to skip them",
            found=f"{found} from its sampler or stream, restarted",
            fix="define state_dict() and load_state_dict() on it, or let it draw from a generator of its own",
        )


def list_samplers(sampler: object) -> list[Any]:
    """Return a sampler and the samplers that it wraps."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is known for known in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def get_sampler_states(samplers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the samplers' `state_dict()`, or their plain attributes such as a counter of passes."""
    return [
        {"own": sampler.state_dict()}
        if hasattr(sampler, "state_dict")
        else {
            "attributes": {
                name: value for name, value in getattr(sampler, "__dict__", {}).items() if type(value) in _PLAIN
            }
        }
        for sampler in samplers
    ]


def set_sampler_states(samplers: Iterable[Any], states: Iterable[Mapping[str, Any]]) -> None:
    """Set samplers to the states that `get_sampler_states` returned."""
    for sampler, state in zip(samplers, states, strict=False):
        if "own" in state:
            sampler.load_state_dict(state["own"])
        elif state["attributes"]:
            vars(sampler).update(state["attributes"])


def to_plain_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return generators' states by name as plain data for a checkpoint."""
    return {name: to_plain(state) for name, state in states.items()}


def from_plain_states(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return generators' states from the result of `to_plain_states`."""
    return {name: from_plain(state) for name, state in plain.items()}


def require_same_loader(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise `DataError` unless a saved state comes from a loader with the same settings."""
    if saved.get("version") != VERSION:
        raise DataError(
            expected=f"a loader's state of version {VERSION}",
            found=f"version {saved.get('version')!r}",
            fix="load a state that loader.state_dict() of this release returned",
        )
    different = [name for name, value in here.items() if saved["made_of"].get(name) != value]
    if different:
        raise DataError(
            expected="a loader with the settings of the run that saved the state: "
            + ", ".join(f"{name}={saved['made_of'].get(name)!r}" for name in different),
            found=", ".join(f"{name}={here[name]!r}" for name in different),
            fix="use the same settings, or do not load the loader's state and start a new pass",
        )
