"""The picture of a plan as data: nothing overlaps or leaves the picture, lengths are amounts, and all facts occur."""

import html
import itertools

import msgspec
import pytest
from support.plan_records import (
    LINE,
    collect,
    data_parallel,
    divided,
    gpt,
    make_axes,
    make_move,
    make_program,
    make_records,
    many_modules,
    pipelined,
)

from rankless.plan_picture.drawing_parts_and_text_fit import Bar, Drawing, Label, clean_text
from rankless.plan_picture.picture_data import PicturedPlan
from rankless.plan_picture.picture_file import format_page
from rankless.plan_picture.picture_layout import draw_plan
from rankless.records.job_programs import DefinedJob, ProgramInputRecord
from rankless.records.number_formatting import format_decimal_bytes
from rankless.records.parallel_plan import JobPlan, StatePlan

UNUSED = "model.never_used.weight"


def with_unused_parameter() -> PicturedPlan:
    sizes = gpt(2)
    states = {name: StatePlan(shape=(size,), dtype="uint8") for name, size in sizes.items()}
    states[UNUSED] = StatePlan(shape=(10, 3), dtype="bfloat16")
    records = make_records(make_program(sizes), JobPlan(states=states), sum(sizes.values()) + 60)
    return collect(records, make_axes(data=2))


def with_many_axes() -> PicturedPlan:
    sizes = gpt(3)
    moves = [make_move("all_to_all", "x", 70, axis=axis) for axis in ("tensor", "expert", "data, tensor", "unknown")]
    program = make_program(sizes, moves, workers=24, trains=False)
    return collect(make_records(program, None, 9), make_axes(pipeline=2, expert=3, tensor=2, data=2))


def without_parameters() -> PicturedPlan:
    program = msgspec.structs.replace(make_program({}), moves=(), inputs=())
    return collect([program, DefinedJob(job="train", line=LINE, called=True)], make_axes(data=2))


PLANS = {
    "data": data_parallel,
    "one worker": lambda: data_parallel(1),
    "64 workers": lambda: data_parallel(64),
    "zero parameters": divided,
    "zero optimizer": lambda: divided(kinds=("optimizer_state",)),
    "zero gradients, 64 workers": lambda: divided(64, kinds=("optimizer_state", "gradient")),
    "zero, uneven": lambda: divided(7),
    "pipeline": lambda: pipelined({"pipeline": 4}),
    "pipeline and data": lambda: pipelined({"pipeline": 2, "data": 2}),
    "interleaved": lambda: pipelined({"pipeline": 2}, schedule="interleaved"),
    "zero-bubble": lambda: pipelined({"pipeline": 3}, schedule="zero-bubble"),
    "gpipe with many microbatches": lambda: pipelined({"pipeline": 4}, schedule="gpipe", microbatches=32),
    "64 stages": lambda: pipelined({"pipeline": 64, "data": 2}, sizes=gpt(100), microbatches=3),
    "hundred layers": lambda: divided(2, gpt(100)),
    "names": lambda: data_parallel(2, many_modules()),
    "names in pieces": lambda: divided(2, many_modules()),
    "0 bytes": lambda: divided(2, {"model.a.weight": 0, "model.b.weight": 0}),
    "1 byte and 100 TB": lambda: divided(2, {"model.a.weight": 1, "model.b.weight": 10**14}),
    "200 modules": lambda: data_parallel(2, {f"model.part{number}.weight": number for number in range(200)}),
    "unused parameter": with_unused_parameter,
    "many axes": with_many_axes,
    "no parameters": without_parameters,
    "no jobs": lambda: collect([DefinedJob(job="train", line=LINE, called=False)], make_axes(data=2)),
}


@pytest.fixture(params=PLANS, scope="module")
def plan(request: pytest.FixtureRequest) -> PicturedPlan:
    return PLANS[request.param]()


def find_overlaps(labels: list[Label]) -> list[tuple[str, str]]:
    """Return the texts that overlap, looking only at those whose heights do."""
    found, open_labels = [], []
    for label in sorted(labels, key=lambda item: item.box[1]):
        left, top, right, _ = label.box
        open_labels = [other for other in open_labels if other.box[3] > top]
        found += [(label.text, other.text) for other in open_labels if other.box[0] < right and left < other.box[2]]
        open_labels.append(label)
    return found


def all_text(drawing: Drawing) -> str:
    labels = [text for label in drawing.labels for text in (label.text, label.title)]
    return "\n".join([*labels, *(bar.title for bar in drawing.bars)])


@pytest.mark.ci_sample(7)
def test_no_texts_overlap_and_all_is_inside(plan: PicturedPlan):
    drawing = draw_plan(plan)
    assert find_overlaps(drawing.labels) == []
    for label in drawing.labels:
        left, top, right, bottom = label.box
        assert min(left, top) >= 0, label
        assert right <= drawing.width, label
        assert bottom <= drawing.height, label
    for bar in drawing.bars:
        assert min(bar.x, bar.y, bar.width, bar.height) >= 0, bar
        assert bar.x + bar.width <= drawing.width + 1e-6, bar
        assert bar.y + bar.height <= drawing.height, bar


def test_bars_are_in_proportion_to_their_bytes(plan: PicturedPlan):
    kinds: dict[tuple[float, str], list[Bar]] = {}
    for bar in draw_plan(plan).bars:
        if bar.amount is not None:
            kind = "sent" if "sent" in bar.style else "held" if bar.height == 5 else "memory"
            kinds.setdefault(kind, []).append(bar)
    for bars in kinds.values():
        longest = max(bars, key=lambda bar: bar.amount)
        for bar in bars:
            assert bar.width * longest.amount == pytest.approx(longest.width * bar.amount), bar


