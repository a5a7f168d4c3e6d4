"""Two hosts whose agents reach each other, while a firewall drops what the ranks need."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.hosts import Hosts, two_hosts

pytestmark = pytest.mark.slow

CONTROL_PORT = 9988
SCRIPT = """
import os, torch, torch.distributed as dist
print("started", flush=True)
dist.init_process_group("gloo")  # here
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item())
dist.destroy_process_group()
"""


def run_on_both(hosts: Hosts, folder: Path, commands: Sequence[Sequence[str]], **environment: str):
    """Run a command on each host; return exit codes, standard outputs and standard errors."""
    (folder / "script.py").write_text(SCRIPT)
    lines = [[sys.executable, "-m", "rankless", *command] for command in commands]
    jobs = [hosts.start(name, line, cwd=folder, env=environment) for name, line in zip("ab", lines, strict=True)]
    texts = [job.communicate(timeout=120) for job in jobs]
    return [job.returncode for job in jobs], [out for out, _ in texts], [err for _, err in texts]


def run_commands(hosts: Hosts, *options: str) -> list[list[str]]:
    listed = ",".join(f"{address}:1" for address in hosts.addresses)
    return [["run", "--hosts", listed, "--no-ssh", "--insecure", *options, "script.py"]] * 2


def torchrun_commands(hosts: Hosts) -> list[list[str]]:
    shared = [
        "--nnodes=2",
        "--nproc-per-node=1",
        f"--master-addr={hosts.addresses[0]}",
        f"--master-port={CONTROL_PORT}",
    ]
    return [["torchrun", *shared, f"--node-rank={rank}", "script.py"] for rank in (0, 1)]


@pytest.mark.parametrize("command", ["run", pytest.param("torchrun", marks=pytest.mark.exhaustive)])
def test_dropped_ports_are_named_before_the_job_starts(command: str, tmp_path: Path):
    with two_hosts(tmp_path, sshd=()) as hosts:
        hosts.firewall("b", open_ports=(22, CONTROL_PORT))
        commands = run_commands(hosts) if command == "run" else torchrun_commands(hosts)
        token = tmp_path / "token"
        token.write_text("0" * 64)
        codes, outputs, errors = run_on_both(hosts, tmp_path, commands, RANKLESS_TOKEN_FILE=str(token))
    assert codes == [2, 2], errors
    assert outputs == ["", ""]
    for error in errors:
        assert "expected: ports that the ranks need to be open between the hosts" in error
        # torchrun's options do not name the other hosts, which go by their own names.
        assert re.search(r"10\.77\.0\.1 → (b, )?10\.77\.0\.2:", error)
        assert "(a free port): no answer, so a firewall drops packets" in error
        assert "(MASTER_PORT): no answer" in error
        assert re.search(r"open all TCP ports between 10\.77\.0\.1 and (b|10\.77\.0\.2), not only 9988", error)


@pytest.mark.exhaustive
def test_a_rank_that_cannot_connect_in_its_rendezvous_is_named_and_the_job_ends(tmp_path: Path):
    with two_hosts(tmp_path, sshd=()) as hosts:
        hosts.firewall("a", open_ports=(22, CONTROL_PORT))
        commands = run_commands(hosts, "--hang-timeout", "5")
        codes, outputs, errors = run_on_both(hosts, tmp_path, commands, RANKLESS_PORT_TEST="0")
    assert codes == [1, 1], errors
    assert outputs[0].startswith("started\n")
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "# here" in text)
    assert "rank 1 on 10.77.0.2 did not arrive: it gets no answer from 10.77.0.1:" in errors[0]
    assert f"in init_process_group at script.py:{line} (a firewall drops packets, or the address is wrong)" in errors[0]
    assert f"rank 0 waits in init_process_group at script.py:{line}" in errors[0]


@pytest.mark.exhaustive
def test_without_a_firewall_the_ranks_start_and_every_tried_port_is_free_again(tmp_path: Path):
    with two_hosts(tmp_path, sshd=()) as hosts:
        codes, outputs, errors = run_on_both(hosts, tmp_path, run_commands(hosts))
    assert codes == [0, 0], errors
    assert "sum 2.0" in outputs[0]
