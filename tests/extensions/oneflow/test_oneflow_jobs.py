"""Forms in which scripts write OneFlow's jobs: those that work, and the errors of those that do not."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rankless_oneflow as flow
import rankless_oneflow.typing as tp
import torch
from rankless_oneflow.session import current_session, reset_session

from rankless.errors import CheckpointError, ConfigError, DataError

ROWS = np.random.RandomState(0).randn(8, 4).astype("float32")
LABELS = np.arange(8, dtype="int32") % 3
START = flow.truncated_normal(0.3)
Rows = tp.Numpy.Placeholder((8, 4))
Labels = tp.Numpy.Placeholder((8,), dtype=flow.int32)


def network(rows, trainable=True):
    hidden = flow.layers.dense(rows, 6, flow.nn.relu, True, START, trainable=trainable, name="hidden")
    return flow.layers.dense(hidden, 3, kernel_initializer=START, name="out")


def descend(loss, momentum=0.9, boundaries=(), rates=(0.1,)):
    flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler(boundaries, rates), momentum=momentum).minimize(loss)


def make_train_job(**options: Any) -> Callable[..., Any]:
    @flow.global_function("train")
    def train_job(rows: Rows, labels: Labels) -> tp.Numpy:
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, network(rows))
        descend(loss, **options)
        return loss

    return train_job


def make_predict_job() -> Callable[..., Any]:
    @flow.global_function()
    def predict_job(rows: Rows) -> tp.Numpy:
        return flow.nn.dropout(network(rows), rate=0.5)

    return predict_job


def initialized() -> flow.train.CheckPoint:
    check_point = flow.train.CheckPoint()
    check_point.init()
    return check_point


def mirrored() -> Any:
    settings = flow.function_config()
    settings.default_logical_view(flow.scope.mirrored_view())
    return settings


def test_jobs_share_the_variables_of_their_layers():
    train, predict = make_train_job(), make_predict_job()
    initialized()
    before = predict(ROWS)
    np.testing.assert_array_equal(before, predict(ROWS))  # no dropout where nothing is trained
    losses = [train(ROWS, LABELS) for _ in range(20)]
    assert losses[0].shape == (8,)
    assert losses[-1].mean() < losses[0].mean() / 2
    after = predict(ROWS)
    assert (after.argmax(1) == LABELS).mean() > (before.argmax(1) == LABELS).mean()


def test_a_variable_is_trained_by_the_jobs_whose_layers_say_so():
    @flow.global_function()
    def predict_job(rows: Rows) -> tp.Numpy:
        return network(rows, trainable=False)

    @flow.global_function("train")
    def train_last(rows: Rows, labels: Labels) -> tp.Numpy:
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, network(rows, trainable=False))
        descend(loss)
        return loss

    train = make_train_job()
    initialized()
    hidden = current_session().variables.find("hidden-weight")
    values = [hidden.detach().clone()]
    for job in (train_last, train, train_last):
        job(ROWS, LABELS)
        values.append(hidden.detach().clone())
    assert [not torch.equal(*pair) for pair in pairwise(values)] == [False, True, False]
    assert predict_job(ROWS).shape == (8, 3)


def test_init_begins_anew_with_variables_momentum_and_schedule():
    train = make_train_job(boundaries=[1], rates=[0.1, 0.01])
    check_point = initialized()
    first = [train(ROWS, LABELS) for _ in range(4)]
    check_point.init()
    np.testing.assert_array_equal(first, [train(ROWS, LABELS) for _ in range(4)])


def test_a_loaded_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path: Path):
    options = {"boundaries": [2], "rates": [0.1, 0.01]}
    train = make_train_job(**options)
    check_point = initialized()
    for _ in range(2):
        train(ROWS, LABELS)
    check_point.save(str(tmp_path / "saved"))
    wanted = [train(ROWS, LABELS) for _ in range(3)]
    reset_session()
    train = make_train_job(**options)
    flow.train.CheckPoint().load(str(tmp_path / "saved"))
    np.testing.assert_array_equal(wanted, [train(ROWS, LABELS) for _ in range(3)])


def test_a_script_that_only_predicts_loads_what_it_needs(tmp_path: Path):
    train = make_train_job()
    predict = make_predict_job()
    check_point = initialized()
    train(ROWS, LABELS)
    check_point.save(tmp_path / "saved")
    wanted = predict(ROWS)
    reset_session()
    predict = make_predict_job()
    flow.train.CheckPoint().load(tmp_path / "saved")
    np.testing.assert_array_equal(predict(ROWS), wanted)
    reset_session()

    @flow.global_function()
    def other(rows: Rows) -> tp.Numpy:
        return flow.layers.dense(rows, 2, name="unknown")

    with pytest.raises(CheckpointError, match="unknown-weight"):
        flow.train.CheckPoint().load(tmp_path / "saved")


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path):
    make_predict_job()
    initialized().save(tmp_path / "saved")
    reset_session()

    @flow.global_function()
    def other(rows: Rows) -> tp.Numpy:
        return flow.layers.dense(rows, 5, name="hidden")

    with pytest.raises(ConfigError, match=r"shape \[6, 4\] in the checkpoint for a variable of shape \[5, 4\]"):
        flow.train.CheckPoint().load(tmp_path / "saved")


def test_layers_without_names_are_counted_in_each_job():
    @flow.global_function()
    def first(rows: Rows) -> tp.Numpy:
        hidden = flow.layers.dense(rows, 4, kernel_initializer=START)
        return flow.layers.dense(hidden, 4, kernel_initializer=START)

    @flow.global_function()
    def second(rows: Rows) -> tp.Numpy:
        return flow.layers.dense(rows, 4, kernel_initializer=START)

    initialized()
    np.testing.assert_allclose(first(ROWS)[0], (second(ROWS) @ _weight("Dense_1").T)[0], rtol=1e-5)


def _weight(layer: str) -> np.ndarray:
    return START.make_values(f"{layer}-weight", (4, 4), torch.float32).numpy()


def test_two_losses_are_minimized_together_and_frozen_variables_stay():
    @flow.global_function(type="train")
    def train(rows: Rows, labels: Labels) -> tuple[tp.Numpy, tp.Numpy]:
        logits = network(rows, trainable=False)
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        descend([loss, (logits * logits).mean()])
        return loss, logits

    @flow.global_function()
    def hidden(rows: Rows) -> tp.Numpy:
        return flow.layers.dense(rows, 6, flow.nn.relu, kernel_initializer=START, name="hidden")

    initialized()
    kept = hidden(ROWS)
    (_, before), (_, after) = train(ROWS, LABELS), train(ROWS, LABELS)
    assert abs(after - before).max() > 1e-3
    np.testing.assert_array_equal(hidden(ROWS), kept)


def test_results_have_the_structure_of_their_annotation():
    @flow.global_function()
    def named(rows: Rows) -> dict[str, tp.Numpy]:
        return {"double": rows * 2, "half": rows / 2}

    @flow.global_function(function_config=mirrored())
    def listed(rows: tp.ListNumpy.Placeholder((4, 4))) -> tuple[tp.ListNumpy, tp.ListNumpy]:
        return rows * 2, rows / 2

    @flow.global_function()
    def quiet(rows: "tp.Numpy.Placeholder(8)"):
        flow.reshape(rows, [2, 4])

    np.testing.assert_array_equal(named(ROWS)["half"], ROWS / 2)
    doubles, halves = listed([ROWS[:4], ROWS[4:]])
    assert isinstance(doubles, list)
    np.testing.assert_array_equal(np.concatenate(doubles), ROWS * 2)
    np.testing.assert_array_equal(halves[1], ROWS[4:] / 2)
    assert quiet(ROWS[:, 0]) is None


def test_a_job_after_an_exception_in_its_body_works():
    fails = True

    @flow.global_function()
    def sometimes(rows: Rows) -> tp.Numpy:
        if fails:
            raise ValueError("no")
        return rows

    with pytest.raises(ValueError, match="no"):
        sometimes(ROWS)
    fails = False
    np.testing.assert_array_equal(sometimes(ROWS[::-1]), ROWS[::-1])


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_padding_same_has_the_windows_of_oneflow(size: int, stride: int, window: int):
    image = np.random.RandomState(1).randn(1, 1, size, size + 2).astype("float32")

    @flow.global_function()
    def pool(images: tp.Numpy.Placeholder(image.shape)) -> tuple[tp.Numpy, tp.Numpy, tp.Numpy]:
        ones = flow.constant_initializer(1)
        convolved = flow.layers.conv2d(images, 1, window, stride, "same", kernel_initializer=ones)
        pools = [flow.nn.max_pool2d(images, window, [stride, stride], kind) for kind in ("SAME", "SAME_UPPER")]
        return convolved, *pools

    initialized()
    convolved, lower, upper = pool(image)
    np.testing.assert_allclose(convolved[0, 0], _slide(image[0, 0], stride, window, 0, np.sum, 1), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(lower[0, 0], _slide(image[0, 0], stride, window, -np.inf, np.max, 1))
    np.testing.assert_array_equal(upper[0, 0], _slide(image[0, 0], stride, window, -np.inf, np.max, 0))


def _slide(image: np.ndarray, stride: int, window: int, fill: float, reduce: Any, odd_before: int) -> np.ndarray:
    """Reduce each window; the output has the size of the image divided by the stride, rounded up."""
    counts = [-(-size // stride) for size in image.shape]
    added = [max((n - 1) * stride + window - size, 0) for n, size in zip(counts, image.shape, strict=True)]
    before = [(each + odd_before) // 2 for each in added]
    pads = [(first, each - first + window) for first, each in zip(before, added, strict=True)]
    padded = np.pad(image, pads, constant_values=fill)
    starts = [[n * stride for n in range(count)] for count in counts]
    return np.array([[reduce(padded[y : y + window, x : x + window]) for x in starts[1]] for y in starts[0]])


def test_the_digits_have_the_shapes_and_dtypes_of_mnist():
    (images, labels), (test_images, test_labels) = flow.data.load_mnist(100, 50)
    assert (images.shape, images.dtype) == ((15, 100, 1, 28, 28), np.float32)
    assert (labels.shape, labels.dtype) == ((15, 100), np.int32)
    assert (test_images.shape, test_labels.shape) == ((5, 50, 1, 28, 28), (5, 50))
    assert 0 <= images.min() < images.max() <= 1
    assert set(labels.flatten()) == set(range(10))
    with pytest.raises(ConfigError, match="batch size of 1501"):
        flow.data.load_mnist(1501)


def expect_call(job: Callable[..., Any], text: str, *arguments: Any, error: type[Exception] = DataError) -> None:
    with pytest.raises(error, match=text):
        job(*arguments)


def test_calls_that_do_not_fit_their_placeholders_are_refused_with_the_conversion():
    train = make_train_job()
    expect_call(train, r"no values.*\n.*CheckPoint\(\).init\(\)", ROWS, LABELS, error=ConfigError)
    initialized()
    expect_call(train, r'dtype int64\nfix: .*labels.astype\("int32"\)', ROWS, LABELS.astype("int64"))
    expect_call(train, r'dtype float64\nfix: .*rows.astype\("float32"\)', ROWS.astype("float64"), LABELS)
    expect_call(train, r"shape \[7, 4\]\nfix: .*smaller batch", ROWS[:7], LABELS[:7])
    expect_call(train, r"found: .*a list\nfix: .*numpy.array\(rows\)", [ROWS[:4], ROWS[4:]], LABELS)
    expect_call(train, "a Tensor", torch.tensor(ROWS), LABELS)
    expect_call(train, "missing a required argument: 'labels'", ROWS, error=TypeError)
    expect_call(train, "out of bounds", ROWS, LABELS + 3, error=IndexError)
    assert train(labels=LABELS, rows=ROWS).shape == (8,)


def test_lists_that_do_not_fit_are_refused():
    @flow.global_function(function_config=mirrored())
    def add(first: tp.ListNumpy.Placeholder((4,)), second: tp.ListNumpy.Placeholder((4,))) -> tp.ListNumpy:
        return first + second

    halves = [ROWS[:4, 0], ROWS[4:, 0]]
    np.testing.assert_array_equal(add(halves, tuple(halves))[1], 2 * halves[1])
    expect_call(add, "a ndarray", ROWS[:, 0], halves)
    expect_call(add, "no array", [], [])
    expect_call(
        add, r"second\[1\] as a NumPy array of shape \[4\].*\nfound: .*shape \[3\]", halves, [halves[0], halves[1][:3]]
    )
    expect_call(add, "equal length", halves, [*halves, halves[0]], error=ConfigError)


def define(**annotations: Any) -> Callable[..., Any]:
    def job(rows):
        return rows

    job.__annotations__ = annotations
    return job


WRONG_DEFINITIONS = {
    "no parentheses": lambda: flow.global_function(define(rows=Rows)),
    "type='test'": lambda: flow.global_function(type="test"),
    "function_config=<function": lambda: flow.global_function("train", flow.function_config),
    "found:    rows\n": lambda: flow.global_function()(define()),
    "found:    rows: rankless_oneflow.typing.Numpy": lambda: flow.global_function()(define(rows=tp.Numpy)),
    "another placeholder of argument 'rows'": lambda: flow.global_function(function_config=mirrored())(
        define(rows=Rows)
    ),
    "found:    -> ListNumpy": lambda: flow.global_function()(define(**{"rows": Rows, "return": tp.ListNumpy})),
    "another placeholder": lambda: flow.global_function()(define(rows=tp.ListNumpy.Placeholder((4,)))),
    "a second job 'job'": lambda: [flow.global_function()(define(rows=Rows)) for _ in range(2)],
    "shape \\(50.0, 2\\)": lambda: tp.Numpy.Placeholder((100 / 2, 2)),
    "dtype=<class 'numpy.float32'>": lambda: tp.Numpy.Placeholder((3,), dtype=np.float32),
    "flow.scope.mirrored_view\\(\\)": lambda: flow.function_config().default_logical_view(flow.scope.mirrored_view),
    "torch.int32": lambda: flow.function_config().default_data_type(flow.int32),
    "oneflow.function_config\\(\\).enable_auto": lambda: flow.function_config().enable_auto_mixed_precision(True),
    "lr_scheduler=0.1": lambda: flow.optimizer.SGD(0.1),
    "clip_norm": lambda: flow.optimizer.grad_clipping.by_global_norm(1.0),
    "warmup=5": lambda: flow.optimizer.CosineScheduler(0.1, 10, warmup=5),
    "boundaries \\[3, 1\\]": lambda: flow.optimizer.PiecewiseConstantScheduler([3, 1], [1, 2, 3]),
    "values \\[0.1\\]": lambda: flow.optimizer.PiecewiseConstantScheduler([3], [0.1]),
    "gpu_device_num.*\nfound:    0": lambda: flow.config.gpu_device_num(0),
    "found:    '10.0.0.1'": lambda: flow.env.machine(["10.0.0.1"]),
    "found:    70000": lambda: flow.config.ctrl_port(70000),
    "a call outside all jobs": lambda: flow.layers.dense(torch.zeros(2, 2), 3),
    "all jobs of a run have all its devices": lambda: flow.scope.placement("gpu", "0:0"),
    "torch.mean": lambda: flow.math.reduce_mean,
    "oneflow.nn.Module\n.*torch.nn.Module": lambda: flow.nn.Module,
}


@pytest.mark.parametrize("text", WRONG_DEFINITIONS)
def test_what_the_pages_do_not_document_is_refused_with_our_name_for_it(text: str):
    with pytest.raises(ConfigError, match=text):
        WRONG_DEFINITIONS[text]()


def test_names_that_are_missing_are_missing_attributes():
    assert not hasattr(flow, "compatible")
    assert not hasattr(flow, "Tensor")
    assert not hasattr(flow, "__wrapped__")
    with pytest.raises(ImportError):
        exec("from rankless_oneflow.optimizer import LAMB")


def train_body(body: Callable[..., Any], kind: str = "train") -> None:
    @flow.global_function(kind)
    def job(rows: Rows, labels: Labels) -> tp.Numpy:
        return body(rows, labels)

    initialized()


def twice(rows, _labels):
    loss = network(rows)
    descend(loss)
    descend(loss)
    return loss


def without_variables(rows, _labels):
    descend(rows)
    return rows


def minimizing(found):
    def body(rows, labels):
        loss = found(rows, labels)
        descend(loss)
        return loss

    return body


cross_entropy = flow.nn.sparse_softmax_cross_entropy_with_logits
WRONG_BODIES = {
    "0 calls of minimize": lambda rows, _labels: network(rows),
    "2 calls of minimize": twice,
    "without trainable variables": without_variables,
    "trainable variables": minimizing(lambda rows, _labels: flow.layers.dense(rows, 2, trainable=False)),
    "minimize as.*\nfound:    None": minimizing(lambda _rows, _labels: None),
    "labels of torch.float32": minimizing(lambda rows, labels: cross_entropy(network(rows), labels)),
    r"labels of shape \[8, 1\]": minimizing(
        lambda rows, labels: cross_entropy(flow.reshape(labels, [-1, 1]), network(rows))
    ),
    "two layers that make variable 'hidden-weight'": minimizing(lambda rows, _labels: network(rows) + network(rows)),
    "kernel_regularizer=0.1": minimizing(lambda rows, _labels: flow.layers.dense(rows, 2, kernel_regularizer=0.1)),
    "rate=50": minimizing(lambda rows, _labels: flow.nn.dropout(network(rows), 50)),
    "an input of torch.int32": minimizing(lambda _rows, labels: flow.layers.dense(flow.reshape(labels, [1, 8]), 2)),
    r"inputs of shape \[8\]": minimizing(lambda rows, _labels: flow.layers.dense(rows[:, 0], 2)),
    "padding='FULL'": minimizing(
        lambda rows, _labels: flow.layers.conv2d(flow.reshape(rows, [8, 1, 2, 2]), 2, 1, padding="FULL")
    ),
    "data_format='NHWC'": minimizing(
        lambda rows, _labels: flow.nn.max_pool2d(flow.reshape(rows, [8, 1, 2, 2]), 2, 2, "SAME", "NHWC")
    ),
    "its annotation says, which is -> Numpy\nfound:    a tuple of 2": lambda rows, labels: (
        descend(network(rows)),
        labels,
    ),
}


@pytest.mark.parametrize("text", WRONG_BODIES)
def test_a_body_that_cannot_train_is_refused_before_the_first_call(text: str):
    with pytest.raises(ConfigError, match=text):
        train_body(WRONG_BODIES[text])


def test_a_predict_job_cannot_minimize():
    with pytest.raises(ConfigError, match="a call of it in a predict job"):
        train_body(minimizing(lambda rows, _labels: network(rows)), "predict")


def test_a_variable_has_one_shape_in_all_jobs():
    make_predict_job()

    @flow.global_function()
    def other(rows: Rows) -> tp.Numpy:
        return flow.layers.dense(rows, 5, name="hidden")

    with pytest.raises(ConfigError, match=r"'hidden-weight' of \[5, 4\], which is \[6, 4\] in another job"):
        initialized()


def test_settings_after_the_start_are_refused():
    make_predict_job()
    initialized()
    for change in (
        lambda: flow.config.gpu_device_num(2),
        lambda: flow.env.machine([{"addr": "10.0.0.1"}, {"addr": "10.0.0.2"}]),
        lambda: flow.env.ctrl_port(9988),
    ):
        with pytest.raises(ConfigError, match="a call after the first job"):
            change()


def test_a_save_without_values_and_a_job_within_a_job_are_refused(tmp_path: Path):
    predict = make_predict_job()
    with pytest.raises(ConfigError, match=r"before check_point\.init"):
        flow.train.CheckPoint().save(tmp_path / "saved")
    initialized()

    @flow.global_function()
    def outer(rows: Rows) -> tp.Numpy:
        return predict(rows)

    with pytest.raises(ConfigError, match="within another job"):
        outer(ROWS)


def test_a_job_that_is_defined_after_init_has_values():
    initialized()
    assert make_train_job()(ROWS, LABELS).shape == (8,)
