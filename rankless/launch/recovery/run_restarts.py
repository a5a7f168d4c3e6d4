"""Starts a run again: after a failure that its workers cannot heal (`rankless run --restarts N`), or on other hosts.

The script finds its newest complete checkpoint by itself, with `rankless.checkpoints(…).load` or `rankless.load`. A
failure that recurs at the same step is not of chance, and ends the restarts. Steps count from the start of the training
if `rankless.checkpoints` has loaded its position.

A run that has lost a host starts again when another one has taken its place (`spare_hosts`).
"""

from collections.abc import Callable

from rankless.config.run_config import RunConfig
from rankless.launch.recovery.spare_hosts import HostReplacements, RunOnce
from rankless.records.run_json_format import RunFailure, RunSummary


def run_with_restarts(config: RunConfig, run: RunOnce, *, notify: Callable[[str], None]) -> None:
    """Run a script as often as its failures and its hosts ask for.

    Args:
        config: The run, with the number of its restarts.
        run: Runs the script once.
        notify: Shows a line to the user.
    """
    restarts = config.request.restarts
    if not config.replaces_hosts:
        repeat_failed(lambda: run(config, None), restarts=restarts, notify=notify)
        return
    hosts = HostReplacements(config, notify=notify)
    try:
        repeat_failed(lambda: hosts.run(run), restarts=restarts, notify=notify, prepare=hosts.replace_lost)
    finally:
        hosts.close()


def repeat_failed(
    run: Callable[[], RunSummary | None],
    *,
    restarts: int,
    notify: Callable[[str], None],
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Run until an attempt does not fail, or fails as the one before, or is the last one.

    Args:
        run: Makes an attempt and returns its summary, if there is one.
        restarts: How often to start again.
        notify: Shows a line to the user.
        prepare: Called before each further attempt.
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
        prepare()


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
