"""The two simulated hosts are separate in network, names and limits, and leave nothing behind."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.hosts import two_hosts
from support.jobs import wait_until

pytestmark = pytest.mark.slow


def test_two_hosts_reach_each_other_by_ssh_until_the_link_is_down(tmp_path: Path):
    with two_hosts(tmp_path, before={"b": "ulimit -n 100"}, logins={"b": {"COLOUR": "red"}}) as hosts:
        words = "hostname; echo $COLOUR; ulimit -n; cat /etc/hosts"
        there = hosts.run("a", ["ssh", "-o", "BatchMode=yes", "b", "--", words])
        assert there.stdout == "b\nred\n100\n127.0.0.1 localhost\n10.77.0.1 a\n10.77.0.2 b\n", there.stderr
        hosts.names("b", "127.0.1.1 b\n")
        assert hosts.run("b", ["cat", "/etc/hosts"]).stdout == "127.0.1.1 b\n"
        hosts.link("b", up=False)
        cut = hosts.run("a", ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1", "10.77.0.2", "true"])
        assert cut.returncode == 255
        left = hosts.start("b", ["sleep", "600"])
        wait_until(lambda: psutil.Process(left.pid).name() == "sleep")  # no longer `ip` on its way there
        namespaces = [hosts.namespace(name) for name in "abn"]
    assert left.wait(timeout=5) == -9
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in namespaces)
    assert not any((Path("/etc/netns") / name).exists() for name in namespaces)


def test_a_firewall_drops_all_but_its_open_ports(tmp_path: Path):
    with two_hosts(tmp_path) as hosts:
        hosts.firewall("b")
        assert hosts.run("a", ["ssh", "-o", "BatchMode=yes", "b", "echo", "in"]).stdout == "in\n"
        code = "import socket; socket.create_connection(('b', 4000), timeout=0.3)"
        assert "TimeoutError" in hosts.run("a", ["python3", "-c", code]).stderr


def test_the_next_test_removes_the_hosts_of_a_killed_one(tmp_path: Path):
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    namespace = f"rd-{gone.stdout.strip()}-a"
    subprocess.run(["ip", "netns", "add", namespace], check=False, capture_output=True)
    with two_hosts(tmp_path, sshd=()) as hosts:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert namespace not in listed
    assert hosts.namespace("a") in listed
