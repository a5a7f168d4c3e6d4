"""The configuration, the variables and the log file of every server of a run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rankless.config.run_config import AgreedJobConfig
from rankless.config.servers import ServerConfig, ServersConfig
from rankless.launch.profile import LauncherProfile
from rankless.records.events import SERVER


@dataclass(frozen=True, kw_only=True)
class ServerLaunch:
    """A server to start."""

    config: ServerConfig
    variables: Mapping[str, str | None]
    """The launcher's environment variables; None removes one."""
    log_file: str


def make_server_launches(
    profile: LauncherProfile, start: AgreedJobConfig, servers: ServersConfig, *, folder: str, host_index: int = 0
) -> list[ServerLaunch]:
    """Return the servers of a host, with log files in its `folder`."""
    own = range(len(servers.addresses)) if start.servers is None else start.servers.on_host(host_index)
    configs = [
        ServerConfig(
            index=index,
            server_count=servers.part_count,
            replicas=servers.replicas,
            worker_count=start.world_size,
            address=servers.addresses[index],
            token=servers.token,
            run_id=start.run_id,
            encrypted=servers.encrypted,
            mode=servers.mode,
            staleness=servers.staleness,
        )
        for index in own
    ]
    return [
        ServerLaunch(
            config=each,
            variables=profile.server_environment(each, servers, start),
            log_file=os.path.abspath(profile.process_log_file(folder, SERVER, each.index)),
        )
        for each in configs
    ]
