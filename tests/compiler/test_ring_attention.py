"""Attention with fewer heads than workers along an axis: keys and values travel around a ring, and are not gathered."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from simulated_pipelines import capture_job, run_on_simulated_pipeline
from simulated_ranks import (
    assert_runs_as_plain,
    assert_same_as_plain,
    divide_evenly,
    run_on_simulated_ranks,
    run_program_on_axes,
)
from torch import Tensor, nn

from rankless.compiler.sequence_parallel import attention
from rankless.compiler.sequence_parallel.attention_kernels import attend_to_block, differentiate_block, list_pieces
from rankless.compiler.tensor_parallel import TensorDivider
from rankless.errors import CaptureError
from rankless.parallel.tensor_placement import Replicate, Shard, split_lengths

WIDTH = 4
aten = torch.ops.aten


class Attention(nn.Module):
    """Attention of one sequence to another, or to itself."""

    def __init__(self, heads: int, keys: int, **options) -> None:
        super().__init__()
        self.heads, self.keys, self.options = heads, keys, options
        self.layers = nn.ModuleList([nn.Linear(8, count * WIDTH) for count in (heads, keys, keys)])
        self.out = nn.Linear(heads * WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        pairs = zip(self.layers, (x, y, y), (self.heads, self.keys, self.keys), strict=True)
        query, key, value = (layer(item).unflatten(2, (count, WIDTH)).transpose(1, 2) for layer, item, count in pairs)
        mixed = F.scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=self.heads != self.keys, **self.options
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def make_job(heads, keys, length, other, mask=None, **options):
    """Return a job of attention on sequences of so many positions, which returns all results too."""
    torch.manual_seed(1)
    model = Attention(heads, keys, **options).double()

    def function(x, y, *masks):
        found = model(x, y, *masks)
        return found.square().mean(), found

    arguments = [torch.randn(2, size, 8, dtype=torch.float64) for size in (length, other)]
    return function, {"model": model}, [*arguments, *([] if mask is None else [mask])]


def run_in_pieces(job, *lengths, change=lambda program: program):
    """Run a job whose arguments are divided along dim 1 in these pieces; those without pieces are whole."""
    function, modules, arguments = job
    program = change(capture_job(function, modules, arguments, True))
    placements = [*(Shard(1, item) for item in lengths), *[Replicate()] * (len(arguments) - len(lengths))]
    shardings = [lambda _ranks, item=item: (item,) for item in placements]
    return assert_runs_as_plain(
        lambda: run_program_on_axes(program, arguments, modules, (len(lengths[0]),), shardings, {}),
        function,
        modules,
        arguments,
    )


@pytest.mark.ci_sample(3)
@pytest.mark.parametrize("queries", [(5, 0, 0), (0, 5, 0), (3, 2, 0)], ids=str)
@pytest.mark.parametrize("keys", [(1, 0, 0), (0, 0, 1)], ids=str)
def test_a_worker_without_queries_beside_one_key(queries, keys):
    run_in_pieces(make_job(1, 1, sum(queries), sum(keys), scale=0.3), queries, keys)


def count_moves(outcome):
    """Return how often each kind of collective moves values for operators; masks and parameters do not count."""
    found = Counter((item.kind, item.backward) for item in outcome.local.collectives if item.purpose == "operator")
    assert not [item for item in outcome.local.collectives if item.purpose == "input"]
    return found


def expect_hops(ranks):
    """Return the moves of one ring: keys and values twice, and the gradients of both."""
    return {("ring_shift", False): 2 * (ranks - 1), ("ring_shift", True): 4 * (ranks - 1)}


CASES = [
    # heads, heads of keys, positions, positions of keys, causal
    (1, 1, 6, 6, False),
    (1, 1, 6, 6, True),
    (1, 1, 7, 7, True),
    (1, 1, 5, 9, False),
    (1, 1, 9, 5, True),
    (1, 1, 5, 11, True),
    (2, 1, 7, 7, True),
    (2, 1, 6, 8, False),
    (3, 1, 5, 5, True),
    (4, 1, 7, 7, False),
]
MORE_HEADS = [
    # fewer than workers
    (2, 2, 7, 7, True, 3),
    (2, 2, 7, 7, False, 4),
    (2, 2, 9, 6, True, 4),
    (3, 3, 8, 8, True, 4),
    (3, 3, 5, 7, False, 4),
    (4, 2, 7, 7, True, 3),
    (6, 3, 9, 9, False, 4),
    (8, 2, 9, 7, True, 4),
]


@pytest.mark.ci_sample(5)
@pytest.mark.parametrize(
    ("heads", "keys", "length", "other", "is_causal", "ranks"),
    [*((*case, ranks) for case, ranks in product(CASES, (2, 3, 4))), *MORE_HEADS],
)
def test_a_ring_is_exact_and_nobody_gathers(heads, keys, length, other, is_causal, ranks):
    lengths = [split_lengths(size, ranks) for size in (length, other)]
    outcome = run_in_pieces(make_job(heads, keys, length, other, is_causal=is_causal), *lengths)
    assert count_moves(outcome) == expect_hops(ranks)


UNEVEN = [
    ((1, 6), (1, 6)),
    ((6, 1), (6, 1)),
    ((0, 7), (0, 7)),
    ((7, 0), (7, 0)),
    ((3, 0, 4), (3, 0, 4)),
    ((0, 0, 7), (0, 0, 7)),
    ((2, 3, 2), (4, 1, 2)),
    ((1, 1, 5), (5, 1, 1)),
    ((7, 0, 0), (0, 0, 7)),
    ((0, 0, 7), (7, 0, 0)),
    ((2, 5), (9, 2)),
    ((6, 1), (0, 4)),
    ((1, 2, 0, 4), (2, 0, 0, 6)),
]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_pieces_are_exact(is_causal):
    jobs = {}
    for queries, keys in UNEVEN:
        sizes = sum(queries), sum(keys)
        job = jobs.setdefault(sizes, make_job(1, 1, *sizes, is_causal=is_causal))
        assert count_moves(run_in_pieces(job, queries, keys)) == expect_hops(len(queries))


def test_each_worker_sends_its_keys_and_values_as_often_as_a_gather_does():
    outcome = run_in_pieces(make_job(1, 1, 8, 12), (2, 2, 2, 2), (3, 3, 3, 3))
    block = 2 * 1 * 3 * WIDTH * 8
    shifts = [item for item in outcome.local.collectives if item.kind == "ring_shift"]
    assert {(item.bytes, item.sent_bytes, item.axis, item.overlapped) for item in shifts} == {
        (4 * block, block, "data", True)
    }
    reasons = Counter(item.reason for item in shifts)
    assert reasons == {
        "key around the ring": 6,
        "value around the ring": 6,
        "gradients of key around the ring": 3,
        "gradients of value around the ring": 3,
    }


def test_a_worker_computes_with_one_block_at_a_time_and_skips_what_a_causal_mask_hides(monkeypatch):
    seen = []

    def note(function, place):
        def run(settings, *given):
            seen.append((place, given[2][0].shape[2] if place == "forward" else given[1][0].shape[2]))
            pieces, run_piece = [], type(settings).run
            monkeypatch.setattr(
                type(settings), "run", lambda self, *args: pieces.append(args) or run_piece(self, *args)
            )
            result = function(settings, *given)
            monkeypatch.setattr(type(settings), "run", run_piece)
            seen[-1] += (len(pieces),)
            return result

        return run

    monkeypatch.setattr(attention, "attend_to_block", note(attend_to_block, "forward"))
    monkeypatch.setattr(attention, "differentiate_block", note(differentiate_block, "backward"))
    run_in_pieces(make_job(1, 1, 12, 12, is_causal=True), (3, 3, 3, 3), (3, 3, 3, 3))
    # Of 16 pairs of a block of queries and one of keys 4 are on the diagonal, and 6 below it.
    assert Counter(seen) == {("forward", 3, 1): 10, ("forward", 3, 0): 6, ("backward", 3, 1): 10, ("backward", 3, 0): 6}


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_pieces_of_blocks_are_what_a_mask_shows(is_causal):
    for queries, keys in product(product(range(7), range(5)), repeat=2):
        shown = torch.zeros(queries[1], keys[1], dtype=torch.int)
        for piece in list_pieces(queries, keys, is_causal):
            rows, columns = (slice(first, first + count) for first, count in (piece.queries, piece.keys))
            part = torch.ones(piece.queries[1], piece.keys[1], dtype=torch.int)
            assert part.numel()
            if piece.is_causal:
                assert part.shape[0] == part.shape[1]
            shown[rows, columns] += part.tril() if piece.is_causal else part
        places = torch.arange(queries[1])[:, None] + queries[0], torch.arange(keys[1]) + keys[0]
        wanted = places[0] >= places[1] if is_causal else torch.ones_like(shown, dtype=torch.bool)
        assert torch.equal(shown, wanted.int()), (queries, keys)


def hide(shape, part, seed=3):
    """Return a mask that hides a part of the keys, and all keys from one query."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = mask.masked_fill(torch.rand(shape, generator=generator) < part, -torch.inf)
    if mask.shape[-2] > 1:
        mask[..., 2, :] = -torch.inf
    return mask


