"""From the command to the first job's result.

- A GPT on 2 workers, against torchrun, DDP and torch.compile(backend="aot_eager").
- Two tables on 2 servers with 4 workers, against the same script without servers, where every worker has all rows.
"""

from collections.abc import Iterator

from bench.commands import rankless_run, seconds_to_report, torchrun
from bench.pairs import Row, make_row, measure


def rows() -> Iterator[Row]:
    """Yield one row for a GPT of four layers, and one for tables."""
    ours = rankless_run(2, "first_result_rankless.py")
    peer = torchrun(2, "first_result_ddp.py")
    times = measure(lambda: seconds_to_report(ours), lambda: seconds_to_report(peer), pairs=5)
    yield make_row("first_result", peer="torchrun + torch.compile", times=times, aim=1.0)
    tables = "first_batch_tables.py"
    served, collective = rankless_run(4, tables, servers=2), rankless_run(4, tables)
    times = measure(lambda: seconds_to_report(served), lambda: seconds_to_report(collective), pairs=5)
    yield make_row("first_batch_2_servers", peer="without servers", times=times, aim=1.5)
