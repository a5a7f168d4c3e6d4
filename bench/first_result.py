"""From the command to the first job's result, against torchrun, DDP and torch.compile(backend="aot_eager")."""

from collections.abc import Iterator

from bench.commands import rankless_run, seconds_to_report, torchrun
from bench.pairs import Row, make_row, measure


def rows() -> Iterator[Row]:
    """Yield one row: a GPT of four layers on 2 workers."""
    ours = rankless_run(2, "first_result_rankless.py")
    peer = torchrun(2, "first_result_ddp.py")
    times = measure(lambda: seconds_to_report(ours), lambda: seconds_to_report(peer), pairs=5)
    yield make_row("first_result", peer="torchrun + torch.compile", times=times, aim=1.0)
