"""Pushes to many tables are few messages, and do what one message for each table does."""

import os
from collections import Counter

import numpy as np
import pytest
from served_training import OPTIMIZERS, assert_equal_contents, draw_slice, push_sum, together
from server_processes import RestartedServer, servers_of_run

from rankless.errors import TableError
from rankless.extensions.servers.service.served_table import TablePush, push_together
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.service.server_requests import ServerRequests
from rankless.extensions.servers.tables.row_gradients import RowGradients
from rankless.extensions.servers.tables.settings import TableSettings
from rankless.extensions.servers.tables.table import Table

DTYPES = ("float64", "float32", "float32", "float64", "float32")
SETTINGS = [TableSettings(dim=3 + 2 * number, dtype=dtype) for number, dtype in enumerate(DTYPES)]
OPTIMIZER_OF = [*OPTIMIZERS, "sgd"]


class TablesOfWorkers:
    """Tables of several dims and types, with an optimizer each, and the same ones in this process."""

    def __init__(self, clients, settings=SETTINGS) -> None:
        self.clients = clients
        self.tables = [[client.open_table(f"t{n}", each) for n, each in enumerate(settings)] for client in clients]
        self.references = [Table(each) for each in settings]
        self._generator = np.random.default_rng(3)

    def draw(self, sizes=()):
        """Return a slice of each table for each worker, with as many rows as `sizes` has for the worker, or a few."""
        counts = [sizes[worker] if worker < len(sizes) else () for worker in range(len(self.clients))]
        slices = [[self._draw_one(n, each) for n in range(len(self.references))] for each in counts]
        for number, table in enumerate(self.references):
            push_sum(table, [each[number] for each in slices], OPTIMIZERS[OPTIMIZER_OF[number]])
        return slices

    def _draw_one(self, number: int, sizes):
        settings = self.references[number].settings
        drawn = draw_slice(self._generator, settings.dim)
        if number < len(sizes):
            count = sizes[number]
            ids = self._generator.permutation(4 * count)[:count]
            gradients = self._generator.normal(size=(count, settings.dim))
            drawn = drawn._replace(ids=ids, occurrences=np.ones(count, np.int64), gradients=gradients)
        return drawn._replace(gradients=drawn.gradients.astype(settings.dtype))

    def pushes(self, worker: int, slices) -> list[TablePush]:
        tables = self.tables[worker]
        return [TablePush(tables[n], *each, OPTIMIZERS[OPTIMIZER_OF[n]]) for n, each in enumerate(slices[worker])]

    def check(self) -> None:
        for table, reference in zip(self.tables[0], self.references, strict=True):
            bound = 1e-12 if reference.settings.dtype == "float64" else 1e-5
            assert_equal_contents(table.contents(), reference.contents(), bound)


@pytest.fixture
def messages(monkeypatch) -> Counter[str]:
    """How many messages of each kind this process has sent."""
    counts: Counter[str] = Counter()
    send = ServerRequests.send

    def counted(self, server, header, payload=()):
        counts[header.kind.name] += 1
        return send(self, server, header, payload)

    monkeypatch.setattr(ServerRequests, "send", counted)
    return counts


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("servers", [1, 3])
def test_tables_of_many_types_are_stepped_with_one_message_to_each_server(tmp_path, servers, messages):
    with servers_of_run(tmp_path, servers, 2) as run:
        clients = [run.client(worker) for worker in range(2)]
        training = TablesOfWorkers(clients)
        for _ in range(4):
            slices = training.draw()
            for worker, client in enumerate(clients):
                push_together(training.pushes(worker, slices))
                client.commit()
        assert messages["PUSH_SEVERAL"] == 4 * 2 * servers
        assert not messages["PUSH"]
        training.check()
        for client in clients:
            client.close()


def test_large_slices_go_alone_and_workers_of_other_sizes_agree_on_the_order(tmp_path, messages):
    """The slices of worker 0 are large, those of worker 1 are not: they send them with other messages."""
    with servers_of_run(tmp_path, 2, 2) as run:
        clients = [run.client(worker) for worker in range(2)]
        training = TablesOfWorkers(clients)
        for _ in range(2):
            slices = training.draw(sizes=[(5, 60_000, 7, 50_000), ()])
            for worker in range(2):
                push_together(training.pushes(worker, slices))
                clients[worker].commit()
        # Of worker 0 tables 1 and 3 are large, and what is between them or after them is alone.
        assert (messages["PUSH"], messages["PUSH_SEVERAL"]) == (2 * 2 * 5, 2 * 2)
        training.check()
        for client in clients:
            client.close()


