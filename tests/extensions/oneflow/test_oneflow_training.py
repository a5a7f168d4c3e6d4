"""A script in OneFlow's style trains as the same model does in plain PyTorch: in both views, on several devices."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import rankless_oneflow as flow
import rankless_oneflow.typing as tp
import torch
import torch.nn.functional as F
from support.hosts import two_hosts
from support.oneflow import PACKAGE
from support.warm_runs import rankless as rankless_command

import rankless

SCRIPT = """
import numpy as np
import oneflow as flow
import oneflow.typing as tp

VIEW, DEVICES, PARTS, MACHINES = {view!r}, {devices}, {parts}, {machines!r}
KIND = tp.ListNumpy if VIEW == "mirrored" else tp.Numpy
SIZE = 12 // PARTS if VIEW == "mirrored" else 12
settings = flow.function_config()
settings.default_data_type(flow.double)
settings.default_logical_view(getattr(flow.scope, VIEW + "_view")())

def network(images):
    start = flow.truncated_normal(0.2)
    hidden = flow.layers.conv2d(images, 6, 3, strides=2, padding="SAME", activation=flow.nn.relu, name="conv1")
    hidden = flow.nn.max_pool2d(hidden, ksize=3, strides=2, padding="SAME", name="pool1")
    rows = flow.reshape(hidden, [hidden.shape[0], -1])
    rows = flow.layers.dense(rows, 20, activation=flow.nn.relu, kernel_initializer=start, name="dense1")
    return flow.layers.dense(rows, 5, kernel_initializer=start, name="dense2")

@flow.global_function(type="train", function_config=settings)
def train_job(
    images: KIND.Placeholder((SIZE, 1, 10, 10), dtype=flow.double),
    labels: KIND.Placeholder((SIZE,), dtype=flow.int32),
) -> KIND:
    loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, network(images), name="softmax_loss")
    flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([2], [0.1, 0.02]), momentum={momentum}).minimize(loss)
    return loss

@flow.global_function(type="predict", function_config=settings)
def predict_job(images: KIND.Placeholder((SIZE, 1, 10, 10), dtype=flow.double)) -> KIND:
    return network(images)

def divide(array):
    return list(np.split(array, PARTS)) if VIEW == "mirrored" else array

def join(result):
    return np.concatenate(result) if VIEW == "mirrored" else result

if __name__ == "__main__":
    flow.config.gpu_device_num(DEVICES)
    flow.env.ctrl_port(9955)
    if MACHINES:
        flow.env.machine([{{"addr": address}} for address in MACHINES])
    check_point = flow.train.CheckPoint()
    check_point.init()
    check_point.save("initial")
    random = np.random.RandomState(0)
    losses = []
    for step in range(5):
        images, labels = random.randn(12, 1, 10, 10), random.randint(5, size=12).astype("int32")
        losses.append(join(train_job(divide(images), divide(labels))))
    logits = join(predict_job(divide(images)))
    check_point.save("final")
    np.savez("found.npz", losses=losses, logits=logits)
"""


class Variable:
    """A variable of a checkpoint."""

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = torch.nn.Parameter(state["value"].clone())


def read_variables(folder: Path) -> dict[str, torch.nn.Parameter]:
    names = [f"{layer}-{part}" for layer in ("conv1", "dense1", "dense2") for part in ("weight", "bias")]
    variables = {name: Variable() for name in names}
    rankless.load(folder, random=False, **variables)
    return {name: each.value for name, each in variables.items()}


def network(variables: dict[str, torch.nn.Parameter], images: torch.Tensor) -> torch.Tensor:
    """The same model, with OneFlow's padding written out: an odd row is added before."""
    hidden = F.conv2d(F.pad(images, (1, 0, 1, 0)), variables["conv1-weight"], variables["conv1-bias"], stride=2)
    hidden = F.max_pool2d(F.pad(hidden.relu(), (1, 1, 1, 1), value=-torch.inf), 3, 2)
    rows = F.linear(hidden.flatten(1), variables["dense1-weight"], variables["dense1-bias"]).relu()
    return F.linear(rows, variables["dense2-weight"], variables["dense2-bias"])


def train_plainly(variables: dict[str, torch.nn.Parameter], momentum: float) -> tuple[list[np.ndarray], np.ndarray]:
    """OneFlow's momentum contains the learning rate of its time."""
    velocities = {name: torch.zeros_like(each) for name, each in variables.items()}
    random = np.random.RandomState(0)
    losses = []
    for step in range(5):
        images, labels = random.randn(12, 1, 10, 10), random.randint(5, size=12)
        loss = F.cross_entropy(network(variables, torch.tensor(images)), torch.tensor(labels), reduction="none")
        losses.append(loss.detach().numpy())
        gradients = torch.autograd.grad(loss.mean(), list(variables.values()))
        for (name, variable), gradient in zip(variables.items(), gradients, strict=True):
            velocities[name] = momentum * velocities[name] - (0.1 if step <= 2 else 0.02) * gradient
            variable.data += velocities[name]
    return losses, network(variables, torch.tensor(images)).detach().numpy()


