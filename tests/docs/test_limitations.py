"""Each sentence of docs/limitations.md has a test that fails when it stops being true: named here, or below."""

import ast
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
import torch
from support.processes import on_mesh
from support.warm_runs import run_script
from torch import nn

import rankless
from rankless.cli import main
from rankless.config.mesh_option import parse_mesh
from rankless.config.shared_memory_support import is_supported
from rankless.context.changes_outside_jobs import ModelChangeDetector
from rankless.context.world import World
from rankless.errors import ConfigError, DataError
from rankless.jobs.call_agreement import fingerprint_tensor
from rankless.jobs.job import make_job
from rankless.jobs.job_definition import StepOptions
from rankless.logical_view.gradients import LogicalBackward
from rankless.logical_view.tensor import DividedTensor, LogicalView
from rankless.parallel.mesh import Mesh
from rankless.plain_script.loaders import divide_batch, divide_batches

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/limitations.md"

# The beginning of each sentence, and the test that fails when it stops being true. "" is a test of this file.
SHOWN_BY = {
    "This page lists": "::test_each_sentence_names_a_test_that_exists",
    "Rankless has run on one GPU": "::test_the_page_on_gpus_has_one_gpu_and_pytorch_2_11",
    "GPUs lists": "::test_the_page_on_gpus_has_one_gpu_and_pytorch_2_11",
    "On macOS": "::test_on_macos_status_and_shared_memory_are_refused",
    "On Windows": "cli/test_commands.py::test_on_windows_the_import_fails_with_one_sentence",
    "Rankless searches for no": "::test_no_mesh_is_searched_for",
    "`rankless verify` checks": "extensions/servers/launch/test_server_options.py::test_verify_has_the_mode_sync_alone",
    "In the modes `async`": "jobs/test_independent_runs.py::test_what_independent_workers_cannot_do_is_refused",
    "A job with tables": "jobs/test_table_runs.py::test_what_several_workers_cannot_share_is_refused",
    "A pipeline refuses": "jobs/test_pipeline_runs.py::test_what_cannot_be_a_pipeline_is_refused_by_name",
    "It also refuses losses": (
        "compiler/test_selected_rows_in_pipelines.py::test_a_loss_that_needs_all_selected_rows_is_refused_with_its_line"
    ),
    "`zero=` takes": "ownership/test_refused_divisions.py::test_hooks_of_the_script_on_steps_are_refused",
    "The mirrored view and": "ownership/test_refused_divisions.py::test_other_views_are_refused",
    "`recompute=` is refused": "jobs/test_recomputation.py::test_jobs_without_a_program_or_gradients_are_refused",
    "A background save": (
        "checkpoint/test_memory_of_divided_saves.py::test_a_save_holds_at_most_one_whole_tensor_besides_pieces"
    ),
    "Use `layout=": (
        "checkpoint/test_memory_of_divided_saves.py::test_a_save_holds_at_most_one_whole_tensor_besides_pieces"
    ),
    "A load reads": "checkpoint/test_damaged_files.py::test_files_altered_at_random_are_refused",
    "A save of a table": (
        "extensions/servers/tables/test_table_steps.py::test_rows_keep_moving_for_as_long_as_their_momentum_lasts"
    ),
    "Slow ranks are not": ("launch/test_slow_ranks.py::test_no_rank_is_named_where_rankless_does_not_see_who_waits"),
    "`rankless status` lists": "::test_status_says_which_runs_it_leaves_out",
    "Runs of jobs on CPUs": "jobs/test_killed_workers.py::test_two_workers_are_killed_and_the_summary_says_so",
    "With `zero=`, and": "jobs/test_lost_workers_of_meshes.py::test_a_job_with_zero_on_a_mesh_needs_copies",
    "It ends if all workers": "jobs/test_lost_shards.py::test_a_worker_and_the_one_with_its_copy_are_lost_together",
    "Other runs end with": (
        "jobs/test_killed_workers.py::test_a_job_that_cannot_go_on_ends_and_the_killed_worker_is_the_cause"
    ),
    "A killed worker is replaced": "jobs/test_replaced_workers.py::test_what_cannot_be_copied_is_named",
    "Fewer workers may": "jobs/test_lost_workers_of_meshes.py::test_a_mesh_keeps_its_other_axes_where_it_can",
    "A lost host is replaced if": "launch/test_spare_hosts.py::test_a_script_that_heeds_no_request_has_fewer",
    "`--spares` needs": "launch/test_restarts.py::test_restarts_that_no_run_can_have_are_refused",
    "The view needs": "config/test_script_view.py::test_a_view_that_a_run_cannot_have_is_refused",
    "`--mesh` with": "config/test_script_view.py::test_a_view_that_a_run_cannot_have_is_refused",
    "A script without a": (
        "logical/test_plain_scripts.py::test_a_plain_script_prints_and_writes_what_it_does_on_one_device"
    ),
    "Every worker computes": (
        "logical/test_plain_scripts.py::test_a_plain_script_prints_and_writes_what_it_does_on_one_device"
    ),
    "Parameters are whole": "::test_what_the_logical_view_does_not_divide",
    "`--zero` shards": (
        "logical/test_sharded_optimizers.py::test_what_cannot_be_sharded_is_refused_before_anything_starts"
    ),
    "With `--zero`, optimizers": (
        "logical/test_sharded_optimizers.py::test_what_cannot_be_sharded_stays_whole_with_a_notice"
    ),
    "A notice names each.": "logical/test_sharded_optimizers.py::test_what_cannot_be_sharded_stays_whole_with_a_notice",
    "With `--zero gradients`": (
        "logical/test_sharded_optimizers.py::test_what_cannot_be_sharded_stays_whole_with_a_notice"
    ),
    "The script's own": "::test_what_the_logical_view_does_not_divide",
    "A notice names each line": "::test_what_the_logical_view_does_not_divide",
    "`rankless verify` runs": (
        "logical/test_verified_scripts.py::test_a_script_that_resumes_from_its_own_checkpoint_is_not_decided"
    ),
    "It refuses a script that": (
        "logical/test_verified_scripts.py::test_a_script_that_changes_its_parameters_by_hand_is_refused"
    ),
    "Slices of rows": "::test_slices_of_rows_are_whole_and_chosen_rows_are_divided",
    "Rows chosen by": "::test_slices_of_rows_are_whole_and_chosen_rows_are_divided",
    "Every rank reads": "::test_loaders_whose_batches_every_rank_reads_whole",
    "`rankless plan` shows a step": (
        "cli/test_plan_of_loops.py::test_a_plan_file_and_a_picture_of_a_loop_are_refused_before_it_runs"
    ),
    "It counts calls": "cli/test_plan_of_loops.py::test_the_table_of_a_step_fits_any_width_and_cuts_nothing_off",
    "A loop whose gradients": "cli/test_plan_of_loops.py::test_a_loop_without_backward_runs_to_its_end",
    "`torch.compile(model)`": "::test_a_compiled_model_runs_uncompiled_in_the_logical_view",
    "Two plain views": "::test_when_plain_views_of_a_batch_see_changes",
    "A view of `x.grad`": "::test_when_plain_views_of_a_batch_see_changes",
    "A library in C": (
        "plain_script/test_library_writers.py::test_a_notice_names_a_file_that_an_unknown_library_has_open_on_every_rank"
    ),
    "A notice tells of files": (
        "plain_script/test_library_writers.py::test_a_notice_names_a_file_that_an_unknown_library_has_open_on_every_rank"
    ),
    "A thread of": "::test_threads_do_not_take_part_in_the_logical_view",
    "A `DataLoader` in": "::test_threads_do_not_take_part_in_the_logical_view",
    "`DistributedDataParallel`": (
        "plain_script/test_single_process.py::test_what_needs_ranks_ends_with_an_error_that_names_the_other_option"
    ),
    "A job must be one program.": "jobs/test_whole_batch.py::test_a_refusal_names_the_way_out",
    "Shapes may depend": "compiler/test_selected_rows.py::test_rows_of_different_masks",
    "Packed sequences": "::test_what_jobs_cannot_do_on_two_workers",
    "Such a job runs": "::test_what_jobs_cannot_do_on_two_workers",
    "It is refused with": "::test_what_jobs_cannot_do_on_two_workers",
    "`capture=False` runs": "jobs/test_whole_batch.py::test_the_job_trains_as_the_plain_script_on_every_rank",
    "`backward()`": "compiler/test_adversarial_cases.py::test_the_job_is_refused_with_the_cause_and_the_line",
    "An operator without": (
        "compiler/test_operators.py::test_an_operator_without_a_rule_is_exact_and_reported_with_its_line"
    ),
    "Rankless warns once": (
        "compiler/test_program_agreement.py::test_an_operator_without_a_rule_warns_once_with_its_line"
    ),
    "An experiment": "compiler/test_operator_probe.py::test_an_operator_of_the_script_is_split_forward_and_backward",
    "The workers then": "jobs/test_probed_operators.py::test_workers_train_as_the_plain_script_and_say_what_was_split",
    "They compare real rows": (
        "compiler/test_operator_probe.py::test_rows_are_compared_each_time_that_the_calls_have_doubled"
    ),
    "Operators that work": "::test_what_jobs_cannot_do_on_two_workers",
    "Rankless warns from": "::test_what_jobs_cannot_do_on_two_workers",
    "After a failed call": "::test_a_failed_call_on_one_device_has_updated_statistics",
    "On several workers no": "::test_what_jobs_cannot_do_on_two_workers",
    "With `gloo`": (
        "jobs/test_failed_operations.py"
        "::test_with_gloo_whose_waits_cannot_be_ended_an_exception_of_one_rank_ends_the_run"
    ),
    "So does one": (
        "jobs/test_failed_operations.py::test_an_exception_of_one_rank_in_a_step_ends_the_run_and_no_later_call_trains"
    ),
    "A loader's pass": "::test_a_pass_ends_with_the_exception_of_a_sample",
    "PyTorch's `DataLoader` continues": "::test_a_pass_ends_with_the_exception_of_a_sample",
    "A job keeps": "::test_a_job_keeps_its_optimizer",
    "A new optimizer": "::test_a_job_keeps_its_optimizer",
    "SparseAdam": "::test_sparse_adam_needs_sparse_gradients",
    "LBFGS": "jobs/test_closure_steps.py::test_another_optimizer_beside_it_is_refused",
    "Rankless refuses them": "jobs/test_closure_steps.py::test_options_for_gradients_are_refused_by_name",
    "With `accumulate=`": (
        "jobs/test_refused_accumulation.py::test_a_loss_that_cannot_accumulate_raises_with_its_line_untrained"
    ),
    "Rankless refuses other losses": (
        "jobs/test_refused_accumulation.py::test_a_loss_that_cannot_accumulate_raises_with_its_line_untrained"
    ),
    "It refuses means": (
        "jobs/test_refused_accumulation.py::test_loss_terms_with_diverging_weights_raise_at_that_call"
    ),
    "A float32 gradient": "verify/test_first_differing_value.py::test_a_cancelling_value_is_measured_by_its_inputs",
    "Results in bfloat16": "compiler/test_half_precision.py::test_a_product_over_the_batch_is_rounded_once",
    "Adaptive optimizers": "verify/test_shared_faults.py::test_rounding_may_drive_a_parameter_in_any_direction",
    "Parameters then drift": "verify/test_shared_faults.py::test_rounding_may_drive_a_parameter_in_any_direction",
    "With augmentation": "data/test_loader_order.py::test_replicated_reading_draws_as_a_data_loader",
    "If a `collate_fn`": (
        "data/test_collation_probe.py::test_functions_that_need_the_whole_batch_get_it_with_one_notice"
    ),
    "A notice names the": "data/test_collation_probe.py::test_the_notice_names_the_line_and_the_shapes",
    "Batches that each": "data/test_collation_probe.py::test_buckets_of_one_length_never_verify_a_function",
    "A `collate_fn` that begins": (
        "data/test_collation_probe.py::test_random_numbers_that_begin_later_are_a_data_loaders_or_refused"
    ),
    "Workers of one host": "launch/test_diverged_ranks.py::test_all_ranks_stop_and_the_difference_is_named",
    "Between hosts": (
        "collectives/test_desync_detection.py"
        "::test_ranks_of_all_hosts_raise_the_same_error_at_a_call_after_a_difference"
    ),
    "Inputs on a GPU": "::test_inputs_on_other_devices_have_no_fingerprint",
    "Changes that bypass": "::test_changes_that_bypass_the_version_counter_are_not_seen",
    "Collectives in shared": "config/test_backends.py::test_a_machine_without_ordered_stores_uses_gloo_and_says_why",
    "If a machine of a run": (
        "collectives/backends/hosts/test_opening.py::test_a_host_without_memory_makes_all_ranks_use_gloo"
    ),
    "Several workers of": "::test_several_workers_have_no_standard_input",
    "`--debug-rank` gives": (
        "launch/test_debug_rank.py::test_a_rank_with_the_terminal_is_debugged_while_the_others_wait"
    ),
    "A hang report": "launch/test_watchdog.py::test_a_process_without_our_handler_never_gets_the_signal",
    "The stores of": "launch/test_security.py::test_the_page_shows_the_tables",
}
# Sentences that no test of CI can show, and why.
WITHOUT_A_TEST = {
    "Copies of parameter servers": "the agent of the first host decides which losses copies cover",
    "It compiles one program": "a shape more costs a compilation, which no test counts for pipelines",
    "Ranks of a `hierarchical` group": "says which calls are not compared",
    "A process that receives": "Gloo aborts the process",
    "While the main thread": "a duration, which depends on the machine",
}