def test_prepared_slices_of_many_tables_are_one_message_and_outlive_a_lost_worker(tmp_path, messages):
    with servers_of_run(tmp_path, 2, 3) as run:
        clients = [run.client(worker) for worker in range(3)]
        training = TablesOfWorkers(clients)
        slices = training.draw()
        for worker, client in enumerate(clients):
            tables = training.tables[worker]
            client.prepare([(table, RowGradients(*each)) for table, each in zip(tables, slices[worker], strict=True)])
        assert messages["PREPARE_SEVERAL"] == 3 * 2
        assert not messages["PREPARE"]
        for worker in range(2):  # worker 2 is lost before its step
            for number, table in enumerate(training.tables[worker]):
                table.push_prepared(OPTIMIZERS[OPTIMIZER_OF[number]], 1.0)
            clients[worker].commit()
        for worker in range(2):
            clients[worker].regroup([2], 1, 1)
        training.check()
        for client in clients[:2]:
            client.close()


@pytest.mark.exhaustive
def test_pushes_that_wait_for_the_end_of_a_step_outlive_killed_servers(tmp_path, messages):
    """With `defers` all pushes of a step, also those of several calls, are one message when the step ends."""
    descriptor = os.memfd_create("tables")
    server = RestartedServer(tmp_path, descriptor, mode="async")
    server.start()
    settings = ConnectionSettings(reconnect_seconds=60, defers=True)
    client = server.client(0, settings=settings)
    training = TablesOfWorkers([client])
    for number in range(8):
        pushes = training.pushes(0, training.draw())
        push_together(pushes[:1])
        if number % 4 == 1:
            server.restart()
        push_together(pushes[1:])
        assert messages["PUSH_SEVERAL"] == number
        client.commit()
        if number % 4 == 3:
            server.restart()
    client.wait_until_committed()
    training.check()
    server.close()
    os.close(descriptor)


def test_a_reset_follows_the_pushes_before_it(tmp_path):
    with servers_of_run(tmp_path, 1, 1, mode="async") as run:
        client = run.client(0, settings=ConnectionSettings(defers=True))
        training = TablesOfWorkers([client])
        for _ in range(2):
            push_together(training.pushes(0, training.draw()))
            for table in (*training.tables[0], *training.references):
                table.reset_states()
            push_together(training.pushes(0, training.draw()))
            client.commit()
        training.check()
        client.close()


def test_pushes_without_an_end_are_not_made(tmp_path):
    with servers_of_run(tmp_path, 1, 1, mode="async") as run:
        client = run.client(0, settings=ConnectionSettings(defers=True))
        training = TablesOfWorkers([client])
        before = [table.contents() for table in training.references]
        push_together(training.pushes(0, training.draw()))
        for table, contents in zip(training.tables[0], before, strict=True):
            found = table.contents()
            np.testing.assert_array_equal(found.ids, contents.ids)
        client.__exit__(ConnectionError, None, None)


def test_a_slice_that_is_too_large_is_an_error_before_anything_is_sent(tmp_path, monkeypatch, messages):
    monkeypatch.setattr("rankless.extensions.servers.service.worker_transaction.MOST_MESSAGE_BYTES", 1000)
    with servers_of_run(tmp_path, 1, 1) as run:
        client = run.client(0)
        training = TablesOfWorkers([client])
        pushes = training.pushes(0, training.draw(sizes=[(2, 2, 2, 200)]))
        with pytest.raises(TableError, match="bytes of gradients"):
            push_together(pushes)
        with pytest.raises(TableError, match="bytes of gradients"):
            client.prepare([(push.table, RowGradients(*push[1:4])) for push in pushes])
        assert not messages["PUSH_SEVERAL"] + messages["PREPARE_SEVERAL"] + messages["PUSH"] + messages["PREPARE"]
        push_together(pushes[:2])  # the client is of use
        client.commit()
        client.close()


def test_workers_with_other_tables_in_a_message_are_refused(tmp_path):
    with servers_of_run(tmp_path, 1, 2) as run:
        clients = [run.client(worker) for worker in range(2)]
        training = TablesOfWorkers(clients)
        slices = training.draw()
        push_together(training.pushes(0, slices))
        with pytest.raises(TableError, match="the same change of all workers"):
            push_together(training.pushes(1, slices)[::-1])
        for client in clients:
            client.__exit__(ConnectionError, None, None)


@pytest.mark.exhaustive
def test_copies_of_servers_have_the_slices_of_all_tables(tmp_path):
    """Workers open the tables in different orders, so numbers differ between a server and its copy."""
    with servers_of_run(tmp_path, 2, 2, replicas=1) as run:
        clients = [run.client(worker, settings=ConnectionSettings()) for worker in range(2)]
        together([lambda: [clients[0].open_table(f"x{n}", SETTINGS[n]) for n in range(3)]])
        together([lambda: [clients[1].open_table(f"y{n}", SETTINGS[n]) for n in range(2)]])
        training = TablesOfWorkers(clients)
        for _ in range(3):
            slices = training.draw()
            together(
                [lambda worker=worker, own=slices: push_together(training.pushes(worker, own)) for worker in range(2)]
            )
            for client in clients:
                client.commit()
        training.check()
        for client in clients:
            client.__exit__(ConnectionError, None, None)
