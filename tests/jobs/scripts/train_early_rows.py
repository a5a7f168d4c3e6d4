"""Trains loops in the forms that scripts have, as jobs or, with --plain, as plain PyTorch with `nn.Embedding`.

Prints a line of JSON per form: the losses and predictions, the values of all rows at the end, and how many lookups
of worker 0 have used rows that it has asked for early.
"""

import argparse
import collections
import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--plain", action="store_true")
parser.add_argument("--forms", default="")
parser.add_argument("--part", type=int, default=0, help="with --parts N: every N-th form, from this one on")
parser.add_argument("--parts", type=int, default=1)
arguments = parser.parse_args()
import rankless  # noqa: E402  # the plain training uses it for the initial values of rows only
from rankless.extensions.servers.service.table_pulls import EarlyServedPull  # noqa: E402

torch.set_default_dtype(torch.float64)
IDS, DIM = 24, 4
COUNTS: collections.Counter[str] = collections.Counter()
take = EarlyServedPull.take


def count_takes(self):
    rows = take(self)
    COUNTS["used" if rows is not None else "stale"] += 1
    return rows


EarlyServedPull.take = count_takes


class PlainTable(nn.Embedding):
    """An `nn.Embedding` with the rows of a table."""

    def __init__(self, seed: int) -> None:
        super().__init__(IDS, DIM, sparse=True)
        self.weight.data.copy_(make_table(seed)(torch.arange(IDS)).detach())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids.long())


def make_table(seed: int) -> nn.Module:
    return rankless.parameter_server.Embedding(DIM, seed=seed)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make = PlainTable if arguments.plain else make_table
        self.first, self.second = make(1), make(2)
        torch.manual_seed(6)  # plain embeddings draw values that they do not need
        self.layer = nn.Linear(2 * DIM, 3)
        self.dropout = nn.Dropout(0.0)
        self.register_buffer("offset", torch.tensor(2))

    def forward(self, users, items):
        rows = torch.cat([self.first(users % 12 + self.offset), self.second(items)], -1)
        return self.layer(self.dropout(rows))


def make_job(model, optimizers, function):
    if not arguments.plain:
        return rankless.job(model=model, optimizer=optimizers)(function)

    def train(*batch):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = function(*batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return train


def make_predictor(model, function):
    return torch.no_grad()(function) if arguments.plain else rankless.job(model=model)(function)


def make_loader(data, **options):
    if not arguments.plain:
        return rankless.loader(data, **options)
    seed = options.pop("seed", None)
    generator = torch.Generator().manual_seed(seed) if seed is not None else options.pop("generator", None)
    return DataLoader(data, generator=generator, **options)


def make_columns(count=41, seed=3):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda most: torch.randint(most, (count,), generator=generator)  # noqa: E731
    return draw(IDS), draw(IDS), draw(3)


class Rows(Dataset):
    """A data set of dicts, which is no `TensorDataset`."""

    def __init__(self) -> None:
        self.columns = make_columns()

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index):
        users, items, labels = (column[index] for column in self.columns)
        return {"pair": (users, items), "labels": labels}


class Training:
    """A model, its optimizers and jobs."""

    def __init__(self) -> None:
        self.model = model = Model()
        self.tables = [torch.optim.Adagrad([*model.first.parameters(), *model.second.parameters()], 0.1)]
        self.optimizers = [*self.tables, torch.optim.AdamW(model.layer.parameters(), 1e-2)]
        self.train = make_job(model, self.optimizers, lambda u, i, y: F.cross_entropy(model(u, i), y))
        self.other = make_job(model, self.optimizers, lambda u, i, y: model(u, i).square().mean() + y.sum() * 0)
        self.train_pair = make_job(model, self.optimizers, lambda b, y: F.cross_entropy(model(*b), y))
        self.train_batch = make_job(model, self.optimizers, lambda b: F.cross_entropy(model(*b["pair"]), b["labels"]))
        self.predict = make_predictor(model, lambda u, i: model(u, i))
        self.numbers: list[float] = []

    def add(self, tensor) -> None:
        self.numbers += torch.as_tensor(tensor).detach().flatten().double().tolist()


def epochs(training, loader, count=3):
    for _ in range(count):
        for users, items, labels in loader:
            training.add(training.train(users, items, labels))


def plain_loop(t):
    epochs(t, make_loader(TensorDataset(*make_columns()), batch_size=6, shuffle=True, seed=2))