MASKS = {
    "for all": hide((7, 9), 0.3),
    "for each sample": hide((2, 1, 7, 9), 0.8),
    "for each head": hide((2, 2, 7, 9), 0.8),
    "of keys": hide((2, 1, 1, 9), 0.8),
    "of booleans": hide((2, 1, 7, 9), 0.7) > 0,
    "of early keys": torch.full((7, 9), -torch.inf, dtype=torch.float64).triu(1),
    "of late keys": torch.full((7, 9), -torch.inf, dtype=torch.float64).tril(1),
    "of large numbers": hide((7, 9), 0.0) * 1e4,
}


@pytest.mark.ci_sample(4)
@pytest.mark.parametrize("name", MASKS)
def test_masks_hide_keys_of_any_block(name):
    outcome = run_in_pieces(make_job(2, 2, 7, 9, MASKS[name]), (3, 0, 4), (2, 5, 2))
    assert count_moves(outcome) == expect_hops(3)


def test_a_divided_mask_stays_where_it_is():
    function, modules, arguments = make_job(1, 1, 6, 6, hide((6, 6), 0.5))
    program = capture_job(function, modules, arguments, True)
    shardings = [divide_evenly(item.shape, (3,), [dim]) for item, dim in zip(arguments, (1, 1, 0), strict=True)]
    outcome = assert_runs_as_plain(
        lambda: run_program_on_axes(program, arguments, modules, (3,), shardings, {}), function, modules, arguments
    )
    assert count_moves(outcome) == expect_hops(3)


