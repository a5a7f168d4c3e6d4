"""Where a job's program gathers split values on every worker: what a run warns of, and what `rankless plan` lists."""

from collections.abc import Iterable, Iterator

import msgspec

from rankless.records.job_programs import JobProgram, ProgramCommunication, ReplicatedOperator
from rankless.records.module_groups import format_modules
from rankless.records.quantities import format_decimal_bytes

NOTICE_BYTES = 64 * 1024
"""Gathered bytes per step from which on a place is costly. Fewer cost little more than the message itself."""


class GatherPlace(msgspec.Struct, frozen=True, kw_only=True):
    """An operator at a line of the script that every worker computes on whole values which were split before."""

    line: str
    operator: str
    backward: bool
    """Whether it belongs to the computation of gradients."""
    modules: str
    """The modules that need the values, as "model.layers.[0-2] (LayerNorm)". Empty outside of modules."""
    values: int
    """How many values are gathered per call."""
    bytes: int
    """Their size per optimizer step."""
    has_rule: bool
    """Whether the operator has a sharding rule, which does not fit the values' placements."""
    is_costly: bool
    """Whether a run warns of it: it has no rule, or gathers at least 64 KiB per step."""


def list_gather_places(program: JobProgram) -> tuple[GatherPlace, ...]:
    """Return the places of a program where operators compute in full with gathered inputs, in program order.

    Operators without a rule are listed even if another operator has gathered their inputs already.
    """
    moves: dict[tuple[str, str, bool], list[ProgramCommunication]] = {}
    for move in program.moves:
        if move.in_full:
            moves.setdefault((move.line, move.reason.removeprefix("input of "), move.backward), []).append(move)
    without_rule: dict[tuple[str, str], list[ReplicatedOperator]] = {}
    for item in program.without_rule:
        without_rule.setdefault((item.line, item.name), []).append(item)
    places = [
        _make_place(key, found, calls=program.calls_per_step, has_rule=key[:2] not in without_rule)
        for key, found in moves.items()
    ]
    reached = {key[:2] for key in moves}
    for (line, name), items in without_rule.items():
        if (line, name) not in reached:
            places.append(_make_place((line, name, False), items, calls=0, has_rule=False))
    return tuple(places)


def describe_gather_place(place: GatherPlace) -> str:
    """Return what a place gathers and why, without its line."""
    direction = " in backward" if place.backward else ""
    modules = f" of {place.modules}" if place.modules else ""
    size = f"gathers {format_decimal_bytes(place.bytes)} per step" if place.values else "takes gathered values"
    reason = "its rule does not fit how they are split" if place.has_rule else "it has no sharding rule"
    return f"{place.operator}{modules}{direction} {size}: {reason}"


def _make_place(
    key: tuple[str, str, bool],
    found: Iterable[ProgramCommunication | ReplicatedOperator],
    *,
    calls: int,
    has_rule: bool,
) -> GatherPlace:
    line, operator, backward = key
    members = list(found)
    size = calls * sum(item.bytes for item in members if isinstance(item, ProgramCommunication))
    return GatherPlace(
        line=line,
        operator=operator,
        backward=backward,
        modules=format_modules(_iterate_modules(members)),
        values=sum(isinstance(item, ProgramCommunication) for item in members),
        bytes=size,
        has_rule=has_rule,
        is_costly=not has_rule or size >= NOTICE_BYTES,
    )


def _iterate_modules(items: Iterable[ProgramCommunication | ReplicatedOperator]) -> Iterator[tuple[str, str]]:
    for item in items:
        if item.module:
            yield item.module, item.module_type
