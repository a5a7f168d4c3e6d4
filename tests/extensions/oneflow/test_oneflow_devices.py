"""Forms of jobs that the training of test_oneflow_training.py does not have print the same on one device and on two."""

from pathlib import Path

import pytest
from support.oneflow import PACKAGE
from support.warm_runs import rankless

SCRIPT = f"""
import sys
sys.path.insert(0, {str(PACKAGE / "source")!r})
import numpy as np
import rankless_oneflow as flow
import rankless_oneflow.typing as tp

random = np.random.RandomState(0)
ROWS, LABELS = random.randn(9, 4), random.randint(3, size=9).astype("int32")
START = flow.truncated_normal(0.3)
Rows, Labels = tp.Numpy.Placeholder((9, 4), dtype=flow.double), tp.Numpy.Placeholder((9,), dtype=flow.int32)

def encode(rows, trainable=True):
    return flow.layers.dense(rows, 6, flow.nn.relu, kernel_initializer=START, trainable=trainable, name="encoder")

@flow.global_function(type="train")
def pretrain(rows: Rows) -> dict[str, tp.Numpy]:
    decoded = flow.layers.dense(flow.nn.dropout(encode(rows), 0.3), 4, kernel_initializer=START)
    error = flow.reshape((decoded - rows) ** 2, [-1])
    flow.optimizer.Adam(flow.optimizer.CosineScheduler(0.05, 6, alpha=0.1)).minimize(error)
    return {{"error": error, "decoded": decoded}}

@flow.global_function(type="train")
def finetune(rows: Rows, labels: Labels) -> tuple[tp.Numpy, tp.Numpy]:
    logits = flow.layers.dense(encode(rows, trainable=False), 3, kernel_initializer=START, name="head")
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    scheduler = flow.optimizer.PiecewiseConstantScheduler([2], [0.1, 0.01])
    flow.optimizer.SGD(scheduler).minimize([loss, (logits * logits).mean()])
    return logits, loss

def show(*arrays):
    print(*[f"{{np.asarray(array).sum():.10f}}" for array in arrays])

if __name__ == "__main__":
    check_point = flow.train.CheckPoint()
    check_point.init()
    for step in range(4):
        found = pretrain(ROWS)
        show(found["error"], found["decoded"])
    for step in range(3):
        show(*finetune(rows=ROWS[::-1], labels=LABELS[::-1]))
    check_point.save("saved")
    show(*finetune(ROWS, LABELS))
    check_point.load("saved")
    show(*finetune(ROWS, LABELS), pretrain(ROWS)["error"])
    check_point.init()
    show(pretrain(ROWS)["decoded"], *finetune(ROWS, LABELS))
    try:
        finetune(ROWS, LABELS + 3)
    except IndexError:
        show(*finetune(ROWS, LABELS))
"""


@pytest.mark.slow
def test_many_forms_print_the_same_on_one_device_and_on_two(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    one, two = (rankless("run", "-n", count, "train.py", folder=tmp_path) for count in ("1", "2"))
    assert (one.returncode, two.returncode) == (0, 0), two.stdout + two.stderr
    assert len(one.stdout.splitlines()) == 11
    assert two.stdout == one.stdout


@pytest.mark.slow
def test_a_list_for_another_number_of_devices_is_refused(tmp_path: Path):
    text = SCRIPT.partition("def encode")[0] + (
        "settings = flow.function_config()\n"
        "settings.default_logical_view(flow.scope.mirrored_view())\n"
        "@flow.global_function(function_config=settings)\n"
        "def double(rows: tp.ListNumpy.Placeholder((3, 4), dtype=flow.double)) -> tp.ListNumpy:\n"
        "    return rows * 2\n"
        "double(np.split(ROWS, 3))\n"
    )
    (tmp_path / "train.py").write_text(text)
    assert rankless("run", "-n", "1", "train.py", folder=tmp_path).returncode == 0
    done = rankless("run", "-n", "2", "train.py", folder=tmp_path)
    assert done.returncode == 1
    assert "lists of length 2, the number of devices in job 'double'" in done.stderr
    assert "train.py:15" in done.stderr
