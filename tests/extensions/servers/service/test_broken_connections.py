"""Workers continue when connections break: every request is done once, in its order."""

import numpy as np
import pytest
from breaking_forwarder import BreakingForwarder
from served_training import (
    OPTIMIZERS,
    VOCABULARY,
    assert_equal_contents,
    draw_slice,
    push_sum,
    table_settings,
    together,
)
from server_processes import ServersOfRun
from support.jobs import wait_until

from rankless.errors import ServerError
from rankless.extensions.servers.config import ServersConfig
from rankless.extensions.servers.service.client import ServerClient
from rankless.extensions.servers.service.server_connection import ConnectionSettings
from rankless.extensions.servers.tables.table import Table

STEPS = 25


def train(table, client, slices, optimizer) -> None:
    for number, each in enumerate(slices):
        table.push(*each, optimizer)
        client.commit()
        table.pull(VOCABULARY[: 5 + number])
        if number % 7 == 3:
            table.statistics()
            table.contents()


@pytest.mark.ci_sample(1)
@pytest.mark.parametrize("most_bytes", [12_000, 40_000])
@pytest.mark.parametrize("optimizer", ["momentum", "adagrad"])
def test_a_training_over_connections_that_break_is_the_same(tmp_path, optimizer, most_bytes):
    workers, notices = 2, []
    run = ServersOfRun(tmp_path, 2, workers, tcp=True)
    seeds = iter(range(100))
    forwarders = [
        [BreakingForwarder(address, next(seeds), most_bytes) for address in run.config.addresses]
        for _ in range(workers)
    ]
    settings = ConnectionSettings(reconnect_seconds=30, notify=notices.append)
    clients = [
        ServerClient(
            ServersConfig(addresses=tuple(each.address for each in own), token=run.token),
            worker=worker,
            worker_count=workers,
            settings=settings,
        )
        for worker, own in enumerate(forwarders)
    ]
    try:
        tables = together(
            [lambda client=client: client.open_table("t", table_settings("every_id")) for client in clients]
        )
        generator = np.random.default_rng(1)
        steps = [[draw_slice(generator) for _ in range(workers)] for _ in range(STEPS)]
        together(
            [
                lambda worker=worker: train(
                    tables[worker], clients[worker], [slices[worker] for slices in steps], OPTIMIZERS[optimizer]
                )
                for worker in range(workers)
            ]
        )
        reference = Table(table_settings("every_id"))
        for slices in steps:
            push_sum(reference, slices, OPTIMIZERS[optimizer])
        assert_equal_contents(tables[0].contents(), reference.contents())
        breaks = sum(forwarder.breaks for own in forwarders for forwarder in own)
        assert breaks > 3
        assert any("continues after" in notice for notice in notices)
    finally:
        for own in forwarders:
            for forwarder in own:
                forwarder.close()
        for client in clients:
            client.close()
        run.close()


def test_a_worker_that_was_busy_while_its_connection_broke_goes_on(tmp_path):
    """ZeroMQ's sockets connect again by themselves. The worker sends over such a connection before it knows."""
    run = ServersOfRun(tmp_path, 1, 1, tcp=True)
    forwarder = BreakingForwarder(run.config.addresses[0], 0, 1 << 40)
    notices = []
    client = ServerClient(
        ServersConfig(addresses=(forwarder.address,), token=run.token),
        worker=0,
        worker_count=1,
        settings=ConnectionSettings(reconnect_seconds=30, notify=notices.append),
    )
    table, reference = client.open_table("t", table_settings("every_id")), Table(table_settings("every_id"))
    generator = np.random.default_rng(0)
    for connections in range(1, 4):
        each = draw_slice(generator)
        table.push(*each, OPTIMIZERS["adagrad"])
        client.commit()
        reference.push(*each, OPTIMIZERS["adagrad"])
        forwarder.break_all()
        wait_until(lambda connections=connections: forwarder.connections > connections)
    assert_equal_contents(table.contents(), reference.contents(), bound=0)
    assert sum("continues after" in notice for notice in notices) == 3
    client.close()
    forwarder.close()
    run.close()


def test_a_server_that_stays_away_is_named(tmp_path):
    run = ServersOfRun(tmp_path, 2, 1)
    client = run.client(settings=ConnectionSettings(reconnect_seconds=0.5))
    table = client.open_table("t", table_settings("every_id"))
    run.processes[1].process.kill()
    with pytest.raises(ServerError, match="server 1 at"):
        table.statistics()
    client.close()
    run.close()
