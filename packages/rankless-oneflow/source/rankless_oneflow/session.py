"""What the jobs of a script share: the devices, the variables, and whether the variables have values."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import rankless

from .graph import Variables, VariableSpec
from .missing import refuse

if TYPE_CHECKING:
    from .jobs import GlobalFunction


class Session:
    """The present session. It starts when variables, jobs or checkpoints are first used."""

    def __init__(self) -> None:
        self._devices: int | None = None
        self._machines: list[dict[str, str]] = []
        self._port: int | None = None
        self._started = False
        self._has_values = False
        self._jobs: list[GlobalFunction] = []
        self._specs: dict[str, VariableSpec] = {}
        self.variables = Variables()

    def set_devices(self, count: int) -> None:
        """Set the number of devices of each machine."""
        self._require_not_started("flow.config.gpu_device_num")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise refuse("flow.config.gpu_device_num", f"{count!r}", "pass a number of devices from 1 up")
        self._devices = count

    def set_machines(self, addresses: Sequence[str]) -> None:
        """Set the addresses of the machines."""
        self._require_not_started("flow.env.machine")
        self._machines = [{"addr": address} for address in addresses]

    def set_port(self, port: int) -> None:
        """Set the port on which the machines meet."""
        self._require_not_started("flow.env.ctrl_port")
        self._port = port

    def add_job(self, job: "GlobalFunction") -> None:
        """Add a job."""
        if any(job.name == other.name for other in self._jobs):
            raise refuse("flow.global_function", f"a second job {job.name!r}", "give the function another name")
        self._jobs.append(job)

    def start(self) -> None:
        """Start the workers, if the script wants several and is not one of them, and build all jobs."""
        if not self._started:
            if self._devices is not None or len(self._machines) > 1:
                several = len(self._machines) > 1
                rankless.configure(
                    devices_per_host=self._devices or 1,
                    hosts=self._machines if several else None,
                    port=self._port if several else None,
                )
            if torch.initial_seed() == _SEED_AT_IMPORT:
                torch.manual_seed(0)
            self._started = True
        for job in self._jobs:
            job.build()

    def require_values(self, job: str, where: str) -> None:
        """Raise `ConfigError` unless the variables have values."""
        if not self._has_values and self._specs:
            fix = "call flow.train.CheckPoint().init() to begin, or .load(path) to go on"
            raise refuse(f"job {job!r}", "a call while its variables have no values", fix, where)

    def initialize(self) -> None:
        """Give all variables their initial values, and begin to count steps."""
        self.start()
        with torch.no_grad():
            for spec in self._specs.values():
                found = self.variables.find(spec.name)
                found.copy_(spec.initializer.make_values(spec.name, spec.shape, spec.dtype))
        for job in self._jobs:
            job.reset()
        self._has_values = True

    def save(self, path: str) -> None:
        """Write the variables, the states of optimizers and the numbers of steps to a folder."""
        self.start()
        if not self._has_values:
            raise refuse("check_point.save", "a call before check_point.init()", "call check_point.init() first")
        rankless.save(path, **self._list_states())

    def load(self, path: str) -> None:
        """Read what `save` has written, of the variables and jobs of this script."""
        self.start()
        rankless.load(path, **self._list_states())
        self._has_values = True

    def add_variables(self, specs: Sequence[VariableSpec], where: str) -> Variables:
        """Return the variables of a job. Those of other jobs under the same names are the same ones."""
        own = Variables()
        for spec in specs:
            known = self._specs.get(spec.name)
            if known is None:
                self._specs[spec.name] = spec
                self.variables.add(spec.name, _make_variable(spec))
            elif (known.shape, known.dtype) != (spec.shape, spec.dtype):
                found = f"variable {spec.name!r} of {list(spec.shape)}, which is {list(known.shape)} in another job"
                raise refuse("flow.layers", found, "give the layer another name=, or the same sizes", where)
            found_variable = self.variables.find(spec.name)
            found_variable.requires_grad_(found_variable.requires_grad or spec.is_trainable)  # of any job
            own.add(spec.name, found_variable)
        return own

    def _list_states(self) -> dict[str, Any]:
        variables = {name: _StoredVariable(self.variables.find(name)) for name in self._specs}
        return {**variables, **{key: state for job in self._jobs for key, state in job.list_states().items()}}

    def _require_not_started(self, name: str) -> None:
        if self._started:
            fix = "move the call up, for example right below `if __name__ == '__main__':`"
            raise refuse(name, "a call after the first job, checkpoint or check_point.init()", fix)


class _StoredVariable:
    """A variable as an object of a checkpoint."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self._value.detach()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        value = state["value"]
        if value.shape != self._value.shape:
            found = f"shape {list(value.shape)} in the checkpoint for a variable of shape {list(self._value.shape)}"
            raise refuse("check_point.load", found, "load a checkpoint of the same network")
        with torch.no_grad():
            self._value.copy_(value)


def _make_variable(spec: VariableSpec) -> nn.Parameter:
    values = spec.initializer.make_values(spec.name, spec.shape, spec.dtype)
    values = values.to("cuda" if torch.cuda.is_available() else "cpu")
    return nn.Parameter(values, requires_grad=spec.is_trainable)


_SEED_AT_IMPORT = torch.initial_seed()
"""A script that has not seeded PyTorch's generator since gets the seed 0: dropout is the same on all workers, and in
each run."""

_SESSIONS = [Session()]


def current_session() -> Session:
    """Return the present session."""
    return _SESSIONS[-1]


def reset_session() -> None:
    """Begin a new session: for tests that run several scripts in one process."""
    _SESSIONS[-1] = Session()
