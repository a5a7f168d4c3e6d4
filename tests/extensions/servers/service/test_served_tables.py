"""Tables on servers hold what one table holds that gets the sum of all workers' slices."""

import itertools
import threading

import numpy as np
import pytest
from served_training import (
    OPTIMIZERS,
    TABLES,
    VOCABULARY,
    SliceOfStep,
    assert_equal_contents,
    draw_slice,
    push_sum,
    table_settings,
    together,
)

from rankless.errors import TableError
from rankless.extensions.servers.service.routing import route_ids, servers_of_shards
from rankless.extensions.servers.tables.id_map import mix, shard_of
from rankless.extensions.servers.tables.optimizers import SgdSettings
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

SIZES = [(1, 1), (1, 4), (2, 2), (3, 3), (3, 1)]
EMPTY = SliceOfStep(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 3)))


@pytest.fixture
def opened(shared_servers, request):
    """Clients, their tables, and the same table in this process."""
    servers, workers, name = request.param
    clients = shared_servers.clients(servers, workers)
    settings, name = table_settings(name), shared_servers.new_name()
    yield clients, [client.open_table(name, settings) for client in clients], Table(settings)
    for client in clients:
        client.close()


def train(opened, optimizer, steps: int, seed: int = 0) -> None:
    clients, tables, reference = opened
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        slices = [draw_slice(generator) for _ in tables]
        for table, each in zip(tables, slices, strict=True):
            table.push(*each, optimizer)
        for client in clients:
            client.commit()
        push_sum(reference, slices, optimizer)
        found, expected = tables[-1].pull(VOCABULARY), reference.pull(VOCABULARY)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
        assert tables[0].step == tables[-1].step == reference.step


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("opened", [(*size, name) for size in SIZES for name in TABLES], indirect=True)
@pytest.mark.ci_sample(2)
def test_a_served_table_is_that_of_one_process(opened, optimizer):
    train(opened, OPTIMIZERS[optimizer], 25)
    tables, reference = opened[1:]
    assert_equal_contents(tables[0].contents(), reference.contents())
    ours, single = tables[0].statistics(), reference.statistics()
    for name in ("rows", "waiting", "created", "expired", "evicted", "rejected", "largest_shard_rows"):
        assert getattr(ours, name) == getattr(single, name), name


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.ci_sample(2)
def test_contents_move_to_any_number_of_servers(shared_servers, name):
    settings = table_settings(name)
    reference, contents = Table(settings), None
    generator = np.random.default_rng(3)
    for servers, workers in ((2, 2), (3, 3), (1, 1), (2, 2)):
        clients = shared_servers.clients(servers, workers)
        table_name = shared_servers.new_name()
        tables = [client.open_table(table_name, settings) for client in clients]
        if contents is not None:
            tables[0].restore(contents)
            assert tables[0].step == reference.step
        for _ in range(8):
            slices = [draw_slice(generator) for _ in tables]
            for table, each in zip(tables, slices, strict=True):
                table.push(*each, OPTIMIZERS["momentum"])
            for client in clients:
                client.commit()
            push_sum(reference, slices, OPTIMIZERS["momentum"])
        contents = tables[-1].contents()
        assert_equal_contents(contents, reference.contents())
        for client in clients:
            client.close()


class RandomCalls:
    """A random sequence of calls that all workers make at the same time, and what each of them must return."""

    def __init__(self, opened, seed: int) -> None:
        self.clients, self.tables, self.reference = opened
        self._generator = np.random.default_rng(seed)
        self._pending, self._stored = [], None
        self.calls = [[] for _ in self.tables]

    def add(self) -> None:
        kind = self._generator.choice(["push", "push", "commit", "commit", "pull", "reset", "store", "restore"])
        getattr(self, f"_add_{kind}")()

    def _add_push(self) -> None:
        settings = OPTIMIZERS[str(self._generator.choice(list(OPTIMIZERS)))]
        slices = [draw_slice(self._generator) for _ in self.tables]
        self._pending.append(lambda: push_sum(self.reference, slices, settings))
        for calls, table, each in zip(self.calls, self.tables, slices, strict=True):
            calls.append(lambda table=table, each=each: table.push(*each, settings))

    def _add_reset(self) -> None:
        self._pending.append(self.reference.reset_states)
        for calls, table in zip(self.calls, self.tables, strict=True):
            calls.append(table.reset_states)

    def _add_commit(self) -> None:
        for change in self._pending:
            change()
        self._pending.clear()
        for calls, client in zip(self.calls, self.clients, strict=True):
            calls.append(client.commit)

    def _add_pull(self) -> None:
        for calls, table in zip(self.calls, self.tables, strict=True):
            ids = self._generator.choice(VOCABULARY, 30)
            expected = self.reference.pull(ids)
            calls.append(
                lambda table=table, ids=ids, expected=expected: np.testing.assert_allclose(
                    table.pull(ids), expected, rtol=0, atol=1e-12
                )
            )

    def _add_store(self) -> None:
        self._stored = self.reference.contents()
        expected = self._stored
        for calls, table in zip(self.calls, self.tables, strict=True):
            calls.append(lambda table=table: assert_equal_contents(table.contents(), expected))

    def _add_restore(self) -> None:
        if self._stored is not None:
            contents = self._stored
            self.reference.restore(contents)
            meeting = threading.Barrier(len(self.tables))  # nobody reads while another worker restores
            for calls, table in zip(self.calls, self.tables, strict=True):
                calls += [lambda: meeting.wait(30), lambda table=table: table.restore(contents)]

    def run(self) -> None:
        together([lambda calls=calls: [call() for call in calls] for calls in self.calls])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("opened", [(2, 2, "expiring"), (3, 3, "tiny"), (1, 4, "every_id")], indirect=True)
