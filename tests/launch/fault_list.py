"""The list of faults that test_faults.py injects."""

import os
import signal
from collections.abc import Callable

from faults import Fault, Job
from support.jobs import wait_until


def _signal(name: str, number: int) -> Callable[[Job], None]:
    """Return an action that sends a signal to a host's agent."""
    return lambda job: os.kill(job.find_agent_and_fork_server(name)[0].pid, number)


def _kill_parent(job: Job) -> None:
    job.find_agent_and_fork_server("a")[1].kill()


def _kill_host(name: str) -> Callable[[Job], None]:
    """Return an action that kills all processes of the job on a host and cuts its network, as a power failure does."""

    def kill(job: Job) -> None:
        assert job.hosts is not None
        agent, parent = job.find_agent_and_fork_server(name)
        job.hosts.link("b", up=False)
        for process in [agent, parent, *parent.children(recursive=True)]:
            process.kill()

    return kill


def _cut(job: Job) -> None:
    assert job.hosts is not None
    job.hosts.link("b", up=False)


def _interrupt_twice(job: Job) -> None:
    agent, _ = job.find_agent_and_fork_server("a")
    os.kill(agent.pid, signal.SIGINT)
    wait_until(lambda: (job.folder / "asked.pid").exists())
    os.kill(agent.pid, signal.SIGINT)


HANG_TIMEOUT = 4.0
"""The job ends after this timeout, in seconds. The goal counts from its end."""
HOLDING_THE_LOCK = "ctypes.PyDLL(None).sleep(600)"
IGNORING = "for each in (signal.SIGINT, signal.SIGTERM): signal.signal(each, signal.SIG_IGN)"
RAISED = "rank {rank}{host} raised ValueError: tired"

