"""What DistributedOptimizer keeps of the optimizer, what it rejects, and how it works with the rest of PyTorch."""

import gc
import warnings

import pytest
import torch
from support.horovod_ranks import error_of, on_ranks
from torch import nn


def kept(hvd):
    own = nn.Linear(3, 2)
    plain = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    own(torch.ones(1, 3)).sum().backward()
    plain.step()
    plain.zero_grad()
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    calls = []
    plain.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer = hvd.DistributedOptimizer(plain, own.named_parameters())
    own(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    state = len(optimizer.state)
    loaded = optimizer.state_dict()
    optimizer.load_state_dict(loaded)
    own(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state is plain.state
    return (
        type(optimizer).__name__,
        type(optimizer).__module__,
        isinstance(optimizer, torch.optim.SGD),
        isinstance(optimizer, type(plain)),
        state,
        optimizer.defaults["lr"],
        optimizer.param_groups[0]["lr"],
        calls,
        repr(optimizer).startswith("SGD"),
        hvd.DistributedOptimizer.__module__,
    )


def test_name_class_state_defaults_schedule_and_hooks_are_kept():
    expected = (
        "SGD",
        "horovod.torch.optimizer",
        True,
        True,
        2,
        0.1,
        0.05,
        ["before", "before"],
        True,
        "horovod.torch.optimizer",
    )
    assert on_ranks(2, kept) == [expected] * 2


def names_refused(hvd):
    own = nn.Linear(3, 2)
    pairs = list(own.named_parameters())
    plain = torch.optim.SGD(own.parameters(), lr=0.1)
    parameter = pairs[0][1]

    def refused(**switches):
        return error_of(lambda: hvd.DistributedOptimizer(plain, **switches))

    found = [
        refused(named_parameters=own.parameters()),
        refused(named_parameters=[("x", value) for _, value in pairs]),
        refused(named_parameters=pairs[:1]),
        refused(gradient_predivide_factor=2.0, op=hvd.Sum),
        refused(groups=-1),
        refused(groups=[[1]]),
        refused(groups=[[parameter], [parameter]]),
    ]
    assert found[2][1].endswith(str(id(pairs[1][1])))
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(plain, num_groups=1)
    return [(kind, text.partition("Python object ids")[0]) for kind, text in found]


def test_invalid_names_and_switches_are_rejected():
    texts = [
        "named_parameters should be a sequence of tuples (name, parameter), "
        "usually produced by model.named_parameters().",
        "Parameter names in named_parameters must be unique. Found duplicates: x",
        "named_parameters was specified, but one or more model parameters were not named. ",
        "gradient_predivide_factor not supported with op != Average",
        "groups should be a non-negative integer or a list of list of torch.Tensor.",
        "groups must consist of torch.Tensor.",
        "A parameter can only appear once in groups.",
    ]
    assert on_ranks(2, names_refused) == [[("ValueError", text) for text in texts]] * 2


def default_names(hvd):
    if hvd.rank() == 1:
        return [hvd.allreduce(torch.zeros(2 + group), name=f"allreduce.noname.{group}.0").tolist() for group in (0, 1)]
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    groups = [{"params": [first]}, {"params": [second], "lr": 0.5}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0))
    (first.sum() + second.sum()).backward()
    optimizer.step()
    return first.tolist(), second.tolist()


def test_parameters_without_names_are_named_by_group_and_index():
    first, second = on_ranks(2, default_names)
    assert first == ([-0.5] * 2, [-0.25] * 3)
    assert second == [[0.5] * 2, [0.5] * 3]


def zeroing(hvd):
    own = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(own.parameters(), lr=0.1), own.named_parameters())
    own(torch.ones(1, 2)).sum().backward()
    early = error_of(optimizer.zero_grad)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    zeros = own.weight.grad.tolist()
    optimizer.zero_grad(set_to_none=True)
    return early, zeros, own.weight.grad


def test_zero_grad_is_rejected_while_gradients_are_being_reduced():
    text = (
        "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
        "optimizer.synchronize(). This is prohibited as it can cause a race condition."
    )
    assert on_ranks(2, zeroing) == [(("AssertionError", text), [[0.0, 0.0]], None)] * 2