@pytest.mark.ci_sample(2)
def test_random_calls_of_workers_in_parallel_return_what_one_table_does(opened, seed):
    calls = RandomCalls(opened, seed)
    for _ in range(60):
        calls.add()
    calls.run()


@pytest.mark.parametrize("opened", [(2, 2, "every_id")], indirect=True)
def test_a_pull_sees_what_is_committed_and_no_more(opened):
    clients, (first, second), _ = opened
    ids = VOCABULARY[:4]
    before = first.pull(ids)
    each = SliceOfStep(ids, np.ones(4, np.int64), np.ones((4, 3)))
    first.push(*each, OPTIMIZERS["sgd"])
    assert (first.step, second.step) == (1, 0)
    np.testing.assert_array_equal(first.pull(ids), before)
    second.push(*each, OPTIMIZERS["sgd"])
    clients[0].commit()
    np.testing.assert_array_equal(second.pull(ids), before)
    clients[1].commit()
    np.testing.assert_allclose(before - first.pull(ids), 0.2, atol=1e-12)


@pytest.mark.parametrize("opened", [(2, 2, "every_id")], indirect=True)
def test_a_pull_waits_for_the_other_workers(opened):
    clients, (first, second), reference = opened
    slices = [draw_slice(np.random.default_rng(worker), most=40) for worker in range(2)]
    first.push(*slices[0], OPTIMIZERS["sgd"])
    second.push(*slices[1], OPTIMIZERS["sgd"])
    clients[0].commit()
    waits = []

    def commit_second(*wait: object) -> None:
        waits.append(wait)
        if len(waits) == 1:
            np.testing.assert_array_equal(second.pull(VOCABULARY), reference.pull(VOCABULARY))
            clients[1].commit()

    clients[0]._requests._on_wait = commit_second
    found = first.pull(VOCABULARY)
    push_sum(reference, slices, OPTIMIZERS["sgd"])
    assert waits
    np.testing.assert_allclose(found, reference.pull(VOCABULARY), rtol=0, atol=1e-12)


@pytest.mark.parametrize("opened", [(3, 3, "by_count")], indirect=True)
def test_empty_slices_make_a_step(opened):
    clients, tables, _ = opened
    for table in tables:
        table.push(*EMPTY, OPTIMIZERS["adagrad"])
    for client in clients:
        client.commit()
    assert [table.contents().optimizer_steps for table in tables] == [1, 1, 1]
    assert tables[0].contents().step == tables[1].step == 1
    assert tables[0].pull(np.empty(0, np.int64)).shape == (0, 3)


