import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rankless.config.run_config import AgreedProcesses
from rankless.errors import LaunchError
from rankless.launch.extension_process_role import ProcessRole, WorkerContent
from rankless.launch.rendezvous.host_consistency import RoleFacts
from rankless.launch.signal_reader import RendezvousInterrupted
from rankless.records.events import NO_RANK, ProcessExited
from rankless.records.live_run import ProcessRow


def make_role(config):
    return Clocks(config)


class Clocks(ProcessRole):
    name = "clocks"

    def __init__(self, config):
        super().__init__(config)
        self._options = config.request.options["clocks"]
        self._folder = tempfile.TemporaryDirectory(prefix="clocks-")
        self._processes, self._reported, self._logs = [], set(), []

    def reserve(self):
        addresses = tuple(f"{self._folder.name}/{index}" for index in range(self._options["clocks"]))
        return AgreedProcesses(addresses=addresses, hosts=(0,) * len(addresses), role="clock")

    def describe(self):
        return RoleFacts(requested=(f"{self._options['clocks']} on host 0",))

    def agree(self, hosts):
        return self.reserve()

    def answer(self, outward, content):
        return None

    def list_ports(self, agreed):
        return []

    def attach(self, host, folder):
        agreed = host.start.roles[self.name]
        self._addresses = agreed.addresses if host.host_index == 0 else ()
        self._logs = [Path(folder, f"clock{index}.log") for index in range(len(self._addresses))]
        return WorkerContent(roles={self.name: {"addresses": self._addresses}})

    def start(self, interrupts, *, on_wait):
        for address, log in zip(self._addresses, self._logs, strict=True):
            command = [sys.executable, "-m", "clocks.clock", address, str(self._options.get("clock-lifetime", 0))]
            with open(log, "wb") as file:
                self._processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file))
        deadline = time.monotonic() + 30
        for process in self._processes:
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while not selector.select(0.1) and time.monotonic() < deadline:
                    on_wait()
                    for number in interrupts.read():
                        raise RendezvousInterrupted(number)
            if time.monotonic() >= deadline or process.stdout.readline() != b"ready\n":
                raise LaunchError(expected="a clock to start", found="none", fix="read its log")

    def list_rows(self):
        return [
            ProcessRow(
                role="clock", index=index, process_id=process.pid, address=address, log_file=os.path.relpath(log)
            )
            for index, (process, address, log) in enumerate(
                zip(self._processes, self._addresses, self._logs, strict=True)
            )
        ]

    def poll(self):
        ended = {index for index, process in enumerate(self._processes) if process.poll() is not None}
        new, self._reported = ended - self._reported, ended
        return [
            ProcessExited(
                rank=NO_RANK,
                time_ns=time.monotonic_ns(),
                role="clock",
                number=index,
                exit_code=self._processes[index].returncode,
            )
            for index in sorted(new)
        ]

    def list_process_ids(self):
        return frozenset(process.pid for process in self._processes)

    def stop(self, on_wait):
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
            process.stdout.close()

    def release(self):
        self._folder.cleanup()