def sentences() -> list[str]:
    """Return the sentences of the page as a reader sees them: without links and line ends."""
    text = re.sub(r"^#.*$", "", PAGE.read_text(), flags=re.MULTILINE)
    text = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", text)
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\n|^- ", text, flags=re.MULTILINE)]
    return list(chain.from_iterable(re.split(r"(?<=[.)]) (?=[A-Z`])", each) for each in paragraphs if each))


def test_each_sentence_names_a_test_that_exists():
    known = {**SHOWN_BY, **WITHOUT_A_TEST}
    found = {sentence: [start for start in known if sentence.startswith(start)] for sentence in sentences()}
    assert not [sentence for sentence, starts in found.items() if len(starts) != 1]
    assert not set(known) - set(chain.from_iterable(found.values())), "sentences that the page no longer has"
    for test in SHOWN_BY.values():
        file, _, name = test.rpartition("::")
        text = (ROOT / "tests" / file).read_text() if file else Path(__file__).read_text()
        assert name in {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}, test


def test_the_page_on_gpus_has_one_gpu_and_pytorch_2_11():
    page = (ROOT / "docs/guides/gpus.md").read_text()
    assert "one NVIDIA H100" in page
    assert set(re.findall(r"PyTorch \**(\d\.\d+)\.\d", page)) == {"2.11"}


