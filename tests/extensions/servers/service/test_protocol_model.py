"""No kill of servers, at no moment, stops a run for ever or changes its rows: orders of messages and kills, explored.

`protocol_model` runs the real code of workers and servers, and chooses what happens next.
"""

import functools

import numpy as np
import pytest
from protocol_model import ProtocolModel
from protocol_orders import HeldBack, RandomOrder, first_action

from rankless.extensions.servers.service.wire.messages import Kind
from rankless.extensions.servers.tables.optimizers import SgdSettings
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.tables.settings import Constant, TableSettings

SETTINGS = TableSettings(dim=2, dtype="float64", initial=Constant(value=0.0))
OPTIMIZER = SgdSettings(lr=1.0)
IDS = np.arange(12)
STEPS = 3


def gradients(worker: int, step: int, ids=IDS) -> RowGradients:
    values = np.full((len(ids), 2), float(1 + worker + 3 * step))  # whole numbers, so that no order of sums matters
    return RowGradients(ids, np.ones(len(ids), np.int64), values)


def on_server(table, server: int):
    routed = table.route(IDS)
    return np.sort(routed.ids[routed.ends[server] : routed.ends[server + 1]])


def jobs(model, worker):
    """Steps of jobs: slices are prepared before a meeting. Worker 0 saves alone, and worker 1 reads nothing."""
    client = model.client(worker)
    tables = [client.open_table(name, SETTINGS) for name in "ab"]
    found = []
    for step in range(STEPS):
        if worker == 0:
            found += [table.pull(IDS).tobytes() for table in tables]
        client.prepare([(table, gradients(worker, step)) for table in tables])
        model.meet(worker)
        for table in tables:
            table.push_prepared(OPTIMIZER, 1.0)
        client.commit()
        if worker == 0 and step == 1:
            found.append(tables[0].contents().rows.tobytes())
        model.meet(worker)
    found.append(tables[1].pull(IDS).tobytes())
    client.close()
    return found


def pushes(model, worker):
    """Steps of scripts with tables of their own. Each worker reads rows of one server alone."""
    client = model.client(worker)
    table = client.open_table("a", SETTINGS)
    found = []
    for step in range(STEPS):
        part = gradients(worker, step)
        table.push(part.ids, part.occurrences, part.gradients, OPTIMIZER)
        client.commit()
        found.append(table.pull(on_server(table, worker)).tobytes())
        if step % 2:
            model.meet(worker)
    found.append(table.pull(IDS).tobytes())
    client.close()
    return found


def early_rows(model, worker):
    """Rows are asked for before they are needed, and not used by all. Contents are restored in between."""
    client = model.client(worker)
    tables = [client.open_table(name, SETTINGS) for name in "ab"]
    found = []
    for step in range(STEPS):
        early = [table.request_early(IDS[: 4 + worker]) for table in tables]
        client.request_early_rows()
        model.meet(worker)
        if step != worker:
            found += [b"" if rows is None else rows.tobytes() for rows in (each.take() for each in early)]
        client.prepare([(table, gradients(worker, step)) for table in tables])
        model.meet(worker)
        for table in tables:
            table.push_prepared(OPTIMIZER, 0.5)
        client.commit()
        if step == 1:
            if worker == 1:
                tables[0].restore(tables[1].contents())
            model.meet(worker)
    found.append(tables[0].pull(IDS).tobytes())
    client.close()
    return found


def own_steps(model, worker):
    """Steps of each worker alone, of which worker 0 makes more: the other one has left before."""
    client = model.client(worker)
    table = client.open_table("a", SETTINGS)
    for step in range(2 + 4 * (worker == 0)):
        client.begin_step()
        table.pull(on_server(table, step % 2))
        part = gradients(worker, step)
        table.push(part.ids, part.occurrences, part.gradients, OPTIMIZER)
        client.commit()
        if step == 0:
            model.meet(worker)
    client.wait_until_committed()
    found = None if worker else table.statistics().rows
    client.close()
    return found


def one_leaves(model, worker):
    """Common steps, of which worker 0 makes some more alone."""
    client = model.client(worker)
    table = client.open_table("a", SETTINGS)
    for step in range(1 + 2 * (worker == 0)):
        part = gradients(worker, step)
        table.push(part.ids, part.occurrences, part.gradients, OPTIMIZER)
        client.commit()
        table.pull(on_server(table, step % 2))
    found = table.pull(IDS).tobytes() if worker == 0 else None
    client.close()
    return found


RUNS = {
    "jobs": (jobs, {}),
    "pushes": (pushes, {}),
    "early rows": (early_rows, {}),
    "bounded": (own_steps, {"mode": "bounded", "staleness": 2}),
    "async": (own_steps, {"mode": "async"}),
    "one leaves": (one_leaves, {}),
    "copies": (jobs, {"servers": 1, "replicas": 1}),
}


EXHAUSTIVE_ORDERS = 2000


@functools.cache
def undisturbed(name: str) -> list:
    script, options = RUNS[name]
    return ProtocolModel(script, **options).run(first_action)


def check(name: str, choose) -> ProtocolModel:
    script, options = RUNS[name]
    model = ProtocolModel(script, **options)
    assert model.run(choose) == undisturbed(name)
    return model


@pytest.mark.parametrize("orders", [8, pytest.param(EXHAUSTIVE_ORDERS, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.ci_sample(3)
def test_no_order_of_messages_and_deaths_stops_a_run_or_changes_rows(name, orders):
    faults = 0
    for seed in range(orders):
        model = check(name, RandomOrder(seed, faults=4))
        faults += model.kills + model.breaks
    assert faults > 2 * orders


HELD = {
    # Worker 1 waits in a meeting for worker 0, which waits for the part that server 0 has lost.
    "part of a worker that meets": ("jobs", lambda kind, worker, *_: (kind, worker) == (Kind.READY, 0), [0]),
    # Each worker waits for one server, whose next process lacks the part of the other one.
    "parts on both servers": (
        "pushes",
        lambda kind, worker, server, _: kind == Kind.READY and worker == server,
        [0, 1],
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_what_dies_with_a_server_is_sent_again_wherever_its_worker_waits(name):
    script, holds, kills = HELD[name]
    order = HeldBack(holds, kills)
    check(script, order)
    assert order.held == len(kills)


def test_a_server_that_starts_again_waits_for_no_worker_that_has_left():
    order = HeldBack(
        lambda kind, worker, server, _: (kind, worker, server) == (Kind.LEAVE, 1, 1), kills=[0], patience=30
    )
    check("one leaves", order)
    assert order.held == 31