@pytest.mark.ci_sample(7)
def test_every_fact_occurs_in_the_picture_and_in_the_page(plan: PicturedPlan):
    drawing = draw_plan(plan)
    shown, page = all_text(drawing), format_page(plan)
    for job in plan.jobs:
        expected = [f"{axis.name} {axis.size}" for axis in job.grid.axes]
        expected += [f"worker {worker}: " for worker in range(job.grid.count)]
        for module in job.modules:
            expected += [clean_text(module.name)]
            expected += [move.kind for move in module.moves] + [move.axis for move in module.moves]
            expected += [format_decimal_bytes(move.sent_bytes) for move in module.moves]
            expected += [holding.text for holding in module.holdings]
        expected += [job.title, *(item.name for item in job.unused)]
        assert [text for text in expected if text not in shown] == []
        names = [clean_text(item.name) for module in job.modules for item in module.tensors]
        assert [name for name in names if html.escape(name, quote=False) not in page] == []
    units = [unit for job in plan.jobs if job.pipeline for units in job.pipeline.timeline for unit in units]
    assert len([bar for bar in drawing.bars if bar.style.startswith("unit") and bar.title]) == len(units)


def test_a_shortened_name_keeps_its_ends_and_has_the_whole_as_title():
    labels = draw_plan(data_parallel(2, many_modules())).labels
    (label,) = [label for label in labels if label.text.startswith("model.WWW")]
    assert "…" in label.text
    assert label.text.endswith("WWW")
    assert "model." + "W" * 200 in label.title


def test_workers_that_hold_different_pieces_have_different_memory():
    (job,) = pipelined({"pipeline": 2, "data": 2}).jobs
    first, second = job.memory
    assert (first.workers, second.workers) == ((0, 1), (2, 3))
    assert (first.is_measured, second.is_measured) == (True, False)
    assert "activations" in first.sizes.keys() - second.sizes.keys()
    total = sum(item.bytes for module in job.modules for item in module.tensors)
    assert first.sizes["parameters"] + second.sizes["parameters"] == total
    assert second.sizes["optimizer state"] == 2 * second.sizes["parameters"]


def test_who_holds_a_module_is_described_by_axis_and_stage():
    def texts(plan: PicturedPlan) -> list[str]:
        return [holding.text for module in plan.jobs[0].modules for holding in module.holdings]

    assert set(texts(data_parallel())) == {"whole on every worker"}
    assert set(texts(data_parallel(1))) == {"whole on the worker"}
    uneven = texts(divided(2, {"model.a.weight": 5, "model.b.weight": 1}))
    assert uneven == ["dim 0 split 3+2 along data", "whole on every worker"]
    optimizer = texts(divided(4, {"model.a.weight": 8}, ("optimizer_state",)))
    assert optimizer == ["whole on every worker", "dim 0 split 4 x 2 along data"]
    assert "stage 0: 72.0 MB, stage 1: 72.0 MB" in texts(pipelined({"pipeline": 2}))
    assert "on stage 1" in texts(pipelined({"pipeline": 2}))


def test_the_tensors_of_a_module_are_taken_from_the_plan_if_a_program_does_not_use_them():
    (job,) = with_unused_parameter().jobs
    assert [(item.name, item.bytes) for item in job.unused] == [(UNUSED, 60)]


def test_programs_of_one_job_and_jobs_of_one_name_keep_their_facts():
    sizes = {"model.a.weight": 7}
    second = ProgramInputRecord(kind="buffer", name="model.b", shape=(3,), dtype="bool", bytes=3, placement="whole")
    programs = [
        make_program(sizes),
        make_program(sizes, inputs=(second,)),
        make_program({"model.c.weight": 9}, line="/home/someone/train.py:40"),
    ]
    plan = collect(programs, make_axes(data=2))
    assert [job.title for job in plan.jobs] == ["train job train (train.py:12)"] * 2 + ["train job train (train.py:40)"]
    assert plan.jobs[1].inputs == ("1 buffer, 3 B: whole",)
    texts = [label.text for label in draw_plan(plan).labels]
    assert all(itertools.starmap(lambda name, count: texts.count(name) == count, [("model.a", 1), ("model.c", 1)]))


def test_workers_that_differ_by_a_row_share_a_bar_and_stages_never_do():
    (job,) = divided(7).jobs
    assert [group.workers for group in job.memory] == [tuple(range(7))]
    (job,) = pipelined({"pipeline": 2}, sizes={"model.a.weight": 8, "model.b.weight": 8}).jobs
    assert [(group.workers, group.is_measured) for group in job.memory] == [((0,), True), ((1,), False)]


def test_the_line_of_a_library_is_shown_whole():
    line = "/venv/lib/python3.11/site-packages/transformers/models/bert/modeling_bert.py:1698"
    program = make_program(gpt(1), [make_move("all_gather", "x", 70, line=line)])
    drawing = draw_plan(collect(make_records(program, None, 9), make_axes(data=2)))
    assert [label.text for label in drawing.labels if "modeling_bert" in label.text] == ["modeling_bert.py:1698"]


def test_a_table_of_two_jobs_is_shown_once():
    program = make_program(gpt(1))
    second = msgspec.structs.replace(program, job="evaluate")
    records = [*make_records(program, None, 9), *make_records(second, None, 9)]
    page = format_page(collect(records, make_axes(data=2)))
    assert page.count("parameters and buffers</caption>") == 1
    assert "parameters and buffers: the same as for train job train (" in page
