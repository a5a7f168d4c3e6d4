"""fleetrun's options for parameter servers: known, and not there yet."""

from collections.abc import Mapping

from rankless.errors import ConfigError
from rankless.launchers.fleetrun.options import FleetrunFlags

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
"""As in Paddle, one of them is enough to ask for servers."""
SERVER_MODES = ("ps", "ps-heter", "ps-cpu", "ps-gpu")


def given_server_flags(flags: FleetrunFlags) -> Mapping[str, object]:
    """Which options for parameter servers were given, with their values, by the names that Paddle gives them."""
    values = {name: getattr(flags, name) for name in SERVER_FLAGS}
    found = {f"--{name}": value for name, value in values.items() if value not in (None, "")}
    if flags.run_mode in SERVER_MODES:
        found["--run_mode"] = flags.run_mode
    return found


def require_no_servers(flags: FleetrunFlags) -> None:
    """Raise ConfigError where parameter servers are asked for."""
    found = given_server_flags(flags)
    if found:
        raise ConfigError(
            expected="collective training: parameter servers are not there yet",
            found=" ".join(f"{name}={value}" for name, value in found.items()),
            fix="leave these options away; what works today is one process per GPU (--gpus=0,1), or on the CPU "
            "(--nproc_per_node=2), on one host or several (--ips=a,b)",
        )
