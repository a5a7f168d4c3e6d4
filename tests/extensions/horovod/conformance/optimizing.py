"""DistributedOptimizer against one process that sees all batches."""

import copy
import warnings

import horovod.torch as hvd
import torch
from raised import raised
from torch import nn


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 300), nn.Tanh(), nn.Linear(300, 4)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 6, generator=generator, dtype=torch.float64)


def loss_of(made: nn.Module, given: torch.Tensor) -> torch.Tensor:
    return made(given).square().mean()


def reference(
    steps: int, *, factor: float = 1.0, passes: int = 1, kind: type = torch.optim.SGD, **settings: float
) -> nn.Module:
    """What one process gets that sees the batches of all ranks."""
    made = model()
    optimizer = kind(made.parameters(), **settings)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            for rank in range(hvd.size()):
                (loss_of(made, batch(step * passes + number, rank)) * factor / hvd.size()).backward()
        optimizer.step()
    return made


def train(optimizer: torch.optim.Optimizer, made: nn.Module, steps: int, passes: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            loss_of(made, batch(step * passes + number, hvd.rank())).backward()
        optimizer.step()


def assert_same(made: nn.Module, expected: nn.Module) -> None:
    for one, other in zip(made.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def wrapped(made: nn.Module, **options: object) -> torch.optim.Optimizer:
    plain = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(plain, named_parameters=made.named_parameters(), **options)


def check_the_same_training_as_on_one_process():
    """The average of gradients over ranks is stepped with, with whatever optimizer."""
    for kind, settings in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01}),
    ):
        made = model()
        optimizer = hvd.DistributedOptimizer(kind(made.parameters(), **settings), made.named_parameters())
        train(optimizer, made, 4)
        assert_same(made, reference(4, kind=kind, **settings))


def check_options_that_change_no_number():
    """Groups, a predivide factor, names left away, sparse_as_dense: the same training."""
    expected = reference(3, lr=0.1, momentum=0.9)
    for options in (
        {"num_groups": 2},
        {"gradient_predivide_factor": 2.0},
        {"sparse_as_dense": True},
    ):
        made = model()
        train(wrapped(made, **options), made, 3)
        assert_same(made, expected)
    made = model()
    parameters = list(made.parameters())
    train(wrapped(made, groups=[parameters[:2], parameters[3:5]]), made, 3)
    assert_same(made, expected)
    made = model()
    train(hvd.DistributedOptimizer(torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)), made, 3)
    assert_same(made, expected)


def check_sums():
    """op=Sum adds the gradients of all ranks."""
    made = model()
    train(wrapped(made, op=hvd.Sum), made, 2)
    assert_same(made, reference(2, factor=float(hvd.size()), lr=0.1, momentum=0.9))


def check_several_passes_per_step():
    """Gradients of k passes are added, averaged over ranks, and not divided by k; k may change."""
    made = model()
    optimizer = wrapped(made, backward_passes_per_step=2)
    train(optimizer, made, 3, passes=2)
    assert_same(made, reference(3, passes=2, lr=0.1, momentum=0.9))
    optimizer.set_backward_passes_per_step(1)
    train(optimizer, made, 1)
    loss_of(made, batch(0, hvd.rank())).backward()
    raised(AssertionError, lambda: loss_of(made, batch(0, hvd.rank())).backward())
    optimizer.synchronize()


def check_one_pass_too_many():
    """More passes than announced raise."""
    made = model()
    optimizer = wrapped(made)
    loss_of(made, batch(0, hvd.rank())).backward()
    text = raised(AssertionError, lambda: loss_of(made, batch(0, hvd.rank())).backward())
    assert text == (
        "Gradients were computed more than backward_passes_per_step times before call to step(). "
        "Increase backward_passes_per_step to accumulate gradients locally."
    )
    optimizer.synchronize()


def check_zero_grad_at_the_wrong_time():
    """Between backward and step zero_grad raises."""
    made = model()
    optimizer = wrapped(made)
    loss_of(made, batch(0, hvd.rank())).backward()
    text = raised(AssertionError, optimizer.zero_grad)
    assert text == (
        "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
        "optimizer.synchronize(). This is prohibited as it can cause a race condition."
    )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in made.parameters())
    optimizer.zero_grad(set_to_none=False)


def check_clipping_between_synchronize_and_step():
    """synchronize(), change the gradients, step() within skip_synchronize(): the changed ones are stepped with."""
    made, expected = model(), model()
    optimizer = wrapped(made)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for rank in range(hvd.size()):
        (loss_of(expected, batch(0, rank)) / hvd.size()).backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 1e-3)
    plain.step()
    loss_of(made, batch(0, hvd.rank())).backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(made.parameters(), 1e-3)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert_same(made, expected)


def check_a_step_after_synchronize():
    """Without skip_synchronize() it warns, and reduces again."""
    made = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([made], lr=1.0), op=hvd.Sum)
    made.sum().backward()
    optimizer.synchronize()
    assert made.grad.tolist() == [float(hvd.size())] * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [str(one.message) for one in caught] == [
        "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
        "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you "
        "use optimizer.synchronize() in your code."
    ]
    assert made.tolist() == [-float(hvd.size() ** 2)] * 2


def check_a_division_before_the_sum():
    """gradient_predivide_factor f: each rank's gradient times 1/f, the sum times f/size; halves do not overflow."""
    for count in (5, 50_000):
        for factor, expected in ((1.0, float("inf")), (4.0, 40_000.0)):
            made = nn.Parameter(torch.zeros(count, dtype=torch.float16))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([made], lr=0.0), gradient_predivide_factor=factor)
            (made * torch.tensor(40_000.0, dtype=torch.float16)).sum().backward()
            optimizer.synchronize()
            assert made.grad.unique().tolist() == [expected]
    plain = torch.optim.SGD([made], lr=0.0)
    text = raised(ValueError, lambda: hvd.DistributedOptimizer(plain, gradient_predivide_factor=2.0, op=hvd.Sum))
    assert text == "gradient_predivide_factor not supported with op != Average"