def clipped(hvd):
    own = nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0))
    (own * (hvd.rank() + 1) * 10).sum().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_([own], 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.skip_synchronize():
            optimizer.step()
    torch.testing.assert_close(own.data, torch.full((4,), -1.0))
    optimizer.zero_grad()
    (own * (hvd.rank() + 1)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()
    torch.testing.assert_close(own.data, torch.full((4,), -2.5))


def test_gradients_are_clipped_between_synchronize_and_step():
    on_ranks(2, clipped)


def closed(hvd):
    own = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0))

    def closure():
        optimizer.zero_grad()
        loss = (own * (hvd.rank() + 1)).sum() + hvd.rank()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(2)]
    return losses, own.tolist()


def test_gradients_that_a_closure_computes_are_reduced():
    # Of -1.5 for each step the first rank's loss is twice, the second's four times as much.
    assert on_ranks(2, closed) == [([0.0, -3.0], [-3.0, -3.0]), ([1.0, -5.0], [-3.0, -3.0])]


def scaled(hvd):
    own = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((own * (hvd.rank() + 1)).sum()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return own.tolist()


def test_a_gradient_scaler_works_with_synchronize():
    assert on_ranks(2, scaled) == [[-3.0, -3.0]] * 2


def compiled(hvd):
    torch.manual_seed(0)
    own = nn.Linear(3, 1).double()
    start = own.weight.detach().clone()
    step = torch.compile(own, backend="eager")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(own.parameters(), lr=1.0), own.named_parameters())
    step(torch.ones(2, 3, dtype=torch.float64) * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(own.weight.data, start - 3.0)


@pytest.mark.slow
def test_a_compiled_model_is_trained_too():
    on_ranks(2, compiled)


def wrapped_again(hvd):
    own = nn.Parameter(torch.zeros(2))
    for _ in range(2):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0))
        optimizer.zero_grad()
        own.sum().backward()
        optimizer.step()
        del optimizer
        gc.collect()
    return own.tolist()


def test_hooks_are_removed_with_their_optimizer():
    assert on_ranks(2, wrapped_again) == [[-2.0, -2.0]] * 2


def after_a_mismatch(hvd):
    own = nn.Parameter(torch.zeros(2 + hvd.rank()))
    other = nn.Parameter(torch.zeros(2))
    named = [("own", own), ("other", other)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own, other], lr=1.0), named)
    (own.sum() + other.sum()).backward()
    failed = error_of(optimizer.step)
    own.data = torch.zeros(2)
    optimizer.zero_grad()
    (own.sum() + other.sum()).backward()
    optimizer.step()
    return failed, own.tolist()


def test_an_optimizer_can_continue_after_a_failed_step():
    text = (
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2], "
        "but another rank sent a tensor of shape [3]. "
        "Operation allreduce.own: the first is rank 0, the other rank 1."
    )
    assert on_ranks(2, after_a_mismatch) == [(("HorovodInternalError", text), [-1.0, -1.0])] * 2


def joined(hvd):
    own = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    wide = nn.Parameter(torch.zeros(300, 300, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own, wide], lr=1.0))
    for _ in range(1 if hvd.rank() == 0 else 3):
        optimizer.zero_grad()
        ((own.sum() + wide.sum()) * (hvd.rank() + 1)).backward()
        optimizer.step()
    last = hvd.join()
    hvd.broadcast_parameters([own, wide], root_rank=last)
    return last, own.tolist(), wide.unique().tolist()


def test_a_rank_with_fewer_batches_joins_and_gets_the_result():
    # 1.5 together, then twice 2 / 2 of rank 1 alone.
    assert on_ranks(2, joined) == [(1, [-3.5, -3.5], [-3.5])] * 2


def interrupted(hvd):
    own = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0))
    (own * 3).sum().backward()
    if hvd.rank() == 0:
        hvd.shutdown()
        failed = None
    else:
        failed = error_of(optimizer.step)
        hvd.shutdown()
    hvd.init()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    (own * (hvd.rank() + 1)).sum().backward()
    optimizer.step()
    return failed and failed[0], own.tolist()


def test_an_optimizer_outlives_a_shutdown():
    first, second = on_ranks(2, interrupted)
    assert first == (None, [-1.5, -1.5])
    # Rank 0 may have left after the gradients had come together: then the step has been made.
    assert second in (("HorovodInternalError", [-1.5, -1.5]), (None, [-4.5, -4.5]))


def alone(hvd):
    own = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0), op=hvd.Adasum)
    own.sum().backward()
    optimizer.step()
    optimizer.synchronize()
    return own.tolist(), hvd.size()


def test_one_process_is_its_own_job():
    assert on_ranks(1, alone) == [([-1.0, -1.0], 1)]
