"""Checks training on several ranks: `rankless horovodrun -np 2 python -m rankless.extensions.horovod.selftest -v`.

Every rank runs every check with the public API alone. Rank 0 collects the faults of all ranks, and prints a line for
each.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import rankless.extensions.horovod.torch as hvd
from rankless.extensions.horovod.exceptions import HorovodInternalError

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
SAMPLES = 24
"""Per rank."""
BATCH = 6
EPOCHS = 6
FEATURES = 10
CLASSES = 3

Faults = Iterator[str]
"""The faults that a rank finds."""


def rank_and_size() -> Faults:
    """Check that each rank exists once, and that all agree on the size."""
    positions = hvd.allgather_object((hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank()))
    if [position[0] for position in positions] != list(range(hvd.size())):
        yield f"ranks {[position[0] for position in positions]} of {hvd.size()}"
    if len({position[1] for position in positions}) != 1:
        yield f"sizes {[position[1] for position in positions]}"
    if not 0 <= hvd.local_rank() < hvd.local_size() <= hvd.size() or not 0 <= hvd.cross_rank() < hvd.cross_size():
        yield f"local rank {hvd.local_rank()} of {hvd.local_size()}, cross rank {hvd.cross_rank()}/{hvd.cross_size()}"
    if len({(local, cross) for _, _, local, cross in positions}) != hvd.size():
        yield f"two ranks have one place: {positions}"


def sums_of_every_dtype() -> Faults:
    """Check that sums and averages are exact, for small and large tensors, which use different backends."""
    total = sum(range(1, hvd.size() + 1))
    largest = hvd.size() * max(hvd.size() - 1, total)
    for dtype in DTYPES:
        if not dtype.is_floating_point and torch.iinfo(dtype).max < largest:
            continue
        for length in (3, 100_000):
            ones = torch.ones(length, dtype=dtype)
            found = hvd.allreduce(ones * (hvd.rank() + 1), op=hvd.Sum, name=f"sum.{dtype}.{length}")
            if found.dtype is not dtype or not torch.equal(found, ones * total):
                yield f"the sum of {length} {dtype} is {found[:3].tolist()}, expected {total}"
            mean = hvd.allreduce(ones * (2 * hvd.rank()), op=hvd.Average, name=f"average.{dtype}.{length}")
            if not torch.equal(mean, ones * (hvd.size() - 1)):
                yield f"the average of {length} {dtype} is {mean[:3].tolist()}, expected {hvd.size() - 1}"


def gathering_and_sending() -> Faults:
    """Check allgather of uneven rows, broadcast from each rank, and alltoall with splits."""
    rank, size = hvd.rank(), hvd.size()
    rows = torch.full((rank + 1, 2), rank)
    expected = torch.cat([torch.full((other + 1, 2), other) for other in range(size)])
    if not torch.equal(hvd.allgather(rows, name="rows"), expected):
        yield "allgather of uneven rows"
    for root in range(size):
        if hvd.broadcast(torch.tensor([rank * 7]), root, name=f"from.{root}").item() != root * 7:
            yield f"broadcast from rank {root}"
    splits = torch.arange(1, size + 1, dtype=torch.int32)
    received, counts = hvd.alltoall(torch.full((int(splits.sum()),), rank), splits=splits, name="all to all")
    if counts.tolist() != [rank + 1] * size or received.tolist() != [o for o in range(size) for _ in range(rank + 1)]:
        yield f"alltoall gave {received.tolist()}, in {counts.tolist()}"


def mismatches_are_errors() -> Faults:
    """Check that tensors that do not match raise an error on every rank, and that later operations work."""
    if hvd.size() > 1:
        try:
            hvd.allreduce(torch.ones(3 + (hvd.rank() == 1)), name="does not fit")
            yield "shapes that do not fit were reduced"
        except HorovodInternalError as error:
            if "Mismatched ALLREDUCE tensor shapes" not in str(error):
                yield f"another error than the documented one: {error}"
    if hvd.allreduce(torch.ones(1), op=hvd.Sum, name="afterwards").item() != hvd.size():
        yield "nothing works after an error"


def broadcast_makes_all_equal() -> Faults:
    """Check that models and optimizers which differ are equal to rank 0's after the broadcasts."""
    model, optimizer = _make_divergent_training()
    cross_entropy(model(torch.randn(4, FEATURES).double()), torch.randint(CLASSES, (4,))).backward()
    optimizer.step()
    before = hvd.allgather_object(_model_bytes(model))
    if hvd.size() > 1 and len(set(before)) == 1:
        yield "the models were equal before the broadcast: nothing is shown"
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if set(hvd.allgather_object(_model_bytes(model))) != {before[0]}:
        yield "parameters differ after broadcast_parameters"
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    states = hvd.allgather_object((_join_bytes(momenta), [group["lr"] for group in optimizer.param_groups]))
    if any(state != states[0] for state in states):
        yield "optimizer states differ after broadcast_optimizer_state"


