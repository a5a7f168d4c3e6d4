"""Starts a run again after a failure that its workers cannot heal: `rankless run --restarts N`.

The script finds its newest complete checkpoint by itself, with `rankless.checkpoints(…).load` or `rankless.load`. A
failure that recurs at the same step is not of chance, and ends the restarts. Steps count from the start of the training
if `rankless.checkpoints` has loaded its position.
"""

from collections.abc import Callable

from rankless.records.run_json_format import RunFailure, RunSummary


def run_with_restarts(run: Callable[[], RunSummary | None], *, restarts: int, notify: Callable[[str], None]) -> None:
    """Run until an attempt does not fail, or fails as the one before, or is the last one.

    Args:
        run: Runs the script once and returns the summary of the attempt: none on hosts other than the first one, and
            where no worker has started.
        restarts: How often to start again.
        notify: Shows a line to the user.
    """
    before: tuple[RunFailure | None, int | None] | None = None
    for restart in range(1, restarts + 2):
        summary = run()
        if summary is None or summary.outcome != "failed" or restart > restarts:
            return
        steps = _find_step(summary)
        if (summary.failure, steps) == before:
            notify(f"not started again: it has failed twice in the same way, after {_count_steps(steps)}")
            return
        before = summary.failure, steps
        notify(f"{_describe(summary)}; started again, restart {restart} of {restarts}")


def _describe(failed: RunSummary) -> str:
    """Return why and when an attempt has failed."""
    failure = failed.failure
    after = f"after {_count_steps(_find_step(failed))}"
    if failure is None:
        return f"the run failed {after}"
    name = f"host {failure.host}" if not failure.role else f"{failure.role} {failure.number}"
    return f"{name if failure.rank is None else f'rank {failure.rank}'} {failure.error.rstrip('.')} {after}"


def _find_step(failed: RunSummary) -> int | None:
    """Return after how many steps of the training an attempt has failed."""
    return failed.steps if failed.steps is None else failed.steps + (failed.resumed_step or 0)


def _count_steps(steps: int | None) -> str:
    return "no step" if not steps else "1 step" if steps == 1 else f"{steps:,} steps"
