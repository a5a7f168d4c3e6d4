"""What tests read of `rankless verify`: the report on a comparison, and the verdict in a command's output."""

from dataclasses import replace

from rankless.verify.decision_report import VerifyReport, make_report
from rankless.verify.differences_beyond_tolerance import Comparison
from rankless.verify.run_and_decide import classify


def report_on(comparison: Comparison, *, workers: int) -> VerifyReport:
    """Return the report that `verify` would make if this comparison had to decide by itself."""
    return make_report(replace(classify(comparison), comparison=comparison), workers=workers)


def read_verdict(output: str) -> str:
    """Return the verdict, which comes first on standard output: two lines, or one if nothing was decided."""
    lines = output.splitlines()
    return lines[0] if lines[0].startswith("could not be decided") else "\n".join(lines[:2])
