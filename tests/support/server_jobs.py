"""Starts jobs whose parameter servers are stand-ins, and checks what they leave."""

import subprocess
from pathlib import Path

from support.jobs import is_alive, kill_job, rankless, read_process_ids, start_rankless, wait_until
from support.servers import SERVE, install_server

from rankless.records.run_json_format import RunSummary, decode_run_summary

WAITING = """
import json, os, signal
addresses = json.loads(os.environ["RANKLESS_WORKER_PLAN"])["roles"]["servers"]["addresses"]
with open(f"addresses{os.environ['RANK']}", "w") as file:
    file.write(" ".join(addresses))
with open(f"rank{os.environ['RANK']}.pid", "w") as file:
    file.write(f"{os.getpid()}\\n")
signal.pause()
"""


def run(folder: Path, script: str, *options: str, server: str = SERVE, **environment: str):
    (folder / "script.py").write_text(script)
    variables = install_server(folder, server) | environment
    return rankless("run", "--no-warm", *options, "script.py", folder=folder, **variables)


def start(folder: Path, *options: str, script: str = WAITING, server: str = SERVE) -> subprocess.Popen[str]:
    """Start a job, and wait until its two servers and its two workers are there."""
    (folder / "script.py").write_text(script)
    command = ("run", "--no-warm", "--servers", "2", "--workers", "2", *options, "script.py")
    job = start_rankless(*command, folder=folder, **install_server(folder, server))
    wait_until(lambda: len(read_process_ids(folder)) == 4 or job.poll() is not None)
    return job


def finish(job: subprocess.Popen[str], folder: Path) -> str:
    """Wait until the job has ended, check that it has left nothing, and return its messages."""
    try:
        _, messages = job.communicate(timeout=60)
    finally:
        kill_job(job)
    require_nothing_left(folder)
    return messages


def require_nothing_left(folder: Path) -> None:
    assert not [name for name, process_id in read_process_ids(folder).items() if is_alive(process_id)]
    for address in (folder / "addresses0").read_text().split() if (folder / "addresses0").exists() else ():
        assert not Path(address.removeprefix("ipc://")).parent.exists()


def summary_of(folder: Path) -> RunSummary:
    return decode_run_summary((folder / "log" / "latest" / "run.json").read_bytes())
