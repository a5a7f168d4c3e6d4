"""An interrupted pass resumes with its next batch, and all later draws equal those of an uninterrupted script."""

from typing import Any

import pytest
import torch
from data.loader_cases import (
    ALL_CASES,
    CASES,
    READER_CASES,
    STREAM_CASES,
    STREAM_READER_CASES,
    DrawsLate,
    Items,
    Noisy,
    Stream,
    StreamDrawsLate,
    StreamWithState,
    interrupt,
    loader_on,
    read_our_passes,
    read_passes,
    read_plain_passes,
    resume,
    seed_all_generators,
)
from support.processes import on_mesh

from rankless.checkpoint.state_tree import TreeWriter, decode
from rankless.collectives.value_encoding import decode_value, encode_value
from rankless.data.random_generators import get_process_states, set_process_states
from rankless.errors import DataError
from rankless.parallel.mesh import Mesh

READERS = READER_CASES | STREAM_READER_CASES


def assert_continued(case: str, batches: int, passes: list[Any], position: int) -> None:
    """Assert that the rest equals that of an uninterrupted plain script."""
    _, (second, drawn_after), third = read_plain_passes(case)
    assert position == batches, case
    if batches == 0:
        assert passes == [(second, drawn_after), third], case
    else:
        assert passes == [(second[batches:], drawn_after), third], case


@pytest.mark.ci_sample(23)
@pytest.mark.parametrize("batches", [0, 1, 2])
@pytest.mark.parametrize("case", CASES | STREAM_CASES)
def test_on_one_worker_a_resumed_pass_equals_an_uninterrupted_one(case, batches):
    saved = interrupt(Mesh.solo(), case, "split", batches)
    assert_continued(case, batches, *resume(Mesh.solo(), case, "split", saved))


@pytest.mark.ci_sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("case", READERS)
def test_prefetched_but_unused_batches_are_not_counted(case):
    saved = interrupt(Mesh.solo(), case, "split", 2)
    assert_continued(case, 2, *resume(Mesh.solo(), case, "split", saved))


@pytest.mark.slow
def test_resumed_persistent_readers_draw_no_second_base_seed():
    saved = interrupt(Mesh.solo(), "persistent readers", "split", 0)
    assert_continued("persistent readers", 0, *resume(Mesh.solo(), "persistent readers", "split", saved))


def interrupt_all(mesh: Mesh, cases: list[str], reading: str, batches: int) -> list[bytes]:
    return [interrupt(mesh, case, reading, batches) for case in cases]


def resume_all(mesh: Mesh, cases: list[str], reading: str, saved: list[bytes]) -> list[Any]:
    return [resume(mesh, case, reading, state) for case, state in zip(cases, saved, strict=True)]