def reader_processes(t):
    epochs(t, make_loader(TensorDataset(*make_columns()), batch_size=6, shuffle=True, seed=2, num_workers=2))


def in_order_without_the_rest(t):
    epochs(t, make_loader(TensorDataset(*make_columns()), batch_size=8, drop_last=True))


def dicts_of_readers(t):
    for _ in range(2):
        for batch in make_loader(Rows(), batch_size=6, shuffle=True, seed=2, num_workers=1):
            t.add(t.train_batch(batch))


def a_tuple_within_a_batch(t):
    for batch in make_loader(Rows(), batch_size=6, num_workers=1):
        t.add(t.train_pair(batch["pair"], batch["labels"]))


def casts(t):
    for users, items, labels in make_loader(TensorDataset(*make_columns()), batch_size=6):
        t.add(t.train(users.int(), items.to("cpu"), labels.long()))


def ids_that_the_script_changes(t):
    for users, items, labels in make_loader(TensorDataset(*make_columns()), batch_size=6):
        t.add(t.train((users + 3) % IDS, items, labels))


def labels_that_the_script_changes(t):
    columns = make_columns()
    loader = make_loader(TensorDataset(*columns), batch_size=6)
    for number, (users, items, labels) in enumerate(loader):
        t.add(t.train(users, items, labels))
        columns[2].copy_((columns[2] + number) % 3)


def ids_of_the_data_that_the_script_changes(t):
    columns = make_columns()
    loader = make_loader(TensorDataset(*columns), batch_size=6)
    for users, items, labels in loader:
        t.add(t.train(users, items, labels))
        columns[0].copy_((columns[0] * 5 + 1) % IDS)


def a_buffer_that_the_script_changes(t):
    loader = make_loader(TensorDataset(*make_columns()), batch_size=6)
    for users, items, labels in loader:
        t.add(t.train(users, items, labels))
        t.model.offset.add_(1).remainder_(5)


def two_jobs_in_turn(t):
    for _ in range(2):
        for number, (users, items, labels) in enumerate(make_loader(TensorDataset(*make_columns()), batch_size=6)):
            t.add((t.other if number % 2 else t.train)(users, items, labels))


def two_jobs_with_the_same_batch(t):
    for _ in range(3):
        for users, items, labels in make_loader(TensorDataset(*make_columns()), batch_size=6):
            t.add(t.train(users, items, labels))
            t.add(t.other(users, items, labels))


def the_same_batch_twice(t):
    for users, items, labels in make_loader(TensorDataset(*make_columns()), batch_size=6):
        t.add(t.train(users, items, labels))
        t.add(t.train(users, items, labels))


def predictions_between(t):
    other = make_loader(TensorDataset(*make_columns(20, 9)), batch_size=5)
    for users, items, labels in make_loader(TensorDataset(*make_columns()), batch_size=6):
        t.add(t.train(users, items, labels))
        for more_users, more_items, _ in other:
            t.add(t.predict(more_users, more_items))


def the_next_batch_is_predicted_first(t):
    before = None
    for users, items, labels in make_loader(TensorDataset(*make_columns()), batch_size=6):
        t.add(t.predict(users, items))
        if before is not None:
            t.add(t.predict(*before))
        before = users, items
        t.add(t.train(users, items, labels))


def two_loaders_at_once(t):
    loaders = [make_loader(TensorDataset(*make_columns(40, seed)), batch_size=6) for seed in (4, 5)]
    for (users, _, labels), (_, items, _) in zip(*loaders, strict=True):
        t.add(t.train(users, items, labels))


def a_loop_that_is_left(t):
    loader = make_loader(TensorDataset(*make_columns()), batch_size=6, shuffle=True, seed=2)
    for limit in (2, 4, 1):
        for number, (users, items, labels) in enumerate(loader):
            if number == limit:
                break
            t.add(t.train(users, items, labels))


def an_iterator_across_loops(t):
    loader = make_loader(TensorDataset(*make_columns(60)), batch_size=6)
    batches = iter(loader)
    for _ in range(3):
        for _ in range(3):
            t.add(t.train(*next(batches)))
        t.add(t.predict(torch.arange(8), torch.arange(8)))


def loaded_states(t):
    loader = make_loader(TensorDataset(*make_columns()), batch_size=6)
    saved = None
    for number, (users, items, labels) in enumerate(loader):
        t.add(t.train(users, items, labels))
        if number == 1:
            saved = {name: part.clone() for name, part in read_rows(t.model).items()}
        if number == 3:
            write_rows(t.model, saved)


