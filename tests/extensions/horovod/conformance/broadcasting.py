"""Broadcasts of parameters, optimizer state and objects, and the state of elastic training."""

from itertools import chain

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HostsUpdatedInterrupt
from raised import raised
from torch import nn


def check_parameters():
    """broadcast_parameters takes a state_dict or a list of names with tensors."""
    for root in (0, hvd.size() - 1):
        torch.manual_seed(hvd.rank())
        made = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).double()
        torch.manual_seed(root)
        expected = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).double().state_dict()
        hvd.broadcast_parameters(made.state_dict(), root_rank=root)
        assert all(torch.equal(value, expected[name]) for name, value in made.state_dict().items())
    torch.manual_seed(hvd.rank())
    made = nn.Linear(4, 5)
    torch.manual_seed(0)
    hvd.broadcast_parameters(made.named_parameters(), root_rank=0)
    assert torch.equal(made.weight, nn.Linear(4, 5).weight)
    raised(ValueError, lambda: hvd.broadcast_parameters(5, root_rank=0))


def check_optimizer_state_before_and_after_wrapping():
    """broadcast_optimizer_state gives all ranks rank 0's state and settings."""
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
        for wraps in (False, True):
            made = nn.Linear(3, 2).double()
            hvd.broadcast_parameters(made.state_dict(), root_rank=0)
            settings = {"momentum": 0.5} if kind is torch.optim.SGD else {}
            plain = kind(made.parameters(), lr=0.1 * (hvd.rank() + 1), **settings)
            if hvd.rank() == 0:
                made(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
                plain.step()
                plain.zero_grad()
            hvd.broadcast_parameters(made.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(plain, made.named_parameters()) if wraps else plain
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            assert optimizer.param_groups[0]["lr"] == 0.1, kind
            states = hvd.allgather_object(optimizer.state_dict())
            assert len(states[-1]["state"]) == 2, kind  # of rank 0, the only one that has stepped
            for state in states:
                assert state["param_groups"] == states[0]["param_groups"]
                for number, values in state["state"].items():
                    for name, value in values.items():
                        first = states[0]["state"][number][name]
                        assert torch.equal(value, first) if isinstance(value, torch.Tensor) else value == first


def check_lbfgs_is_refused():
    """Its state cannot be sent around."""
    optimizer = torch.optim.LBFGS(nn.Linear(2, 2).parameters())
    text = raised(ValueError, lambda: hvd.broadcast_optimizer_state(optimizer, root_rank=0))
    assert text == "cannot broadcast torch.optim.LBFGS state"


def check_objects():
    """broadcast_object and allgather_object take whatever can be pickled, of any size."""
    given = {"rank": hvd.rank(), "text": "x" * (1000 * hvd.rank())}
    assert hvd.broadcast_object(given, root_rank=1) == {"rank": 1, "text": "x" * 1000}
    assert [one["rank"] for one in hvd.allgather_object(given)] == list(range(hvd.size()))


def check_a_sampler():
    """torch's DistributedSampler with hvd.size() and hvd.rank() gives every rank other data, anew each epoch."""
    data = list(range(20))
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        everyones = hvd.allgather_object(list(sampler))
        assert set().union(*everyones) == set(data)
        orders.append(everyones)
    assert orders[0] != orders[1]


def skips_of(state: hvd.elastic.TorchState) -> bool | None:
    """Whether the interrupt at a commit says that nothing need be sent; None without one."""
    try:
        state.commit()
    except HostsUpdatedInterrupt as interrupt:
        return interrupt.skip_sync
    return None


def check_news_of_hosts_are_rank_0s():
    """check_host_updates() uses the changes that rank 0 received: all ranks are interrupted, or none."""
    for update, skips in ((1, True), (2, False)):  # gone, come
        state = hvd.elastic.TorchState(batch=0)
        if hvd.rank() != 0:
            state.on_hosts_updated(1, update)
        state.commit()
        if hvd.rank() == 0:
            state.on_hosts_updated(1, update)
        assert skips_of(state) is skips
        state.commit()  # reported once


def check_an_elastic_function_begins_with_rank_0s_state():
    """hvd.elastic.run() sends the state around, calls the function, and calls it again from the last commit."""
    made = nn.Linear(2, 1)
    with torch.no_grad():
        made.weight.fill_(float(hvd.rank() + 1))
    state = hvd.elastic.TorchState(model=made, batch=10 * hvd.rank())
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState, given: str) -> str:
        assert state.model.weight.unique().tolist() == [1.0]
        if not resets:
            assert state.batch == 0
            state.batch = 5
            state.commit()
            state.batch = 6
            hvd.allreduce(torch.ones(2 + (hvd.rank() == 0)), name="interrupted")  # raises on all ranks
        return f"{given} {state.batch}"

    assert train(state, "at") == "at 5"
    assert resets == [hvd.size()]


def check_an_elastic_sampler():
    """Ranks share out what is left of an epoch; a batch counts for all of them."""
    sampler = hvd.elastic.ElasticSampler(list(range(10 * hvd.size())), shuffle=True, seed=1)
    everyones = hvd.allgather_object(list(sampler))
    assert sorted(chain(*everyones)) == list(range(10 * hvd.size()))
    sampler.record_batch(0, 4)
    sampler.reset()
    rest = hvd.allgather_object(list(sampler))
    assert set(chain(*rest)) == set(chain(*(one[4:] for one in everyones)))
    sampler.set_epoch(1)
    assert hvd.allgather_object(list(sampler)) != everyones
    assert len(sampler) == 10
