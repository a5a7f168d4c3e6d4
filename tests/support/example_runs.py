"""Runs an example that writes its losses and metrics as JSON, on one device, on several workers, and with servers."""

import json
from pathlib import Path
from typing import Any

from support.warm_runs import rankless

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO_WORKERS = ("-n", "2")
WITH_SERVERS = ("--servers", "2", "--workers", "2")
WITH_HETEROGENEOUS = ("--servers", "2", "--workers", "3", "--heter-workers", "2")


def report_of(example: str, folder: Path, *options: str, where: tuple[str, ...] = ("-n", "1")) -> dict[str, Any]:
    """Run an example in float64, and return what it reports."""
    command = ("run", *where, "--no-progress", str(EXAMPLES / f"{example}.py"), "--dtype", "float64")
    done = rankless(*command, "--report", "report.json", *options, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report
