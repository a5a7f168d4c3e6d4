"""Workers that train on their own and exchange changes with servers, against the rule in a few lines of NumPy."""

import numpy as np
import pytest
import torch
from served_training import OPTIMIZERS, VOCABULARY, table_settings
from server_processes import servers_of_run
from torch import nn

from rankless.errors import TableError
from rankless.extensions.servers.tables.optimizers import OptimizerSettings, SgdSettings
from rankless.extensions.servers.tables.settings import ByCount, TableSettings
from rankless.extensions.servers.tables.table import Table
from rankless.extensions.servers.training.geo_training import GeoExchange


class DenseWorker:
    """Rows of all ids of one worker, by the rule of Note [geo]."""

    def __init__(self, start: np.ndarray, servers: "np.ndarray", workers: int) -> None:
        self.latest, self.base, self.servers, self.workers = start.copy(), start.copy(), servers, workers
        self.known = np.zeros(len(start), bool)

    def send(self, places: np.ndarray) -> None:
        share = (self.latest[places] - self.base[places]) / self.workers
        self.base[places] += share
        self.servers[places] += share

    def take(self, places: np.ndarray) -> None:
        self.latest[places] += self.servers[places] - self.base[places]
        self.base[places] = self.servers[places]

    def read(self, places: np.ndarray) -> None:
        new = places[~self.known[places]]
        self.latest[new] = self.base[new] = self.servers[new]
        self.known[new] = True


def gather_alone(data: bytes) -> list[bytes]:
    return [data]


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.ci_sample(2)
def test_rows_are_exchanged_by_the_rule(tmp_path, servers, steps):
    """SGD, whose steps subtract the gradient, so that the reference needs no optimizer."""
    settings, workers = table_settings("every_id"), 3
    with servers_of_run(tmp_path, servers, workers, mode="geo") as run:
        clients = [run.client(worker) for worker in range(workers)]
        exchanges = [
            GeoExchange(client, gather_alone, worker=worker, worker_count=workers, steps=steps)
            for worker, client in enumerate(clients)
        ]
        tables = [
            each.add_table(client.open_table("t", settings)) for each, client in zip(exchanges, clients, strict=True)
        ]
        start = Table(settings).pull(VOCABULARY)
        on_servers = start.copy()
        references = [DenseWorker(start, on_servers, workers) for _ in range(workers)]
        trained = [np.zeros(0, np.int64) for _ in range(workers)]
        counts = [0] * workers
        generator = np.random.default_rng(steps)
        for worker in generator.integers(0, workers, 90):
            places = generator.choice(len(VOCABULARY), 8, replace=False)
            gradients = generator.normal(size=(8, 3))
            exchanges[worker].begin_step()
            reference = references[worker]
            reference.read(places)
            np.testing.assert_allclose(
                tables[worker].pull(VOCABULARY[places]), reference.latest[places], rtol=0, atol=1e-12
            )
            tables[worker].push(VOCABULARY[places], np.ones(8, np.int64), gradients, SgdSettings(lr=0.1))
            reference.latest[places] -= 0.1 * gradients
            trained[worker] = np.union1d(trained[worker], places).astype(np.int64)
            exchanges[worker].end_step()
            counts[worker] += 1
            if counts[worker] % steps == 0:
                reference.send(trained[worker])
                reference.take(trained[worker])
                trained[worker] = trained[worker][:0]
        np.testing.assert_allclose(tables[0].pull(VOCABULARY), on_servers, rtol=0, atol=1e-12)
        for exchange in exchanges:
            exchange.send()
        for reference, places in zip(references, trained, strict=True):
            reference.send(places)
        for exchange in exchanges:
            exchange.read_all()
        assert abs(on_servers - start).max() > 0.1
        for table in tables:
            np.testing.assert_allclose(table.pull(VOCABULARY), on_servers, rtol=0, atol=1e-12)
        for client in clients:
            client.close()


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_trains_as_without_servers(tmp_path, name):
    settings = table_settings("every_id")
    optimizer: OptimizerSettings = OPTIMIZERS[name]
    with servers_of_run(tmp_path, 2, 1, mode="geo") as run:
        client = run.client()
        exchange = GeoExchange(client, gather_alone, worker=0, worker_count=1, steps=4)
        table, reference = exchange.add_table(client.open_table("t", settings)), Table(settings)
        generator = np.random.default_rng(0)
        for _ in range(30):
            ids = generator.choice(VOCABULARY, 6, replace=False)
            gradients = generator.normal(size=(6, 3))
            exchange.begin_step()
            np.testing.assert_allclose(table.pull(ids), reference.pull(ids), rtol=0, atol=1e-12)
            for each in (table, reference):
                each.push(ids, np.ones(6, np.int64), gradients, optimizer)
            exchange.end_step()
        exchange.send()
        exchange.read_all()
        if name != "momentum":  # with it, rows go on moving on the worker that the servers do not hear of
            np.testing.assert_allclose(table.pull(VOCABULARY), reference.pull(VOCABULARY), rtol=0, atol=1e-12)
        client.close()


def test_parameters_are_exchanged_by_the_rule(tmp_path):
    with servers_of_run(tmp_path, 2, 2, mode="geo") as run:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(5, 77, dtype=torch.float64)) for _ in range(2)]
        parameters[1].data.copy_(parameters[0])
        optimizers = [torch.optim.Adam([each], lr=0.1) for each in parameters]
        clients = [run.client(worker) for worker in range(2)]
        exchanges = []
        for worker, client in enumerate(clients):
            exchange = GeoExchange(client, gather_alone, worker=worker, worker_count=2, steps=2)
            exchange.parameters.share([optimizers[worker]], [], [], is_current=True, compares=True)
            exchanges.append(exchange)
        on_servers = parameters[0].detach().numpy().copy()
        references = [DenseWorker(on_servers, on_servers, 2) for _ in range(2)]
        everything, counts = np.arange(5), [0, 0]
        for step in range(12):
            worker = step % 3 % 2
            exchanges[worker].begin_step()
            before = parameters[worker].detach().numpy().copy()
            parameters[worker].grad = torch.randn(5, 77, dtype=torch.float64)
            optimizers[worker].step()
            references[worker].latest += parameters[worker].detach().numpy() - before
            exchanges[worker].end_step()
            counts[worker] += 1
            if counts[worker] % 2 == 0:
                references[worker].send(everything)
                references[worker].take(everything)
            np.testing.assert_allclose(
                parameters[worker].detach().numpy(), references[worker].latest, rtol=0, atol=1e-12
            )
        for exchange in exchanges:
            exchange.send()
        for reference, count in zip(references, counts, strict=True):
            if count % 2:  # the others have trained nothing since their last exchange
                reference.send(everything)
        for exchange, parameter in zip(exchanges, parameters, strict=True):
            exchange.read_all()
            np.testing.assert_allclose(parameter.detach().numpy(), on_servers, rtol=0, atol=1e-12)
        for client in clients:
            client.close()


@pytest.mark.parametrize("settings", [{"admission": ByCount(occurrences=2)}, {"expire_after_steps": 3}])
def test_tables_that_depend_on_steps_are_refused(tmp_path, settings):
    with servers_of_run(tmp_path, 1, 1, mode="geo") as run:
        client = run.client()
        exchange = GeoExchange(client, gather_alone, worker=0, worker_count=1, steps=4)
        with pytest.raises(TableError, match="tables without admission and expiry"):
            exchange.add_table(client.open_table("t", TableSettings(dim=2, **settings)))
        client.close()
