"""Which server has an id: servers hold ranges of a table's virtual shards, by the upper bits of mixed ids.

Note [ranges of shards]: server k of S holds the shards from `shards * k // S` to before `shards * (k + 1) // S`. Shards
are the table's own: usually 1,024, fewer if `max_rows` is small. A cap of rows is divided over these shards and not
over servers, so the number of servers decides nothing. With fewer shards than servers, some servers hold no rows.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.tables.compiled_functions import compiled
from rankless.extensions.servers.tables.id_map import mix, shard_of


class RoutedIds(NamedTuple):
    """Ids by server.

    Args:
        ids: The ids, those of server 0 first, each server's in their order, int64, of shape (n,).
        places: Where each was, int64, of shape (n,).
        ends: Server k has those from `ends[k]` to before `ends[k + 1]`, int64, of shape (servers + 1,).
    """

    ids: NDArray[np.int64]
    places: NDArray[np.int64]
    ends: NDArray[np.int64]


def first_shard(server: int, servers: int, shard_bits: int) -> int:
    """Return the first virtual shard of a server; see Note [ranges of shards]."""
    return (server << shard_bits) // servers


def servers_of_shards(servers: int, shard_bits: int) -> NDArray[np.int64]:
    """Return the server of each shard."""
    firsts = [first_shard(server, servers, shard_bits) for server in range(servers + 1)]
    return np.repeat(np.arange(servers, dtype=np.int64), np.diff(firsts))


@compiled
def route_ids(ids: NDArray[np.int64], shard_bits: int, servers: NDArray[np.int64], server_count: int) -> RoutedIds:
    """Return ids by server, where `servers` has the server of each shard."""
    count = ids.shape[0]
    chosen = np.empty(count, np.int64)
    ends = np.zeros(server_count + 1, np.int64)
    for number in range(count):
        server = servers[shard_of(mix(ids[number]), shard_bits)]
        chosen[number] = server
        ends[server + 1] += 1
    for server in range(server_count):
        ends[server + 1] += ends[server]
    following = ends.copy()
    routed, places = np.empty(count, np.int64), np.empty(count, np.int64)
    for number in range(count):
        position = following[chosen[number]]
        following[chosen[number]] += 1
        routed[position] = ids[number]
        places[position] = number
    return RoutedIds(routed, places, ends)


@compiled
def scatter_rows(rows: NDArray[np.floating], places: NDArray[np.int64], target: NDArray[np.floating]) -> None:
    """Write each row, of shape (n, dim), to its place in `target`."""
    for number in range(places.shape[0]):
        row = target[places[number]]
        for column in range(rows.shape[1]):
            row[column] = rows[number, column]


@compiled
def are_ids_of_shards(ids: NDArray[np.int64], shard_bits: int, first: int, stop: int) -> bool:
    """Return whether all ids belong to the shards from `first` to before `stop`."""
    for number in range(ids.shape[0]):
        shard = shard_of(mix(ids[number]), shard_bits)
        if shard < first or shard >= stop:
            return False
    return True
