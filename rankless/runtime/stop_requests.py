"""Requests to stop that reach a script from outside, for `rankless.stopping` and for saves before the end.

A scheduler that wants a machine back, or a user, sends SIGTERM to an agent, which sends it to its workers. The first
question of a script installs a handler of SIGTERM, and in a job of Slurm of the signals that warn of its end. The
handler only takes note, because a signal reaches each rank at another line. When the script asks, the ranks tell each
other, so all of them have the same answer at the same step. Where steps are short, they do so every few calls.
"""

import os
import signal
import threading
import time
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from rankless.collectives.mesh_collectives import all_reduce_maximum
from rankless.config.cluster_variables import list_warning_signals
from rankless.config.environment import snapshot
from rankless.config.process_configs import WorkerConfig
from rankless.context.world import World
from rankless.errors import ConfigError
from rankless.parallel.mesh import Mesh
from rankless.records.events import StopsHeeded
from rankless.runtime.fork_replacement import IN_REPLACEMENT

SECONDS = 0.2
"""How long ranks may not tell each other, if steps take as long as before."""
MOST_CALLS = 8
"""After how many calls they do so at the latest: later steps may take longer."""


class StopRequests:
    """Whether somebody outside has asked this run to stop, with the same answer on all ranks."""

    def __init__(self) -> None:
        self.is_watching = False
        """Whether the script has asked once, so that a signal does not end it."""
        self.has_answered = False
        """Whether the script knows that it shall stop."""
        self._is_requested = False
        self._process_id = 0
        """The process that watches. One that it forks ends by a signal."""
        self._handlers: dict[int, Any] = {}
        """What the script had installed before, by signal."""
        self._period = self._calls_left = 1
        """After how many calls the ranks tell each other again, and how many of these are left."""
        self._exchanged_at = 0.0
        self._cpu_meshes: dict[dist.ProcessGroup, Mesh] = {}

    def watch(self, world: World) -> None:
        """Take note of signals from now on. The script's own handlers are called too.

        Args:
            world: Tells the agent.

        Raises:
            ConfigError: Another thread than the main one makes the first call.
        """
        if self.is_watching:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                expected="the first rankless.stopping() in the main thread, where Python handles signals",
                found=f"a call in the thread {threading.current_thread().name}",
                fix="call it once in the main thread before",
            )
        self.is_watching, self._process_id = True, os.getpid()
        IN_REPLACEMENT.call(self._watch_in_replacement)
        self._install(signal.SIGTERM)
        world.send_record(StopsHeeded(rank=world.numbering.own, time_ns=time.monotonic_ns()))
        for number in list_warning_signals(snapshot()):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._install(number)

    def ask(self, world: World) -> bool:
        """Return whether the run shall stop: on all ranks, if any of them knows. Collective until the answer is yes."""
        self.watch(world)
        self._calls_left -= 1
        if not self.has_answered and self._calls_left <= 0:
            self.has_answered, self._period = world.run_for_all(self._tell)
            self._calls_left, self._exchanged_at = self._period, time.monotonic()
        return self.has_answered

    def _tell(self, world: World) -> tuple[bool, int]:
        """Return whether any rank knows of a request, and the shortest period that any of them wants."""
        world.workers.check_sync_point("rankless.stopping()")
        seconds = max(time.monotonic() - self._exchanged_at, 1e-9) / self._period
        period = max(1, min(2 * self._period, MOST_CALLS, int(SECONDS / seconds)))
        mesh = self._choose_mesh(world.workers)
        own = torch.tensor([int(self._is_requested), -period], device=mesh.device)
        requested, negated = all_reduce_maximum(own, among=mesh).tolist()
        return bool(requested), -int(negated)

    def _choose_mesh(self, mesh: Mesh) -> Mesh:
        """Return the mesh, with a group for tensors on the CPU: a question must not wait for what a GPU still does."""
        if mesh.group is None or mesh.device.type == "cpu":
            return mesh
        if mesh.group not in self._cpu_meshes:
            group = dist.new_group(backend="gloo")
            self._cpu_meshes[mesh.group] = replace(mesh, device=torch.device("cpu"), group=group)
        return self._cpu_meshes[mesh.group]

    def _watch_in_replacement(self, config: WorkerConfig) -> None:
        self._process_id = config.process_id or 0

    def _install(self, number: int) -> None:
        self._handlers[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._handlers[number]
        if os.getpid() != self._process_id:
            signal.signal(number, signal.SIG_DFL if before is None else before)
            os.kill(os.getpid(), number)
            return
        self._is_requested = True
        if callable(before):
            before(number, frame)


REQUESTS = StopRequests()
"""Of this process: signals are not of one world or another."""
