"""Measures lookups and steps of a table and of `nn.Embedding(sparse=True)`, in turns."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.pairs import measure
from rankless.parameter_server import Embedding

ROWS = 400_000
PAIRS = 9
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "step_sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "step_adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
    "step_sparse_adam": lambda parameters: torch.optim.SparseAdam(parameters, 0.01),
}


def make_call(embedding: nn.Module, part: str, batches: list[torch.Tensor]) -> Callable[[], None]:
    """Return a function that reads or steps the next batch."""
    optimizer = None if part == "read" else OPTIMIZERS[part](list(embedding.parameters()))
    state = {"next": 0}

    def call() -> None:
        batch = batches[state["next"] % len(batches)]
        state["next"] += 1
        if optimizer is None:
            with torch.no_grad():
                embedding(batch)
            return
        embedding(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def seconds_per_call(call: Callable[[], None], calls: int) -> float:
    """Return the seconds of one call, on average."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("ids", type=int)
    parser.add_argument("dim", type=int)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    table, plain = Embedding(arguments.dim), nn.Embedding(ROWS, arguments.dim, sparse=True)
    # So that all rows exist, and are in the same order in memory as the peer's.
    optimizer = torch.optim.SGD(table.parameters(), 0.0)
    for ids in torch.arange(ROWS).split(ROWS // 4):
        table(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    batches = [torch.randint(ROWS, (arguments.ids,)) for _ in range(16)]
    ours, peer = (make_call(module, arguments.part, batches) for module in (table, plain))
    calls = max(3, 100_000 // arguments.ids)
    times = measure(lambda: seconds_per_call(ours, calls), lambda: seconds_per_call(peer, calls), pairs=PAIRS)
    Path("times.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main()