def every_rank_sees_other_data() -> Faults:
    """Check that a DistributedSampler gives each sample to one rank, in a new order after each set_epoch."""
    sampler = _make_sampler(SAMPLES * hvd.size())
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        shares = hvd.allgather_object(list(sampler))
        if sorted(index for share in shares for index in share) != list(range(SAMPLES * hvd.size())):
            yield f"epoch {epoch}: the ranks' shares are not each sample once"
        orders.append(shares)
    if orders[0] == orders[1]:
        yield "both epochs have one order"


def training_stays_together() -> Faults:
    """Check that parameters are equal on all ranks after each step, and equal to the training of one process."""
    data = _make_dataset()
    sampler = _make_sampler(len(data))
    model, optimizer = _make_divergent_training()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    reference_model = copy.deepcopy(model)
    reference = torch.optim.SGD(reference_model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        loss_sum = 0.0
        for inputs, labels in DataLoader(data, batch_size=BATCH, sampler=sampler):
            loss = _step(model, optimizer, inputs, labels)
            _step(
                reference_model, reference, hvd.allgather(inputs, name="inputs"), hvd.allgather(labels, name="labels")
            )
            if len(set(hvd.allgather_object(_model_bytes(model)))) != 1:
                yield f"parameters differ between ranks after a step of epoch {epoch}"
                return
            loss_sum += loss
        losses.append(hvd.allreduce(torch.tensor(loss_sum), name="loss").item() / (SAMPLES // BATCH))
    for own, expected in zip(model.parameters(), reference_model.parameters(), strict=True):
        if not torch.allclose(own, expected, rtol=1e-9, atol=1e-12):
            yield f"parameters are {(own - expected).abs().max():.1e} away from those of one process"
    yield from _check_losses(losses)


def _check_losses(losses: Sequence[float]) -> Faults:
    """Check that the mean losses of the epochs are the same on all ranks, and fall."""
    if hvd.allgather_object(losses) != [losses] * hvd.size():
        yield "the ranks have different mean losses"
    text = ", ".join(f"{loss:.3f}" for loss in losses)
    if not all(loss == loss and loss < 2 * losses[0] for loss in losses) or losses[-1] > 0.5 * losses[0]:
        yield f"the mean losses of the epochs do not fall steadily: {text}"


def _step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor
) -> float:
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def _make_divergent_training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer that differ on each rank."""
    torch.manual_seed(1 + hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1 if hvd.rank() == 0 else 0.2, momentum=0.9)


def _make_dataset() -> TensorDataset:
    """Return samples that a small model can classify, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(SAMPLES * hvd.size()) % CLASSES
    centres = 2 * torch.randn(CLASSES, FEATURES, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(centres[labels] + noise, labels)


def _make_sampler(length: int) -> "DistributedSampler[int]":
    return DistributedSampler(range(length), num_replicas=hvd.size(), rank=hvd.rank())  # type: ignore[arg-type]  # it only needs a length


def _model_bytes(model: torch.nn.Module) -> bytes:
    return _join_bytes(list(model.parameters()))


def _join_bytes(tensors: Sequence[torch.Tensor]) -> bytes:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy().tobytes()


CHECKS: tuple[Callable[[], Faults], ...] = (
    rank_and_size,
    sums_of_every_dtype,
    gathering_and_sending,
    mismatches_are_errors,
    broadcast_makes_all_equal,
    every_rank_sees_other_data,
    training_stays_together,
)


def main(arguments: Sequence[str]) -> int:
    """Run all checks, and return the exit code: 0 if no rank finds a fault."""
    parser = argparse.ArgumentParser(prog="selftest", description="Check that distributed training works here.")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print a line for each check, not only for those that fail"
    )
    verbose = parser.parse_args(arguments).verbose
    hvd.init()
    failed = 0
    for check in CHECKS:
        found = hvd.allgather_object(list(check()))
        faults = [f"rank {rank}: {fault}" for rank, some in enumerate(found) for fault in some]
        failed += bool(faults)
        if hvd.rank() == 0 and (verbose or faults):
            name = check.__name__.replace("_", " ")
            print("\n    ".join([f"{'FAIL' if faults else 'PASS'}  {name}", *faults]), flush=True)
    if hvd.rank() == 0:
        processes = "1 process" if hvd.size() == 1 else f"{hvd.size()} processes"
        print(f"{len(CHECKS) - failed} of {len(CHECKS)} checks passed on {processes}", flush=True)
    hvd.shutdown()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
