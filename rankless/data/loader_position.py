"""Where a loader is: what a pass began from and how many batches it has handed out, as plain data and back.

Note [taking up a pass]: an interrupted pass is begun again from the generators' states at its beginning, and the
batches that were handed out are skipped: their indices are drawn, their samples are not read. A pass meets its
generators at two moments, when iteration begins and when the first batch is asked for, and a script may draw between
them; so both are kept. What the process's generators give to others (dropout, say) goes on from where they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rankless.data.generators import (
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
    """The states of the process's generators and of those held by a sampler or a stream."""

    process: ProcessStates
    held: Mapping[str, Any]

    @staticmethod
    def now(held: Mapping[str, Generator]) -> "GeneratorSnapshot":
        """This moment."""
        return GeneratorSnapshot(get_process_states(), get_states(held))

    def restore(self, held: Mapping[str, Generator]) -> None:
        """Set all generators to what they were."""
        set_process_states(self.process)
        set_states(held, self.held)

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"process": [to_plain(state) for state in self.process], "held": to_plain_states(self.held)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> "GeneratorSnapshot":
        """The inverse of `as_plain`."""
        torch_state, numpy_state, python_state = (from_plain(state) for state in plain["process"])
        return GeneratorSnapshot((torch_state, numpy_state, python_state), from_plain_states(plain["held"]))


@dataclass(kw_only=True)
class Pass:
    """One pass over the data."""

    number: int
    """From 0."""
    seed: int | None
    """Of the samples' random numbers; None where they are drawn from the running generators."""
    at_start: GeneratorSnapshot
    sampler: list[dict[str, Any]]
    """The samplers' own states at the beginning."""
    first: GeneratorSnapshot | None = None
    """When the first batch was asked for; None until then."""
    position: int = 0
    """Batches handed out."""
    digest: bytes = b""
    """Of the requests of all batches handed out, in order."""
    over: bool = False
    resumed: bool = field(default=False, repr=False)
    """Whether it was begun by another process, and is at `position` when it begins here."""
    interleaved_draws: frozenset[str] = frozenset()
    """The process's generators that the sampler or stream goes on drawing from after its first batch, while the
    script may draw from them too."""
    has_lists: bool = False
    """Whether its batches hold lists of one plain value per sample."""

    def hand_out(self, digest: bytes) -> None:
        """Count one batch, by the digest of its request."""
        self.position += 1
        self.digest = chain_digests(self.digest, digest)

    def to_plain(self) -> dict[str, Any]:
        """For a checkpoint. Raises DataError for a pass that could not be taken up."""
        if self.interleaved_draws:
            raise DataError(
                expected="a sampler or stream that can be taken up in the middle of a pass",
                found=f"one that draws from {' and '.join(sorted(self.interleaved_draws))}'s global generator at every "
                "batch, in turn with the script",
                fix="give it a generator of its own, or let it draw all at the start of __iter__, or give a stream "
                "state_dict() and load_state_dict()",
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
        """The inverse of `as_plain`: a pass to take up."""
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
    """The digest of a sequence that goes on with `other`."""
    return blake2b(digest + other, digest_size=16).digest()


def require_same_batches(current: Pass, digests: Iterable[bytes]) -> None:
    """Return if the batches skipped are those that the interrupted pass handed out; else raise DataError."""
    digest, count = b"", 0
    for count, other in enumerate(digests, start=1):  # noqa: B007  # counted for the text below
        digest = chain_digests(digest, other)
    if digest != current.digest:
        found = "other batches" if count == current.position else f"only {count}"
        raise DataError(
            expected=f"the {current.position} batches that the interrupted pass had handed out, to skip them",
            found=f"{found} from its sampler or stream, begun again",
            fix="give it state_dict() and load_state_dict(), or let it draw from a generator of its own",
        )


def list_samplers(sampler: object) -> list[Any]:
    """A sampler, and those that it is made of."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is known for known in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", None)
    return found


def get_sampler_states(samplers: Iterable[Any]) -> list[dict[str, Any]]:
    """What samplers say of themselves, or their plain attributes (a counter of passes, say)."""
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
    """Give samplers the states that `sampler_states` found."""
    for sampler, state in zip(samplers, states, strict=False):
        if "own" in state:
            sampler.load_state_dict(state["own"])
        elif state["attributes"]:
            vars(sampler).update(state["attributes"])


def to_plain_states(states: Mapping[str, Any]) -> dict[str, Any]:
    """Generators' states by name, for a checkpoint."""
    return {name: to_plain(state) for name, state in states.items()}


def from_plain_states(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `plain_states`."""
    return {name: from_plain(state) for name, state in plain.items()}


def require_same_loader(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise DataError unless a saved state is of a loader made alike."""
    if saved.get("version") != VERSION:
        raise DataError(
            expected=f"a loader's state of version {VERSION}",
            found=f"version {saved.get('version')!r}",
            fix="load a state that this release's loader.state_dict() gave",
        )
    different = [name for name, value in here.items() if saved["made_of"].get(name) != value]
    if different:
        raise DataError(
            expected="a loader made as in the run that saved: "
            + ", ".join(f"{name}={saved['made_of'].get(name)!r}" for name in different),
            found=", ".join(f"{name}={here[name]!r}" for name in different),
            fix="make the loader alike, or leave it out of what is loaded and begin with a new pass",
        )