@pytest.mark.ci_sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("size", "later_size"), [(2, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("reading", ["split", "first"])
def test_a_state_saved_on_one_mesh_resumes_on_another(size, later_size, reading):
    cases = list(CASES | STREAM_CASES)
    saved = on_mesh(size, interrupt_all, cases, reading, 2)[0]
    if later_size == 1:
        ranks = [resume_all(Mesh.solo(), cases, reading, saved)]
    else:
        ranks = on_mesh(later_size, resume_all, cases, reading, saved)
    for results in ranks:
        for case, (passes, position) in zip(cases, results, strict=True):
            assert_continued(case, 2, passes, position)


@pytest.mark.parametrize("reading", ["split", "replicated"])
def test_random_numbers_of_samples_resume_too(reading):
    def make() -> Any:
        return loader_on(Mesh.solo(), Noisy(), batch_size=3, shuffle=True, reading=reading)

    seed_all_generators()
    (expected, after), later = read_passes(make(), 2)
    seed_all_generators()
    loader = make()
    for number, _ in enumerate(loader, start=1):
        torch.rand(1)
        if number == 2:
            saved = encode_value((loader.state_dict(), get_process_states()))
            break
    torch.manual_seed(4)
    again = make()
    state, generators = decode_value(saved)
    again.load_state_dict(state)
    set_process_states(generators)
    assert read_passes(again, 2) == [(expected[2:], after), later]


def test_a_pass_that_the_script_left_is_over():
    seed_all_generators()
    loader = loader_on(Mesh.solo(), Items(), batch_size=5, shuffle=True)
    for _ in loader:
        break
    saved, generators = loader.state_dict(), get_process_states()
    expected = read_passes(loader, 2)
    again = loader_on(Mesh.solo(), Items(), batch_size=5, shuffle=True)
    again.load_state_dict(saved)
    set_process_states(generators)
    assert saved["pass"] is None
    assert again.position == 0
    assert read_passes(again, 2) == expected


def test_a_loaded_state_can_be_saved_again_before_the_pass_resumes():
    saved = interrupt(Mesh.solo(), "shuffled", "split", 2)
    state, generators = decode_value(saved)
    dataset, options = ALL_CASES["shuffled"]()
    loader = loader_on(Mesh.solo(), dataset, **options)
    loader.load_state_dict(state)
    again = encode_value((loader.state_dict(), generators))
    assert_continued("shuffled", 2, *resume(Mesh.solo(), "shuffled", "split", again))


@pytest.mark.parametrize("case", ["own generator", "stream", "sampler with state"])
def test_a_checkpoint_can_hold_a_loader_state(case):
    state, generators = decode_value(interrupt(Mesh.solo(), case, "split", 2))
    writer = TreeWriter()
    node = writer.encode(state, ("loader",))
    read = encode_value((decode(node, writer.tensors.__getitem__), generators))
    assert_continued(case, 2, *resume(Mesh.solo(), case, "split", read))


class Counted(Items):
    read = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read += 1
        return super().__getitem__(index)


def test_skipped_samples_are_not_read():
    def make(dataset: Items) -> Any:
        return loader_on(Mesh.solo(), dataset, batch_size=5, seed=1, shuffle=True)

    loader = make(Counted())
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    dataset = Counted()
    again = make(dataset)
    again.load_state_dict(loader.state_dict())
    assert len(list(again)) == 2
    assert dataset.read == 8


def test_a_stream_with_state_dict_reads_nothing_twice():
    state, _ = decode_value(interrupt(Mesh.solo(), "stream with state", "split", 2))
    dataset = StreamWithState()
    loader = loader_on(Mesh.solo(), dataset, batch_size=4)
    loader.load_state_dict(state)
    assert [batch.flatten().tolist() for batch in loader] == [[9, 10, 11, 12], [13, 14, 15, 16], [17, 18, 19]]
    assert dataset.read == 11


@pytest.mark.parametrize(
    ("dataset", "options", "name"),
    [(Items(), {"sampler": DrawsLate(list(range(9)))}, "Python"), (StreamDrawsLate(), {}, "torch")],
)
def test_a_sampler_that_shares_draws_with_the_script_cannot_be_saved(dataset, options, name):
    loader = loader_on(Mesh.solo(), dataset, batch_size=2, **options)
    for number, _ in enumerate(loader):
        torch.rand(1)
        if number == 2:
            with pytest.raises(DataError, match=f"draws from {name}'s global generator at every batch"):
                loader.state_dict()
    assert loader.state_dict()["pass"] is None


class Forgetful(Stream):
    """A stream that yields other samples when it is read again."""

    passes = 0

    def __iter__(self) -> Any:
        Forgetful.passes += 1
        return (torch.tensor(number * Forgetful.passes) for number in range(9))


def test_a_stream_that_yields_other_samples_on_resume_raises():
    loader = loader_on(Mesh.solo(), Forgetful(), batch_size=3)
    next(batches := iter(loader))
    again = loader_on(Mesh.solo(), Forgetful(), batch_size=3)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(DataError, match="found:    other batches from its sampler or stream"):
        next(iter(again))
    batches.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4}, "found:    batch_size=4"),
        ({"batch_size": 5, "shuffle": True, "seed": 2}, r"samplers=\['BatchSampler', 'RandomSampler'\], seed=2"),
    ],
)
def test_a_state_of_another_loader_raises(options, message):
    state = loader_on(Mesh.solo(), Items(), batch_size=5).state_dict()
    with pytest.raises(DataError, match=message):
        loader_on(Mesh.solo(), Items(), **options).load_state_dict(state)
    with pytest.raises(DataError, match="samples=7"):
        loader_on(Mesh.solo(), Items(7), batch_size=5).load_state_dict(state)


def test_a_resumed_complete_pass_ends_at_once_and_a_new_one_follows():
    expected = read_our_passes(Mesh.solo(), "shuffled", "split")
    saved = interrupt(Mesh.solo(), "shuffled", "split", 3)
    (rest, _), third = resume(Mesh.solo(), "shuffled", "split", saved)[0]
    assert rest == []
    assert third == expected[2]
