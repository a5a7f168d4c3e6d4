"""An embedding by a table and a plain one, in the same training."""

from collections.abc import Callable, Iterable

import torch
from support.devices import DEVICE
from torch import Tensor, nn

from rankless.parameter_server import Embedding

IDS = torch.arange(-15, 15) * 600_000_000_000_000_007
"""The ids of the rows of the plain embedding."""
DIM = 6
Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, torch.tensor(0.05), momentum=0.9, nesterov=True, foreach=False
    ),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1, lr_decay=0.01),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(list(parameters), 0.02),
}


class EmbeddingPair:
    """An embedding by a table and a plain one with the same rows, and an optimizer for each."""

    def __init__(self, make: Optimizers) -> None:
        self.table = Embedding(DIM, seed=5)
        self.plain = nn.Embedding(len(IDS), DIM, sparse=True)
        self.plain.weight.data.copy_(self.table(IDS).detach())
        self.make = make
        self.optimizers = [make(self.table.parameters()), make(self.plain.parameters())]
        self._generator = torch.Generator(DEVICE).manual_seed(0)

    def losses(self, shape: tuple[int, ...] = (3, 4)) -> tuple[Tensor, Tensor]:
        places = torch.randint(0, len(IDS), shape, generator=self._generator)
        weights = torch.randn(*shape, DIM, generator=self._generator)
        return tuple((rows.sin() * weights).sum() for rows in (self.table(IDS[places]), self.plain(places)))

    def backward(self) -> None:
        for loss in self.losses():
            loss.backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def check(self, *, changed: bool = True) -> None:
        rows = self.table(IDS).detach()
        assert float((rows - self.plain.weight.detach()).abs().max()) < 1e-12
        if changed:
            assert float((rows - Embedding(DIM, seed=5)(IDS)).abs().max()) > 0.01