FAULTS = [
    Fault(name="raises", action="raise ValueError('tired')", expected=RAISED, code=1),
    Fault(
        name="leaves its group, cleans up for a second, then raises",
        action="try:\n    raise ValueError('tired')\nfinally:\n    dist.destroy_process_group(); time.sleep(1)",
        expected=RAISED,
        code=1,
        least_workers=2,
    ),
    Fault(
        name="raises deep down",
        action="def deep(n):\n    if not n: raise ValueError('tired')\n    deep(n - 1)\ndeep(300)",
        expected=RAISED,
        code=1,
    ),
    Fault(
        name="raises while others hold the interpreter lock",
        action="raise ValueError('tired')",
        others=HOLDING_THE_LOCK,
        expected=RAISED,
        code=1,
        least_workers=2,
    ),
    Fault(
        name="raises while others are stopped",
        action="time.sleep(0.2); raise ValueError('tired')",
        others="os.kill(os.getpid(), signal.SIGSTOP)",
        expected=RAISED,
        code=1,
        least_workers=2,
    ),
    Fault(
        name="raises while others ignore signals",
        action="raise ValueError('tired')",
        everywhere=IGNORING,
        others="while True: time.sleep(1)",
        expected=RAISED,
        code=1,
        least_workers=2,
    ),
    Fault(
        name="raises, and a daemon in a session of its own is left",
        action="if os.fork() == 0:\n    os.setsid(); mark('daemon', os.getpid()); time.sleep(600)\n"
        "time.sleep(0.2); raise ValueError('tired')",
        expected=RAISED,
        code=1,
    ),
    Fault(
        name="runs out of memory",
        action="resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33)); kept = [bytearray(1 << 34)]",
        expected="rank {rank}{host} raised MemoryError",
        code=1,
    ),
    Fault(
        name="exits 0 while others need it",
        action="sys.exit(0)",
        expected="rank {rank}{host} ended its script while other ranks still needed it",
        code=1,
        least_workers=2,
    ),
    Fault(
        name="exits 0 without a word while others need it",
        action="os._exit(0)",
        expected="rank {rank}{host} ended its script while other ranks still needed it",
        code=1,
        least_workers=2,
    ),
    Fault(
        name="destroys its group and goes on",
        action="dist.destroy_process_group(); time.sleep(600)",
        expected="rank {rank}{host} destroyed its process group",
        code=1,
        least_workers=2,
    ),
    Fault(name="exits with a code", action="sys.exit(7)", expected="rank {rank}{host} left with exit code 7", code=7),
    Fault(
        name="exits with a text",
        action="sys.exit('no data')",
        expected="rank {rank}{host} left with exit code 1",
        code=1,
    ),
    Fault(
        name="exits without a word", action="os._exit(9)", expected="rank {rank}{host} ended with exit code 9", code=9
    ),
    Fault(
        name="is killed",
        action="os.kill(os.getpid(), signal.SIGKILL)",
        expected="rank {rank}{host} was killed by signal 9",
        code=137,
    ),
    Fault(
        name="is terminated",
        action="os.kill(os.getpid(), signal.SIGTERM)",
        expected="rank {rank}{host} was killed by signal 15",
        code=143,
    ),
    Fault(
        name="segfaults", action="ctypes.string_at(0)", expected="rank {rank}{host} was killed by signal 11", code=139
    ),
    Fault(name="aborts", action="os.abort()", expected="rank {rank}{host} was killed by signal 6", code=134),
    Fault(
        name="has a bus error",
        action="os.kill(os.getpid(), signal.SIGBUS)",
        expected="rank {rank}{host} was killed by signal 7",
        code=135,
    ),
    Fault(
        name="is stopped (SIGSTOP), and the others wait for it (--hang-timeout 4)",
        action="os.kill(os.getpid(), signal.SIGSTOP)",
        expected="rank {rank}{host} did not arrive: it is stopped",
        code=1,
        least_workers=2,
        hang_timeout_seconds=HANG_TIMEOUT,
        limit_seconds=HANG_TIMEOUT + 2,
    ),
    Fault(
        name="holds the interpreter lock, and the others wait for it (--hang-timeout 4)",
        action="end, _ = os.pipe(); ctypes.PyDLL(None).read(end, ctypes.create_string_buffer(1), 1)",
        expected="rank {rank}{host} did not arrive: it is at",
        code=1,
        least_workers=2,
        hang_timeout_seconds=HANG_TIMEOUT,
        limit_seconds=HANG_TIMEOUT + 2,
    ),
    Fault(name="agent killed", outside=_signal("a", signal.SIGKILL), expected="", code=-9, hosts=(1,)),
    Fault(name="agent terminated", outside=_signal("a", signal.SIGTERM), expected="ended by SIGTERM", code=143),
    Fault(name="terminal closed", outside=_signal("a", signal.SIGHUP), expected="ended by SIGHUP", code=129),
    Fault(name="Ctrl-C", outside=_signal("a", signal.SIGINT), expected="ended by SIGINT", code=130),
    Fault(
        name="Ctrl-C twice, workers clean up for long",
        outside=_interrupt_twice,
        everywhere="def asked(*_): mark('asked', os.getpid()); time.sleep(600)\nsignal.signal(signal.SIGINT, asked)",
        expected="ended by SIGINT",
        code=130,
    ),
    Fault(
        name="workers' parent killed",
        outside=_kill_parent,
        expected="the process that starts the workers|ended with -9",
        code=2,
        hosts=(1,),
    ),
    Fault(
        name="host 0's agent killed",
        outside=_signal("a", signal.SIGKILL),
        expected="host 0, {a}, was lost",
        code=1,
        hosts=(2,),
    ),
    Fault(
        name="host 1's agent killed",
        outside=_signal("b", signal.SIGKILL),
        expected="host {b} was lost",
        code=1,
        hosts=(2,),
    ),
    Fault(
        name="Ctrl-C on host 1",
        outside=_signal("b", signal.SIGINT),
        expected=r"host {b} received SIGINT",
        code=130,
        hosts=(2,),
    ),
    Fault(
        name="host 1 loses its power",
        outside=_kill_host("b"),
        expected="host {b} was lost: no heartbeat",
        code=1,
        hosts=(2,),
        limit_seconds=5,
    ),
    Fault(
        name="host 0 loses its power",
        outside=_kill_host("a"),
        expected="host 0, {a}, was lost: no heartbeat",
        code=1,
        hosts=(2,),
        limit_seconds=5,
    ),
    Fault(
        name="link down in a collective",
        outside=_cut,
        expected="host {b} was lost: no heartbeat",
        code=1,
        hosts=(2,),
        limit_seconds=5,
    ),
]
