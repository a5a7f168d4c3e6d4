"""A job that cannot be one program trains on divided batches as the plain script does."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes import on_mesh
from test_whole_batch import LOSSES, make_batches, make_training, plain_training, split
from torch import Tensor, nn

from rankless.compiler.tracing.replaced_attributes import replace_attributes
from rankless.errors import CaptureError
from rankless.jobs.views.captured import ConsistentView
from rankless.jobs.views.logical import LogicalJobView
from rankless.parallel.mesh import Mesh

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]


def refuse(_view: ConsistentView, _arguments: Any) -> Any:
    raise CaptureError(expected="a program", found="a test", fix="none")


def branch(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    loss = F.smooth_l1_loss(output, x[:, :2])
    return loss if loss.item() > 0.4 else loss + output.square().mean()


def search(model: nn.Module, x: Tensor) -> Tensor:
    step = 1.0
    with torch.no_grad():
        while (model(x * step)).abs().max() > 1 and step > 1e-3:
            step *= 0.7
    return model(x * step).square().mean()


def rows_in_python(model: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([model(row[None]).norm() for row in x if row[0] > -0.5]).mean()


def list_of_lists(model: nn.Module, x: Tensor) -> Tensor:
    names = {tuple(row) for row in (x > 0).tolist()}
    return model(x).square().mean() * len(names)


def with_hook(model: nn.Module, x: Tensor) -> Tensor:
    seen: list[float] = []
    handle = model.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output.abs().max().item()))
    output = model.norm(model(x))
    handle.remove()
    return output.square().mean() * seen[0]


ALL = [*LOSSES, branch, search, rows_in_python, list_of_lists, with_hook]


def train(mesh: Mesh, loss: Any, is_forced: bool) -> Any:
    model, job, notices = make_training(mesh, loss, captured=True)
    changes = [(ConsistentView, "compute", refuse)] if is_forced else []
    with replace_attributes(*changes):
        results = [job(split(batch, mesh)) for batch in make_batches()]
    losses = [result["loss"] if isinstance(result, dict) else result for result in results]
    return losses, model.state_dict(), notices, isinstance(job._views.view, LogicalJobView)


def require_same(found: Any, loss: Any) -> None:
    losses, state = plain_training(loss)
    found_losses, found_state, *_ = found
    for one, other in zip(found_losses, losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert found_state.keys() == state.keys()
    for name in state:
        torch.testing.assert_close(found_state[name], state[name], rtol=1e-10, atol=1e-12)


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("loss", ALL, ids=lambda loss: loss.__name__)
def test_the_functions_of_a_job_train_as_the_plain_script(loss: Any, size: int) -> None:
    for found in on_mesh(size, train, loss, True):
        require_same(found, loss)
        assert found[3]
        assert "run one by one on divided batches" in found[2][0]


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("loss", [branch, search])
def test_a_job_that_reads_a_value_to_branch_runs_by_itself(loss: Any) -> None:
    for found in on_mesh(2, train, loss, False):
        require_same(found, loss)
        assert found[3]
        assert sum("cannot be one program" in notice for notice in found[2]) == 1


def differentiate(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def call_refused(mesh: Mesh) -> list[str]:
    """Return the notices of a job that one device refuses too."""
    _, job, notices = make_training(mesh, differentiate, captured=True)
    with pytest.raises(CaptureError, match=r"found:    backward\(\) inside the job"):
        job(split(make_batches()[0], mesh))
    return list(notices)


def test_a_job_that_one_device_refuses_gets_no_notice() -> None:
    assert on_mesh(2, call_refused) == [[], []]