def test_two_layers_with_their_own_rings_are_exact_beside_a_divided_batch():
    torch.manual_seed(2)
    model = nn.ModuleList([Attention(2, 2, is_causal=True), Attention(2, 1)]).double()

    def function(x, y):
        first = x + model[0](x, x)
        return (first + model[1](first, y)).square().mean()

    arguments = [torch.randn(4, size, 8, dtype=torch.float64) for size in (7, 6)]
    program = capture_job(function, {"model": model}, arguments, True)
    shardings = [divide_evenly(item.shape, (2, 3), [0, 1]) for item in arguments]
    outcome = assert_runs_as_plain(
        lambda: run_program_on_axes(program, arguments, {"model": model}, (2, 3), shardings, {}),
        function,
        {"model": model},
        arguments,
    )
    assert count_moves(outcome) == {kind: 2 * count for kind, count in expect_hops(3).items()}
    first, *_ = (item for item in outcome.local.collectives if item.kind == "ring_shift")
    assert (first.bytes, first.axis) == (2 * 2 * 7 * WIDTH * 8, "tensor")  # of half of the batch; the second axis


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize(("heads", "keys"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("mesh", [(2, 2), (2, 2, 2)])
def test_heads_are_divided_by_an_inner_axis_and_positions_in_a_ring(heads, keys, mesh):
    function, modules, arguments = make_job(heads, keys, 7, 7, is_causal=True)
    program = capture_job(function, modules, arguments, True)
    states = dict(TensorDivider(program, mesh[-1], {}).divide(fills=True))
    dims = [*range(len(mesh) - 1), None] if len(mesh) > 2 else [1, None]
    shardings = [divide_evenly(item.shape, mesh, dims) for item in arguments]
    outcome = assert_runs_as_plain(
        lambda: run_program_on_axes(program, arguments, modules, mesh, shardings, states),
        function,
        modules,
        arguments,
    )
    assert Counter((item.kind, item.backward) for item in outcome.local.collectives if item.kind == "ring_shift") == (
        expect_hops(2)
    )
    moved = [item for item in outcome.local.collectives if item.kind in ("all_to_all", "all_gather")]
    assert {item.purpose for item in moved} <= {"output"}
    assert states["model.layers.0.weight"] == Shard(0, (heads * 2, heads * 2))


def test_enough_heads_are_exchanged_for_positions():
    outcome = run_in_pieces(make_job(3, 3, 7, 7, is_causal=True), (3, 2, 2), (3, 2, 2))
    assert {item.kind for item in outcome.local.collectives if item.purpose != "output"} == {"all_to_all"}


def test_a_backward_pass_that_computes_again_does_not_pass_keys_on_again():
    job = make_job(1, 1, 7, 7, is_causal=True)
    outcome = run_in_pieces(job, (3, 2, 2), (3, 2, 2), change=lambda program: replace(program, recompute=1.0))
    assert outcome.local.recomputed > 0
    repeated = [node for node in outcome.local.graph.nodes if "repeats" in node.meta]
    assert not any(node.target in (attend_to_block, differentiate_block) for node in repeated)
    assert count_moves(outcome) == expect_hops(3)


def test_autocast_computes_blocks_in_half_precision():
    torch.manual_seed(0)
    model = Attention(1, 1, is_causal=True)

    def function(x):
        with torch.autocast("cpu", torch.bfloat16):
            found = model(x, x)
        return found.float().square().mean(), found

    arguments = [torch.randn(2, 40, 8)]
    program = capture_job(function, {"model": model}, arguments, True)
    shardings = [divide_evenly(arguments[0].shape, (4,), [1])]
    outcome = assert_runs_as_plain(
        lambda: run_program_on_axes(program, arguments, {"model": model}, (4,), shardings, {}),
        function,
        {"model": model},
        arguments,
        bound=0.03,
    )
    assert outcome.results[2].dtype == torch.bfloat16
    shifts = [item for item in outcome.local.collectives if item.kind == "ring_shift"]
    assert Counter((item.kind, item.backward) for item in shifts) == expect_hops(4)
    assert {item.bytes for item in shifts} == {2 * 40 * WIDTH * 2}


@pytest.mark.parametrize(("before", "after"), [((9, 8), (6, 6)), ((6, 6), (12, 7)), ((12, 7), (4, 5))])
@pytest.mark.ci_sample(1)
def test_one_program_serves_other_numbers_of_positions(before, after):
    torch.manual_seed(0)
    model = Attention(1, 1, is_causal=True).double()

    def function(x, y):  # positions are the first dim
        found = model(x.transpose(0, 1), y.transpose(0, 1))
        return found.square().mean()

    make = [[torch.randn(size, 2, 8, dtype=torch.float64) for size in sizes] for sizes in (before, after)]
    outcome = assert_same_as_plain(function, {"model": model}, make[1], 4, captured_at=make[0], splits_few_rows=True)
    assert not [item for item in outcome.local.collectives if item.gathered]
    assert count_moves(outcome) == expect_hops(4)


def test_keys_without_a_gradient_are_right():
    torch.manual_seed(0)
    model = nn.Linear(8, 8).double()

    def function(x, y):
        query, other = (item.unflatten(2, (1, 8)).transpose(1, 2) for item in (model(x), y))
        return F.scaled_dot_product_attention(query, other, other).square().mean()

    arguments = [torch.randn(2, size, 8, dtype=torch.float64) for size in (6, 9)]
    outcome = run_in_pieces((function, {"model": model}, arguments), (3, 3), (5, 4))
    assert count_moves(outcome) == {("ring_shift", False): 2, ("ring_shift", True): 2}  # no gradients of keys


def test_a_job_that_only_predicts_passes_keys_and_values_on():
    function, modules, arguments = make_job(1, 1, 6, 6, is_causal=True)
    outcome = run_on_simulated_ranks(
        lambda x: function(x.transpose(0, 1), x.transpose(0, 1))[1].transpose(0, 1),
        modules,
        [arguments[0].transpose(0, 1).contiguous()],
        3,
        trains=False,
    )
    assert count_moves(outcome) == {("ring_shift", False): 4}
    wanted = function(arguments[0], arguments[0])[1].transpose(0, 1)
    torch.testing.assert_close(outcome.results[0], wanted, rtol=1e-12, atol=1e-12)


def attend_to_other_rows(x):
    """Return attention of each row of a matrix to all rows."""
    return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0]


def test_a_pipeline_passes_rows_on_between_microbatches_before_the_model_only():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).double()
    arguments = [torch.randn(7, 8, dtype=torch.float64)]

    def before(x):
        return model(attend_to_other_rows(x)).square().mean()

    def within(x):
        return model[2:](attend_to_other_rows(model[:2](x))).square().mean()

    program = capture_job(before, {"model": model}, arguments, True)
    found = run_on_simulated_pipeline(program, {"model": model}, arguments, workers=2, microbatches=3)
    wanted = before(*arguments)
    torch.testing.assert_close(found.results[0], wanted.detach(), rtol=1e-12, atol=0)
    for (name, _), gradient in zip(
        model.named_parameters(), torch.autograd.grad(wanted, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(found.gradients[f"model.{name}"], gradient, rtol=1e-11, atol=1e-13)
    program = capture_job(within, {"model": model}, arguments, True)
    with pytest.raises(CaptureError, match="needs the whole batch"):
        run_on_simulated_pipeline(program, {"model": model}, arguments, workers=2, microbatches=3)