@pytest.mark.parametrize("opened", [(1, 1, "every_id"), (3, 1, "every_id")], indirect=True)
def test_ids_may_be_repeated_strided_and_in_any_order(opened):
    clients, (table,), reference = opened
    ids = np.array([5, -1, 5, 5, np.iinfo(np.int64).min, -1])
    gradients = np.random.default_rng(0).normal(size=(3, 6)).T  # in Fortran's order
    table.push(ids[::-1], np.ones(12, np.int64)[::2], gradients, OPTIMIZERS["sparse_adam"])
    clients[0].commit()
    push_sum(reference, [SliceOfStep(ids[::-1], np.ones(6, np.int64), gradients)], OPTIMIZERS["sparse_adam"])
    np.testing.assert_allclose(table.pull(np.repeat(ids, 2)[::-2]), reference.pull(ids[::-1]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("opened", [(1, 1, "every_id"), (3, 1, "every_id")], indirect=True)
def test_arrays_may_change_as_soon_as_a_call_returns(opened):
    clients, (table,), reference = opened
    generator = np.random.default_rng(1)
    ids, occurrences = np.arange(50_000), np.ones(50_000, np.int64)
    gradients = np.empty((50_000, 3))
    for _ in range(5):
        gradients[:] = generator.normal(size=gradients.shape)
        reference.push(ids, occurrences, gradients, OPTIMIZERS["sgd"])
        table.push(ids, occurrences, gradients, OPTIMIZERS["sgd"])
        gradients[:] = np.nan
        clients[0].commit()
        pulled = table.pull(ids)
        np.testing.assert_array_equal(pulled, reference.pull(ids))
        pulled[:] = 0
    np.testing.assert_array_equal(table.pull(ids), reference.pull(ids))


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_pulls_and_pushes(shared_servers, servers, dtype):
    (client,) = shared_servers.clients(servers, 1)
    settings = TableSettings(dim=64, dtype=dtype)
    table, reference = client.open_table(shared_servers.new_name(), settings), Table(settings)
    generator = np.random.default_rng(0)
    ids = generator.permutation(np.arange(65_536) * 10**14)
    gradients = generator.normal(size=(65_536, 64)).astype(dtype)
    for target in (table, reference):
        target.push(ids, np.ones(65_536, np.int64), gradients, OPTIMIZERS["momentum"])
    client.commit()
    np.testing.assert_array_equal(table.pull(ids), reference.pull(ids))
    contents = table.contents()
    table.restore(reference.contents())
    assert_equal_contents(table.contents(), contents, bound=0)
    client.close()


@pytest.mark.parametrize("opened", [(2, 2, "every_id")], indirect=True)
def test_not_a_number_is_kept(opened):
    clients, tables, _ = opened
    nan = SliceOfStep(np.array([1, 2]), np.ones(2, np.int64), np.array([[np.nan, 1, np.inf], [0, -0.0, 1]]))
    for table in tables:
        table.push(*nan, OPTIMIZERS["sgd"])
    for client in clients:
        client.commit()
    values = tables[1].pull(np.array([1, 2]))
    assert np.isnan(values[0, 0])
    assert np.isinf(values[0, 2])
    assert np.isfinite(values[1]).all()


def test_a_worker_that_left_after_its_last_commit_is_not_waited_for(shared_servers):
    clients = shared_servers.clients(2, 2)
    settings, name = table_settings("every_id"), shared_servers.new_name()
    first, second = (client.open_table(name, settings) for client in clients)
    each = SliceOfStep(np.array([1]), np.array([1]), np.ones((1, 3)))
    before = first.pull(each.ids)
    for table in (first, second):
        table.push(*each, SgdSettings(lr=1.0))
    for client in clients:
        client.commit()
    clients[1].close()
    np.testing.assert_allclose(before - first.pull(each.ids), 2)
    for step in range(3):
        first.push(*each, SgdSettings(lr=1.0))
        clients[0].commit()
        np.testing.assert_allclose(before - first.pull(each.ids), 3 + step)
    clients[0].close()


@pytest.mark.parametrize("opened", [(2, 2, "every_id")], indirect=True)
def test_several_tables_change_in_one_transaction(opened, shared_servers):
    clients, _, _ = opened
    names, settings = [shared_servers.new_name() for _ in range(3)], table_settings("every_id")
    tables = [[client.open_table(name, settings) for name in names] for client in clients]
    references = [Table(settings) for _ in names]
    generator = np.random.default_rng(0)
    for _ in range(10):
        for number, reference in enumerate(references):
            slices = [draw_slice(generator) for _ in clients]
            for workers_tables, each in zip(tables, slices, strict=True):
                workers_tables[number].push(*each, OPTIMIZERS["momentum"])
            push_sum(reference, slices, OPTIMIZERS["momentum"])
        for client in clients:
            client.commit()
    for number, reference in enumerate(references):
        assert_equal_contents(tables[0][number].contents(), reference.contents())


@pytest.mark.parametrize("opened", [(3, 3, "every_id")], indirect=True)
def test_contents_that_no_table_has_are_refused_and_change_nothing(opened):
    clients, tables, reference = opened
    train(opened, OPTIMIZERS["adagrad"], 3)
    good = reference.contents()
    fields = {name: getattr(good, name) for name in type(good).__dataclass_fields__}
    wrong = {
        "ids": np.zeros_like(good.ids),
        "used_steps": good.used_steps - 10,
        "step": -1,
        "rows": good.rows[:, :2],
        "optimizer": "Adam",
    }
    for name, value in wrong.items():
        with pytest.raises(TableError):
            tables[0].restore(type(good)(**{**fields, name: value}))
    assert_equal_contents(tables[1].contents(), good)
    del clients


def test_routing_is_the_same_as_ranges_of_shards():
    ids = np.random.default_rng(0).integers(np.iinfo(np.int64).min, np.iinfo(np.int64).max, 2000)
    for servers, bits in itertools.product((1, 2, 3, 7, 1024), (0, 1, 5, 10)):
        routed = route_ids(ids, bits, servers_of_shards(servers, bits), servers)
        np.testing.assert_array_equal(ids[routed.places], routed.ids)
        for server in range(servers):
            for each in routed.ids[routed.ends[server] : routed.ends[server + 1]][:20]:
                shard = shard_of(np.uint64(mix(each)), bits)
                assert (server << bits) // servers <= shard < ((server + 1) << bits) // servers