def check_parameters_that_get_no_gradient():
    """On a rank whose graph leaves a parameter out, its gradient counts as zero."""
    made = nn.ModuleDict({"used": nn.Linear(3, 3), "rare": nn.Linear(3, 3)}).double()
    hvd.broadcast_parameters(made.state_dict(), root_rank=0)
    before = copy.deepcopy(made["rare"].weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(made.parameters(), lr=1.0), made.named_parameters())
    given = torch.ones(2, 3, dtype=torch.float64)
    output = made["used"](given)
    if hvd.rank() == 0:
        output = made["rare"](output)
    output.sum().backward()
    assert (made["rare"].weight.grad is None) == (hvd.rank() != 0)
    optimizer.step()
    assert made["rare"].weight.grad is not None
    everyones = hvd.allgather(made["rare"].weight.detach().reshape(1, -1))
    assert all(torch.equal(one, everyones[0]) for one in everyones)
    assert not torch.equal(before, made["rare"].weight)


def check_compression_of_gradients():
    """With fp16 gradients travel as halves; parameters stay equal on all ranks."""
    single = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([single], lr=1.0), compression=hvd.Compression.fp16)
    (single * (1.0 + 2**-12)).sum().backward()  # which no half is
    optimizer.step()
    assert single.item() == -1.0
    made = model().float()
    optimizer = wrapped(made, compression=hvd.Compression.fp16)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(made, batch(step, hvd.rank()).float()).backward()
        optimizer.step()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in made.parameters()]).reshape(1, -1)
    everyones = hvd.allgather(flat)
    assert all(torch.equal(one, everyones[0]) for one in everyones)


def check_sparse_gradients():
    """An embedding with sparse gradients trains as on one process, gathered or made dense."""
    for options in ({}, {"sparse_as_dense": True}):
        tables = [nn.Embedding.from_pretrained(torch.ones(6, 2).double(), freeze=False, sparse=True) for _ in range(2)]
        plain = torch.optim.SGD(tables[1].parameters(), lr=0.5)
        for rank in range(hvd.size()):
            (tables[1](torch.tensor([rank, 5])).sum() / hvd.size()).backward()
        plain.step()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(tables[0].parameters(), lr=0.5), tables[0].named_parameters(), **options
        )
        tables[0](torch.tensor([hvd.rank(), 5])).sum().backward()
        optimizer.step()
        torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-13, atol=0)


def check_what_an_optimizer_was_it_stays():
    """It is still an SGD, of that name, and (unlike Horovod's) its state and defaults are kept."""
    made = model()
    plain = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    loss_of(made, batch(0, 0)).backward()
    plain.step()
    plain.zero_grad()
    optimizer = hvd.DistributedOptimizer(plain, made.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.defaults["lr"] == 0.1
    assert len(optimizer.state) == len(list(made.parameters()))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    train(optimizer, made, 1)


def check_adaptive_summation_of_steps():
    """op=Adasum combines what each rank's own step would change."""
    if hvd.size() & (hvd.size() - 1):
        return
    made = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(made.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(made.parameters(), lr=0.5), named_parameters=made.named_parameters(), op=hvd.Adasum
    )
    made(torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(made.weight.detach(), torch.tensor([[0.5, 1.0, 0.0]], dtype=torch.float64))


def check_adaptive_summation_of_steps_with_momentum():
    """op=Adasum is as if one process made the steps of every rank, each with its rank's momentum, and combined them."""
    if hvd.size() & (hvd.size() - 1):
        return
    settings = {"lr": 0.1, "momentum": 0.9}
    made, references = model(), [model() for _ in range(hvd.size())]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(made.parameters(), **settings), made.named_parameters(), op=hvd.Adasum
    )
    plain = [torch.optim.SGD(each.parameters(), **settings) for each in references]
    for step in range(4):
        optimizer.zero_grad()
        loss_of(made, batch(step, hvd.rank())).backward()
        optimizer.step()
        before = [parameter.detach().clone() for parameter in references[0].parameters()]
        for rank, (each, own) in enumerate(zip(references, plain, strict=True)):
            own.zero_grad()
            loss_of(each, batch(step, rank)).backward()
            own.step()
        with torch.no_grad():
            for start, *parameters in zip(before, *(each.parameters() for each in references), strict=True):
                combined = start + in_pairs([parameter - start for parameter in parameters])
                for parameter in parameters:
                    parameter.copy_(combined)
    for found, wanted in zip(made.parameters(), references[0].parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def in_pairs(changes: list[torch.Tensor]) -> torch.Tensor:
    """Neighbours are combined, and then what has become of them: what is common to both is halved in each."""
    while len(changes) > 1:
        changes = [
            one * (1 - (one * two).sum() / (2 * one.square().sum()))
            + two * (1 - (one * two).sum() / (2 * two.square().sum()))
            for one, two in zip(changes[::2], changes[1::2], strict=True)
        ]
    return changes[0]


def check_names():
    """Names must be unique, and there for every parameter."""
    made = model()
    parameters = list(made.parameters())
    plain = torch.optim.SGD(made.parameters(), lr=0.1)
    raised(ValueError, lambda: hvd.DistributedOptimizer(plain, [("same", one) for one in parameters]))
    raised(ValueError, lambda: hvd.DistributedOptimizer(plain, [("only", parameters[0])]))