def require_same_training(folder: Path, momentum: float) -> None:
    """Compare what a run has left in a folder with the training of plain PyTorch from the same initial values."""
    found = np.load(folder / "found.npz")
    variables = read_variables(folder / "initial")
    assert variables["dense1-weight"].std() > 0.1
    losses, logits = train_plainly(variables, momentum)
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-12)
    np.testing.assert_allclose(found["logits"], logits, rtol=1e-10)
    for name, value in read_variables(folder / "final").items():
        torch.testing.assert_close(value.data, variables[name].data, rtol=1e-11, atol=1e-14)


def write_script(folder: Path, view: str, devices: int, momentum: float, machines: tuple[str, ...] = ()) -> None:
    parts = max(devices * max(len(machines), 1), 2)
    text = SCRIPT.format(view=view, devices=devices, parts=parts, momentum=momentum, machines=machines)
    (folder / "train.py").write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("view", "devices", "momentum"),
    [
        ("consistent", 2, 0),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("consistent", 1, 0.9),
                ("consistent", 2, 0.9),
                ("consistent", 3, 0),
                ("mirrored", 1, 0),
                ("mirrored", 2, 0),
            )
        ),
    ],
)
def test_plain_python_makes_the_training_of_plain_pytorch(
    view: str, devices: int, momentum: float, oneflow_python: Path, tmp_path: Path
):
    write_script(tmp_path, view, devices, momentum)
    done = subprocess.run([oneflow_python, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (f"{devices} workers" in done.stderr) == (devices > 1)
    require_same_training(tmp_path, momentum)


@pytest.mark.slow
def test_rankless_run_makes_the_training_of_plain_pytorch_in_the_mirrored_view(tmp_path: Path):
    write_script(tmp_path, "mirrored", 2, 0.9)
    text = (tmp_path / "train.py").read_text().replace("oneflow", "rankless_oneflow")
    (tmp_path / "train.py").write_text(f"import sys\nsys.path.insert(0, {str(PACKAGE / 'source')!r})\n{text}")
    done = rankless_command("run", "-n", "2", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    require_same_training(tmp_path, 0.9)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("view", ["consistent", "mirrored"])
def test_plain_python_on_two_machines_makes_the_training_of_plain_pytorch(
    view: str, oneflow_python: Path, tmp_path: Path
):
    with two_hosts(tmp_path) as hosts:
        write_script(tmp_path, view, 1, 0, hosts.addresses)
        other = hosts.start("b", [oneflow_python, "train.py"], cwd=tmp_path)
        first = hosts.run("a", [oneflow_python, "train.py"], cwd=tmp_path, seconds=300)
        assert first.returncode == 0, first.stderr
        assert other.wait(timeout=60) == 0
    require_same_training(tmp_path, 0)


SCHEDULES = {
    "piecewise": (
        lambda: flow.optimizer.PiecewiseConstantScheduler([1, 3], [0.1, 0.01, 0.5]),
        [0.1, 0.1, 0.01, 0.01, 0.5],
    ),
    "cosine": (
        lambda: flow.optimizer.CosineScheduler(0.1, steps=4, alpha=0.2),
        [0.1 * (0.8 * 0.5 * (1 + np.cos(np.pi * min(step, 4) / 4)) + 0.2) for step in range(5)],
    ),
}


def plain_adam(corrects: bool):
    state = {"mean": 0.0, "square": 0.0, "step": 0}

    def step(value: np.ndarray, gradient: np.ndarray, rate: float) -> np.ndarray:
        state["step"] += 1
        state["mean"] = 0.9 * state["mean"] + 0.1 * gradient
        state["square"] = 0.999 * state["square"] + 0.001 * gradient**2
        mean, square = state["mean"], state["square"]
        if corrects:
            mean, square = mean / (1 - 0.9 ** state["step"]), square / (1 - 0.999 ** state["step"])
        return value - rate * mean / (np.sqrt(square) + 1e-8)

    return step


OPTIMIZERS = {
    "sgd": (
        lambda rates: flow.optimizer.SGD(rates, momentum=0),
        lambda: lambda value, slope, rate: value - rate * slope,
    ),
    "adam": (lambda rates: flow.optimizer.Adam(rates), lambda: plain_adam(False)),
    "corrected adam": (lambda rates: flow.optimizer.Adam(rates, do_bias_correction=True), lambda: plain_adam(True)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_and_schedules_are_those_of_their_formulas(optimizer: str, schedule: str):
    make_schedule, rates = SCHEDULES[schedule]
    make, make_step = OPTIMIZERS[optimizer]

    @flow.global_function(type="train")
    def train(rows: tp.Numpy.Placeholder((4, 3), dtype=flow.double)) -> tp.Numpy:
        out = flow.layers.dense(
            rows, 1, use_bias=False, kernel_initializer=flow.random_uniform_initializer(0.5, 1.5), name="line"
        )
        make(make_schedule()).minimize(out * out)
        return out

    flow.train.CheckPoint().init()
    random, weight, step = np.random.RandomState(2), None, make_step()
    for rate in rates:
        rows = random.randn(4, 3)
        found = train(rows)
        if weight is None:
            weight = np.linalg.lstsq(np.vstack([rows[:3]]), found[:3], rcond=None)[0]
        np.testing.assert_allclose(found, rows @ weight, rtol=1e-9)
        weight = step(weight, 2 * rows.T @ (rows @ weight) / 4, rate)
