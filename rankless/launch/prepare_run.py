"""From a `RunConfig` to a run whose hosts are all there. `multi_host_setup` has the part of runs on several."""

import contextlib
import importlib
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from rankless.config.backend_and_fault_tolerance import (
    ABORTABLE,
    choose_abortable_backend,
    choose_backend,
    count_most_lost,
)
from rankless.config.program_source_files import names_ranks
from rankless.config.run_config import AgreedJobConfig, RunConfig
from rankless.launch.authenticated_tcp_store import StoreServer
from rankless.launch.extension_process_role import ProcessRole, RoleHost, WorkerContent, open_roles
from rankless.launch.launcher_profile import LauncherProfile, make_run_id
from rankless.launch.other_hosts_interface import Peers
from rankless.launch.ports import open_store_socket, reserve_master_port
from rankless.launch.signal_reader import Interrupts


@dataclass(frozen=True, kw_only=True)
class ReadyJob:
    """A job whose hosts are all there, as one of them sees it."""

    peers: Peers
    start: AgreedJobConfig
    profile: LauncherProfile = field(default_factory=LauncherProfile)
    host_index: int = 0
    names: Sequence[str] = ("",)
    """The name of every host."""
    devices: Sequence[Sequence[str]]
    """The devices of each host's workers; on other hosts than host 0 only this host's."""
    interface: str | None = None
    """The network interface that leads to the other hosts."""
    store: StoreServer | None = None
    """The store of all ranks; on host 0 only."""
    store_token: str = ""
    """What the store asks for. No host sends it over the control channel."""
    roles: Sequence[ProcessRole] = ()
    """The kinds of processes that the run has beside its workers."""
    token: bytes | None = None
    """The secret of a run on several hosts. No host sends it over the control channel."""

    def attach_roles(self, folder: str) -> WorkerContent:
        """Prepare the processes of all roles on this host, with log files in its `folder`; see `ProcessRole.attach`."""
        host = RoleHost(
            start=self.start,
            profile=self.profile,
            names=self.names,
            host_index=self.host_index,
            peers=self.peers,
            token=self.token,
        )
        contents = [role.attach(host, folder) for role in self.roles]
        return WorkerContent(
            roles={name: value for each in contents for name, value in each.roles.items()},
            descriptors=[descriptor for each in contents for descriptor in each.descriptors],
        )


@contextlib.contextmanager
def set_up_job(
    config: RunConfig,
    profile: LauncherProfile,
    *,
    interrupts: Interrupts,
    notify: Callable[[str], None],
    token: bytes | None,
) -> Iterator[ReadyJob]:
    """Yield the job, which has the launcher's `profile`, once all its hosts are there.

    Raises `JoinError` if a host does not join in time, and `RendezvousInterrupted` on a signal.
    """
    if config.cluster is None:
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(open_store_socket())
            reserved = stack.enter_context(reserve_master_port(config.request.master_port))
            start = make_start(config, profile, [config.devices], store=listening, reserved=reserved)
            services = profile.open_services(
                config,
                addresses=[config.request.master_address],
                worker_counts=start.workers,
                store_address=start.store_address,
            )
            start = msgspec.structs.replace(start, launcher_variables=stack.enter_context(services))
            roles = stack.enter_context(open_roles(config))
            start = msgspec.structs.replace(start, roles={role.name: role.reserve() for role in roles})
            store_token = secrets.token_hex(32)
            yield ReadyJob(
                peers=Peers(),
                start=start,
                profile=profile,
                devices=(config.devices,),
                store=stack.enter_context(StoreServer([listening], token=store_token)),
                store_token=store_token,
                roles=roles,
            )
        return
    # Imported here: most runs have one host.
    multi_host_setup = importlib.import_module("rankless.launch.multi_host_setup")
    with multi_host_setup.set_up_job_on_hosts(
        config, profile, config.cluster, interrupts=interrupts, notify=notify, token=token
    ) as job:
        yield job


def make_start(
    config: RunConfig,
    profile: LauncherProfile,
    devices: Sequence[Sequence[str]],
    *,
    store: socket.socket,
    reserved: socket.socket,
) -> AgreedJobConfig:
    """Return what all hosts have in common. `devices` has the devices of each host's workers."""
    address = str(store.getsockname()[0])
    backend = choose_backend([each for each in devices if each], config.backend)
    most_lost = count_most_lost(config, devices)
    request = config.request
    # Between hosts of one worker each Gloo sends large tensors faster, so the user or an extension asks for another.
    if most_lost and (request.min_workers is not None or request.copies or request.options):
        backend = choose_abortable_backend(backend, config)
    return AgreedJobConfig(
        run_id=make_run_id(profile),
        seed=config.seed,
        workers=tuple(map(len, devices)),
        backend=backend.name,
        most_lost_workers=most_lost if backend.name in ABORTABLE else 0,
        replaces_workers=request.replaces_workers and not request.options,
        copies_first_worker=not names_ranks(config.program),
        copies=request.copies,
        is_logical=config.view.is_logical,
        zero=config.view.zero,
        master_address=config.request.master_address if config.cluster is None else address,
        master_port=reserved.getsockname()[1],
        store_address=address,
        store_port=store.getsockname()[1],
        recording=config.request.recording,
        perturbation_seed=config.request.perturbation_seed,
        dtype=config.request.dtype,
        plan=config.request.plan,
        mesh=config.mesh,
        observation=config.request.observation,
    )
