"""Which sizes become symbols, which calls a program fits, and that all ranks choose the same program."""

import pytest
import torch
from support.processes import on_mesh
from torch import nn

from rankless.compiler.capture.capture import ArgumentShape
from rankless.compiler.tracing.symbolic_sizes import SymbolicSizes, compile_guards, evaluate_size, size_hint
from rankless.context.world import World
from rankless.jobs.arguments import FlattenedArguments
from rankless.jobs.job import make_job
from rankless.jobs.programs.program_cache import CacheEntry, CacheLookup, ProgramCache
from rankless.jobs.programs.varying_sizes import (
    SizeConstraints,
    SizeHistory,
    list_uneven_dims,
    make_symbolic_shapes,
    resize_sharding,
)
from rankless.parallel.tensor_placement import Replicate, Shard, split_lengths
from rankless.user_code import display_name


def make_history(*calls):
    history = SizeHistory()
    for call in calls:
        history.add(call)
    return history


def test_no_size_varies_before_the_third_distinct_shape():
    assert make_history(((6, 3),), ((6, 5),), ((6, 3),)).groups(((6, 3),)) == ()
    assert make_history(((6, 3),), ((6, 5),), ((6, 4),)).groups(((6, 4),)) == (((0, 1),),)


def test_sizes_share_a_symbol_as_long_as_they_are_equal():
    history = make_history(((6, 3), (6, 3)), ((6, 5), (6, 5)), ((6, 4), (6, 4)))
    assert history.groups(((6, 4), (6, 4))) == (((0, 1), (1, 1)),)
    history.add(((6, 4), (6, 7)))
    assert history.groups(((6, 4), (6, 7))) == (((0, 1),), ((1, 1),))


def test_sizes_of_0_and_1_are_never_symbols():
    history = make_history(((1, 3),), ((0, 5),), ((2, 4),))
    assert history.groups(((1, 3),)) == (((0, 1),),)
    assert history.groups(((2, 4),)) == (((0, 0),), ((0, 1),))


def test_a_program_fits_if_fixed_and_equal_sizes_and_guards_hold():
    variation = SizeConstraints(
        groups=(((0, 1), (1, 0)),), symbols=("s",), fixed={(0, 0): 6}, holds=compile_guards(["2 <= L['t0']"], 1)
    )
    assert variation.fits(((6, 5), (5,)))
    assert not variation.fits(((6, 5), (4,)))
    assert not variation.fits(((7, 5), (5,)))
    assert not variation.fits(((6, 1), (1,)))
    assert variation.sizes(((6, 5), (5,))) == {"s": 5}


@pytest.mark.parametrize("parts", [2, 3, 4, 7])
def test_symbolic_shard_lengths_fit_every_size_without_a_guard(parts):
    sizes = SymbolicSizes()
    (shape,) = make_symbolic_shapes(sizes, [ArgumentShape(shape=(9,), dtype=torch.float32)], [[(0, 0)]])
    lengths = split_lengths(shape.shape[0], parts)
    assert sizes.shape_env.guards == []
    (symbol,) = sizes.symbols
    for rows in range(2, 40):
        plain = [rows // parts + (part < rows % parts) for part in range(parts)]
        assert [evaluate_size(length, {symbol: rows}) for length in lengths] == plain
        assert list(split_lengths(rows, parts)) == plain


def test_uneven_shard_lengths_stay_fixed():
    uneven = (Shard(0, (5, 2)),)
    assert list_uneven_dims(uneven, (7, 3)) == [0]
    assert list_uneven_dims((Shard(0, (4, 3)),), (7, 3)) == []
    assert list_uneven_dims((Replicate(),), (7, 3)) == []
    assert resize_sharding(uneven, (7, 3)) == uneven
    entry = CacheEntry(history=make_history(((6, 4),), ((8, 5),), ((7, 3),)))
    call = CacheLookup(
        arguments=FlattenedArguments((), None, ()), shapes=((7, 3),), shardings=(uneven,), entry=entry, known=None
    )
    assert call.varying() == (((0, 1),),)


def test_a_size_used_as_a_number_adds_a_guard_and_a_cost_does_not():
    sizes = SymbolicSizes()
    size = sizes.create(7, "a")
    assert size_hint(size * 3) == 21
    assert sizes.has_free_symbols()
    assert sizes.shape_env.guards == []
    assert list(range(size)) == list(range(7))
    assert not sizes.has_free_symbols()
    holds = compile_guards(sizes.guard_expressions(), 1)
    assert holds([7])
    assert not holds([8])
    assert set(sizes.shape_env.specializing_lines) == {f"{display_name(__file__)}:{find_line('list(range(size))')}"}


def find_line(text):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def agree_on_guards(mesh, failing):
    warnings = []
    world = World(mesh=mesh, notify=warnings.append, send_record=lambda _: None)
    job = make_job(lambda x: x, model=nn.Linear(1, 1), optimizer=None, view="consistent", world=lambda: world)
    sizes = SymbolicSizes()
    assert sizes.create(9, "a") > mesh.rank + 3
    failure = "there: it raised" if mesh.rank == failing else ""
    return ProgramCache(job.definition, world)._agree_on_guards(sizes, failure), warnings


@pytest.mark.parametrize("workers", [2, 3])
def test_every_rank_checks_the_guards_of_all_ranks(workers):
    answers = on_mesh(workers, agree_on_guards, None)
    for conditions, warnings in answers:
        assert conditions == answers[0][0]
        holds = compile_guards(conditions, 1)
        assert holds([workers + 3])
        assert not holds([workers + 2])
        assert warnings == []


@pytest.mark.parametrize("workers", [2, 3])
def test_no_rank_keeps_a_program_for_varying_sizes_if_one_fails(workers):
    for conditions, warnings in on_mesh(workers, agree_on_guards, 1):
        assert conditions is None
        assert warnings[0].startswith("there: it raised; so job")