def a_schedule(t):
    loader = make_loader(TensorDataset(*make_columns()), batch_size=6)
    for users, items, labels in loader:
        t.add(t.train(users, items, labels))
        for group in t.tables[0].param_groups:
            group["lr"] *= 0.9


def random_numbers_between(t):
    torch.manual_seed(8)
    loader = make_loader(TensorDataset(*make_columns()), batch_size=6, shuffle=True)
    for _ in range(3):
        for users, items, labels in loader:
            t.add(t.train(users, items, labels))
            t.add(torch.rand(2))


def a_generator_that_the_script_uses_too(t):
    generator = torch.Generator().manual_seed(8)
    loader = make_loader(TensorDataset(*make_columns()), batch_size=6, shuffle=True, generator=generator)
    for _ in range(3):
        for users, items, labels in loader:
            t.add(t.train(users, items, labels))
            t.add(torch.rand(2, generator=generator))


def samples_with_replacement(t):
    weights = torch.arange(1.0, 42.0)
    torch.manual_seed(8)
    sampler = torch.utils.data.WeightedRandomSampler(weights, 30, replacement=True)
    epochs(t, make_loader(TensorDataset(*make_columns()), batch_size=6, sampler=sampler), 2)


def joined_data_sets(t):
    data = ConcatDataset([TensorDataset(*make_columns(20, 4)), TensorDataset(*make_columns(22, 5))])
    epochs(t, make_loader(data, batch_size=6, num_workers=1), 2)


def persistent_readers(t):
    loader = make_loader(
        TensorDataset(*make_columns()), batch_size=6, shuffle=True, seed=2, num_workers=1, persistent_workers=True
    )
    epochs(t, loader)


def a_last_batch_of_one_sample(t):
    epochs(t, make_loader(TensorDataset(*make_columns(37)), batch_size=6), 2)


def one_batch_per_pass(t):
    epochs(t, make_loader(TensorDataset(*make_columns()), batch_size=50, shuffle=True, seed=1), 4)


def whole_values_of_a_batch(t):
    for users, items, labels in make_loader(TensorDataset(*make_columns()), batch_size=6):
        t.add(users.sum())
        t.add(t.train(users, items, labels))
        t.add(labels.double().mean())


def a_failed_call(t):
    loader = make_loader(TensorDataset(*make_columns()), batch_size=6)
    for number, (users, items, labels) in enumerate(loader):
        if number == 2:
            try:
                t.predict(users, items[:0])
            except Exception:
                t.add(1.0)
        t.add(t.train(users, items, labels))


FORMS = [
    plain_loop, reader_processes, in_order_without_the_rest, dicts_of_readers, a_tuple_within_a_batch, casts,
    ids_that_the_script_changes, labels_that_the_script_changes, ids_of_the_data_that_the_script_changes,
    a_buffer_that_the_script_changes, two_jobs_in_turn, two_jobs_with_the_same_batch, the_same_batch_twice,
    predictions_between, the_next_batch_is_predicted_first, two_loaders_at_once, a_loop_that_is_left,
    an_iterator_across_loops, loaded_states, a_schedule, random_numbers_between,
    a_generator_that_the_script_uses_too, samples_with_replacement, joined_data_sets, persistent_readers,
    a_last_batch_of_one_sample, one_batch_per_pass, whole_values_of_a_batch, a_failed_call,
]  # fmt: skip


def read_rows(model):
    if arguments.plain:
        return {name: getattr(model, name).weight.data for name in ("first", "second")}
    with torch.no_grad():
        return {name: getattr(model, name)(torch.arange(IDS)) for name in ("first", "second")}


def write_rows(model, rows):
    """Set the rows that were trained, and keep the optimizer's states: both are part of the comparison."""
    if arguments.plain:
        for name, values in rows.items():
            getattr(model, name).weight.data.copy_(values)
        return
    for name, values in rows.items():
        table = getattr(model, name)
        state = table.get_extra_state()
        state["rows"][:, :DIM] = values[state["ids"]]
        table.set_extra_state(state)


names = arguments.forms.split(",") if arguments.forms else []
chosen = [form for form in FORMS if form.__name__ in names] or FORMS[arguments.part :: arguments.parts]
for form in chosen:
    torch.manual_seed(5)
    COUNTS.clear()
    training = Training()
    form(training)
    numbers = training.numbers + torch.cat(list(read_rows(training.model).values())).flatten().tolist()
    print(json.dumps({"form": form.__name__, "numbers": numbers, "used": COUNTS["used"]}))
