"""Random trainings with calls that fail on one rank, or on all. Each is compared with plain PyTorch in this process.

Arguments: the first seed, and how many programs.
"""

import itertools
import random
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankless

Call = tuple[Tensor, Tensor]
OPTIMIZERS = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, lr=0.01),
)
OPTIONS = (
    *({}, {}, {"check_finite": True}, {"clip_norm": 1.0}),
    *({"zero": "optimizer"}, {"zero": "gradients"}, {"zero": "parameters"}),
)


def make_model(seed: int) -> nn.Module:
    drawn = random.Random(seed)
    width = drawn.choice((3, 4, 8, 200))
    layers = [nn.Embedding(11, width)]
    for _ in range(drawn.randrange(3)):
        layers += [nn.Linear(width, width), nn.Tanh(), *([nn.Dropout(0.3)] if drawn.random() < 0.4 else [])]
    return nn.Sequential(*layers, nn.Linear(width, 5))


def make_calls(seed: int) -> list[Call]:
    """Return batches, some with an id or a label that is out of range, which one rank has in its rows."""
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, calls = drawn.choice((4, 5, 8, 13)), []
    for _ in range(drawn.randrange(3, 8)):
        ids = torch.randint(0, 11, (rows,), generator=generator)
        labels = torch.randint(0, 5, (rows,), generator=generator)
        kind = drawn.random()
        for _ in range(drawn.choice((1, 1, 3))):
            if kind < 0.2:
                ids[drawn.randrange(rows)] = 99
            elif kind < 0.4:
                labels[drawn.randrange(rows)] = 77
        calls.append((ids, labels))
    return calls


def skip_bad(step, calls: list[Call]) -> list[float | str]:
    results = []
    for call in calls:
        try:
            results.append(step(*call).item())
        except (IndexError, RuntimeError) as error:
            results.append(type(error).__name__)
    return results


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, calls: list[Call], clip: float | None) -> list:
    def step(ids: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    return skip_bad(step, calls)


def find_difference(seed: int) -> str:
    drawn = random.Random(seed + 10**6)
    make_optimizer, options = drawn.choice(OPTIMIZERS), drawn.choice(OPTIONS)
    model, plain = make_model(seed), make_model(seed)
    plain.load_state_dict(model.state_dict())
    calls = make_calls(seed)
    torch.manual_seed(seed)
    expected = train_plain(plain, make_optimizer(plain.parameters()), calls, options.get("clip_norm"))
    random_state = torch.get_rng_state()
    torch.manual_seed(seed)

    @rankless.job(model=model, optimizer=make_optimizer(model.parameters()), **options)
    def train(ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(ids), labels)

    found = skip_bad(train, calls)
    if [type(each) for each in found] != [type(each) for each in expected]:
        return f"{found} for {expected}"
    for one, other in itertools.zip_longest(found, expected):
        if one != other and (isinstance(one, str) or abs(one - other) > 1e-10 * abs(other)):
            return f"{one} for {other}"
    state = model.state_dict()
    worst = max(float((value - state[name]).abs().max()) for name, value in plain.state_dict().items())
    if worst > 1e-10:
        return f"a state is off by {worst}"
    return "" if torch.equal(torch.get_rng_state(), random_state) else "the random generator differs"


def main() -> None:
    torch.set_default_dtype(torch.float64)
    first, count = map(int, sys.argv[1:])
    wrong = 0
    for seed in range(first, first + count):
        difference = find_difference(seed)
        if difference:
            wrong += 1
            print(f"seed {seed}: {difference}", flush=True)
    if rankless.rank() == 0:
        print(f"{count} programs, {wrong} wrong", flush=True)


main()
