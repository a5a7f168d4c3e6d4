"""What a process with rows of tables publishes about itself: its counters, its tables, how far workers are ahead."""

import msgspec

SERVER_PAGE_NAME = "rankless-status-of-server"
SERVER_PAGE_BYTES = 1 << 17


class ShardActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One of the virtual shards of a table; a table has 1,024, or fewer if its `max_rows` is small."""

    shard: int
    requested_ids: int
    """Ids that workers have pulled and pushed in it, each as often as in a request."""


class TableActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A table on one server."""

    name: str
    """Its first 200 characters."""
    rows: int
    """Rows on this server."""
    memory_bytes: int
    """Of its rows, and of the maps from ids to rows, on this server."""
    requested_ids: int
    """Ids that workers have pulled and pushed, each as often as in a request."""
    shards: int
    """Virtual shards on this server."""
    hottest_shards: tuple[ShardActivity, ...]
    """At most three, those with the most requested ids first."""


class ServerActivity(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a server's present process. Another process begins anew, except with transactions."""

    process_id: int
    monotonic: float
    """When it published this, in seconds of `time.monotonic`."""
    transactions: int
    """The transactions that it has committed. In the mode `sync` each step of a training is one. In `async` and
    `bounded` each step of each worker is one."""
    requests: int
    """Requests that it has done."""
    pulled_rows: int
    pulled_bytes: int
    """Bytes of the rows."""
    pushed_rows: int
    """Rows whose gradients workers have pushed."""
    pushed_bytes: int
    """Bytes of ids and gradients."""
    refused: dict[str, int]
    """Messages that it has refused, by reason: the 20 most frequent reasons. `other reasons` has the rest."""
    transactions_ahead: tuple[int, ...]
    """Of each worker, its staleness: in the mode `sync` how many complete transactions it has sent after the last one
    that is committed; in `async` and `bounded` how many more than the slowest worker has made. 0 for a worker that has
    left."""
    table_count: int
    """Tables on this server."""
    tables: tuple[TableActivity, ...]
    """At most 32, those with the most requested ids first."""
