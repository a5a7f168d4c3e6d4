"""fleetrun's options for parameter servers, which Rankless recognizes and rejects."""

from collections.abc import Mapping

from rankless.errors import ConfigError
from rankless.launchers.fleetrun.parsed_options import FleetrunFlags

SERVER_FLAGS = (
    "server_num",
    "servers",
    "worker_num",
    "workers",
    "heter_worker_num",
    "heter_workers",
    "heter_devices",
    "coordinator_num",
    "coordinators",
    "http_port",
    "gloo_port",
)
"""As in Paddle, any one of them requests servers."""
SERVER_MODES = ("ps", "ps-heter", "ps-cpu", "ps-gpu")


def given_server_flags(flags: FleetrunFlags) -> Mapping[str, object]:
    """Return the given options for parameter servers under Paddle's names, with their values."""
    values = {name: getattr(flags, name) for name in SERVER_FLAGS}
    found = {f"--{name}": value for name, value in values.items() if value not in (None, "")}
    if flags.run_mode in SERVER_MODES:
        found["--run_mode"] = flags.run_mode
    return found


def require_no_servers(flags: FleetrunFlags) -> None:
    """Raise `ConfigError` if an option requests parameter servers."""
    found = given_server_flags(flags)
    if found:
        raise ConfigError(
            expected="collective training, because Rankless has no parameter servers",
            found=" ".join(f"{name}={value}" for name, value in found.items()),
            fix="omit these options; Rankless runs one process per GPU (--gpus=0,1), or processes on the CPU "
            "(--nproc_per_node=2), on one host or several (--ips=a,b)",
        )
