"""The configuration, the variables and the log file of every server of a run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rankless.config.run_config import AgreedJobConfig
from rankless.extensions.servers.config import NAME, SERVER_ROLE, ServerConfig, ServersConfig
from rankless.launch.profile import LauncherProfile


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
    agreed = start.roles[NAME]
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
        for index in agreed.on_host(host_index)
    ]
    return [
        ServerLaunch(
            config=each,
            variables=profile.process_environment(agreed, each.index, start),
            log_file=os.path.abspath(profile.process_log_file(folder, SERVER_ROLE, each.index)),
        )
        for each in configs
    ]