def test_on_macos_status_and_shared_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert main(["status"]) == 2
    assert "expected: Linux" in capsys.readouterr().err
    assert "this is Darwin" in is_supported().reason


def test_status_says_which_runs_it_leaves_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("os.geteuid", lambda: 65533)  # other tests have runs
    assert main(["status"]) == 0
    assert re.search(r"elastic jobs.*rankless\.spawn", capsys.readouterr().out)


def test_no_mesh_is_searched_for():
    with pytest.raises(ConfigError, match="axes as name=size"):
        parse_mesh("auto")


def attempt(mesh: Mesh, loss, models, optimizer, *arguments, **options) -> tuple[str, list[str]]:
    """Call a job once. Return its error, and the warnings of the call."""
    warnings: list[str] = []
    world = World(mesh=mesh, notify=warnings.append, send_record=lambda _: None)
    given = StepOptions(**options)
    job = make_job(loss, model=models, optimizer=optimizer, view=None, world=lambda: world, step_options=given)
    try:
        job(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}", warnings
    return "", warnings


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pack_sequences(mesh: Mesh, **options) -> tuple[str, list[str]]:
    model = nn.LSTM(3, 4, batch_first=True)

    def loss(x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return model(packed)[0].data.mean()

    return attempt(mesh, loss, model, sgd(model), torch.ones(4, 5, 3), torch.tensor([5, 4, 3, 2]), **options)


def sum_over_the_batch(mesh: Mesh, rows: int) -> tuple[str, list[str]]:
    model = nn.Linear(4, 4)
    return attempt(mesh, lambda x: model(x).cumsum(0).mean(), model, sgd(model), torch.ones(rows, 4))


def fail_after_batch_norm(mesh: Mesh) -> list[float]:
    norm, layer = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def loss(x):
        layer(norm(x))
        raise KeyError("mine")

    error, _ = attempt(mesh, loss, [norm, layer], sgd(layer), torch.ones(4, 4))
    assert "KeyError" in error
    return norm.running_mean.tolist()


def what_two_workers_refuse(mesh: Mesh):
    model = nn.Linear(4, 4)
    argument = torch.ones(4, 4, requires_grad=True)

    def mean(x):
        return model(x).mean()

    given = [
        (
            *attempt(mesh, lambda x: model(x).mean(), model, sgd(model), argument, **options),
            *pack_sequences(mesh, **options),
        )
        for options in ({}, {"accumulate": 2})
    ]
    return given, sum_over_the_batch(mesh, 8000), sum_over_the_batch(mesh, 800), fail_after_batch_norm(mesh)


def test_what_jobs_cannot_do_on_two_workers():
    for ((argument, notices, packed, more), refused), many, few, mean in on_mesh(2, what_two_workers_refuse):
        assert argument == packed == ""
        assert "requires a gradient" in notices[0]
        assert "pack_padded_sequence needs the value of a tensor" in more[0]
        assert all("run one by one on divided batches" in each[0] for each in (notices, more))
        assert "requires a gradient" in refused[0]
        assert "pack_padded_sequence needs the value of a tensor" in refused[2]
        assert many[0] == few[0] == ""
        assert "cumsum gathers 128 kB per step" in many[1][0]
        assert not few[1]
        assert mean == [0.0] * 4


def test_a_failed_call_on_one_device_has_updated_statistics():
    assert fail_after_batch_norm(Mesh.solo()) == pytest.approx([0.1] * 4)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.round()

    @staticmethod
    def backward(_, gradient):
        return gradient


def train_in_the_logical_view(mesh: Mesh) -> tuple[list[str], list[tuple[int, ...]]]:
    """Return the notices of a step, and the shapes of plain tensors of the training's state."""
    notices: list[str] = []
    view = LogicalView(mesh, notices.append)
    model = nn.Linear(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with LogicalBackward(view).install():
        x = divide_batch(torch.ones(8, 4), view, rows=8)
        assert type(x) is DividedTensor
        for _ in range(2):
            Rounded.apply(model(x)).sum().backward()
            torch.vmap(torch.sin)(x)
            torch.histc(x)
            optimizer.step()
    state = [model.weight, model.weight.grad, optimizer.state[model.weight]["momentum_buffer"]]
    return notices, [tuple(each.shape) for each in state if type(each) in (nn.Parameter, torch.Tensor)]


def test_what_the_logical_view_does_not_divide():
    for notices, shapes in on_mesh(2, train_in_the_logical_view):
        assert shapes == [(6, 4)] * 3
        named = [re.search(r": (\S+) runs on the whole batch on every rank", notice) for notice in notices]
        assert [each and each[1] for each in named] == ["Rounded", "torch.sin", "torch.histc"]


def list_row_kinds(mesh: Mesh) -> list[type]:
    """Return the kinds of results of functions of slices of rows, then of chosen rows."""
    view = LogicalView(mesh, lambda _: None)
    with LogicalBackward(view).install():
        x = divide_batch(torch.ones(8, 4), view, rows=8)
        return [type(rows.sin()) for rows in (x[:4], x.chunk(2)[0], x[torch.tensor([1, 0, 5])])]


def test_slices_of_rows_are_whole_and_chosen_rows_are_divided():
    assert on_mesh(2, list_row_kinds) == [[torch.Tensor, torch.Tensor, DividedTensor]] * 2


def run_compiled_model(mesh: Mesh) -> tuple[int, float]:
    """Return how often a compiler was called, and what the model returns."""
    compiled = []

    def compile_graph(graph, _):
        compiled.append(graph)
        return graph

    view = LogicalView(mesh, lambda _: None)
    with LogicalBackward(view).install():
        model = torch.compile(nn.Linear(4, 6), backend=compile_graph)
        return len(compiled), float(model(divide_batch(torch.zeros(8, 4), view, rows=8)).shape[1])


def test_a_compiled_model_runs_uncompiled_in_the_logical_view():
    assert on_mesh(2, run_compiled_model) == [(0, 6.0)] * 2


def change_views(mesh: Mesh) -> list[list[float]]:
    view = LogicalView(mesh, lambda _: None)
    with LogicalBackward(view).install():
        x = divide_batch(torch.ones(8, 4), view, rows=8)
        row, number = x[0], x.view(-1)[0]
        number.fill_(5)
        before = row.tolist()
        x.sum()
        leaf = divide_batch(torch.ones(8, 4), view, rows=8).requires_grad_()
        leaf.sum().backward()
        gradient = leaf.grad[0]
        leaf.sum().backward()
        early = gradient.tolist()
        summed = leaf.grad.tolist()[0]
        return [before, row.tolist(), early, gradient.tolist(), summed]


def test_when_plain_views_of_a_batch_see_changes():
    for before, after, early, late, summed in on_mesh(2, change_views):
        assert (before, after) == ([1.0] * 4, [5.0, 1.0, 1.0, 1.0])
        assert (early, late, summed) == ([1.0] * 4, [2.0] * 4, [2.0] * 4)


class Numbers(torch.utils.data.Dataset):
    def __init__(self):
        self.read: list[int] = []

    def __len__(self):
        return 8

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.read: list[int] = []

    def __iter__(self):
        for index in range(8):
            self.read.append(index)
            yield index


def read_batches(mesh: Mesh) -> list[list[int]]:
    """Return what this rank reads of loaders of each kind."""
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    found = []
    with divide_batches(LogicalView(mesh, lambda _: None), world):
        for dataset, collate in ((Numbers(), None), (Numbers(), torch.tensor), (Stream(), None)):
            for batch in torch.utils.data.DataLoader(dataset, batch_size=4, collate_fn=collate):
                assert type(batch) is DividedTensor
            found.append(dataset.read)
    return found


def test_loaders_whose_batches_every_rank_reads_whole():
    for plain, collated, streamed in on_mesh(2, read_batches):
        assert set(plain) != set(range(8))
        assert collated == streamed == list(range(8))


def read_in_a_thread(mesh: Mesh) -> tuple[str, list[type]]:
    """Return the error of a thread that reads a divided tensor, and the types of batches of a loader in a thread."""
    world = World(mesh=mesh, notify=lambda _: None, send_record=lambda _: None)
    view = LogicalView(mesh, lambda _: None)
    x = divide_batch(torch.ones(8, 4), view, rows=8)
    with divide_batches(view, world), ThreadPoolExecutor(1) as pool:
        error = pool.submit(x.tolist).exception()
        batches = pool.submit(lambda: list(torch.utils.data.DataLoader(Numbers(), batch_size=4))).result()
    return str(error), [type(batch) for batch in batches]


def test_threads_do_not_take_part_in_the_logical_view():
    for error, types in on_mesh(2, read_in_a_thread):
        assert "expected: reads of divided batches in the script's main thread" in error
        assert types == [torch.Tensor] * 2


class WithABadSample(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise OSError("unreadable")
        return index


def test_a_pass_ends_with_the_exception_of_a_sample():
    ours = iter(rankless.loader(WithABadSample(), batch_size=2))
    theirs = iter(torch.utils.data.DataLoader(WithABadSample(), batch_size=2))
    for batches, expected in ((ours, DataError), (theirs, OSError)):
        next(batches)
        with pytest.raises(expected, match="unreadable"):
            next(batches)
    assert next(theirs).tolist() == [4, 5]
    with pytest.raises(StopIteration):
        next(ours)


def test_a_job_keeps_its_optimizer():
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    world = World(mesh=Mesh.solo(), notify=lambda _: None, send_record=lambda _: None)
    job = make_job(lambda x: model(x).mean(), model=model, optimizer=optimizer, view=None, world=lambda: world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = model.weight.detach().clone()
    job(torch.ones(2, 4))
    assert not torch.equal(model.weight, before)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.0


@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_adam_needs_sparse_gradients(sparse: bool):
    model = nn.Embedding(10, 4, sparse=sparse)
    optimizer = torch.optim.SparseAdam(model.parameters())
    error, _ = attempt(Mesh.solo(), lambda x: model(x).mean(), model, optimizer, torch.arange(4))
    assert ("" if sparse else "does not support dense gradients") in error
    assert bool(error) is not sparse


def test_inputs_on_other_devices_have_no_fingerprint():
    assert fingerprint_tensor(torch.ones(3, device="meta")) == 0 != fingerprint_tensor(torch.ones(3))


def test_changes_that_bypass_the_version_counter_are_not_seen():
    parameter = nn.Parameter(torch.ones(2))
    detector = ModelChangeDetector()
    detector.record_versions([parameter])
    parameter.data.mul_(2)
    assert not detector.have_changed([parameter])


@pytest.mark.slow
def test_several_workers_have_no_standard_input(tmp_path: Path):
    done = run_script("try:\n    input()\nexcept EOFError:\n    print('no input')\n", "-n", "2", folder=tmp_path)
    assert "no input" in done.stdout, done.stdout + done.stderr
