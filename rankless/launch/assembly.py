"""From a plan to a job all of whose hosts are there: alone, as host 0, or as one of the others."""

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rankless.errors import JoinError, PlanError
from rankless.launch.company import Leading, Led, Nobody
from rankless.launch.control.hub import Hub
from rankless.launch.doctor.quick import quick_check
from rankless.launch.endpoints import endpoints_of, free_endpoints
from rankless.launch.hosts.gathering import gather, let_start
from rankless.launch.hosts.host_facts import HostFacts, own_facts
from rankless.launch.hosts.reaching import reach
from rankless.launch.hosts.ssh import RemoteAgent, RemoteTask, TokenBringer
from rankless.launch.hosts.tokens import Known, must_be_brought, token_of_host_0, tokens_of
from rankless.launch.interrupts import Interrupts
from rankless.launch.logs import run_name
from rankless.launch.ports import open_store_socket, owner_of, reserve_master_port
from rankless.launch.real_horovod import rendezvous_port
from rankless.plan import environment
from rankless.plan.check import choose_backend
from rankless.plan.hosts import addresses_of, interface_of, interface_towards, is_loopback, own_addresses
from rankless.plan.run_plan import Company, JobStart, RunPlan


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A job whose hosts are there."""

    others: Nobody | Led | Leading
    start: JobStart
    place: int = 0
    names: Sequence[str] = ("",)
    """Of the hosts."""
    devices: Sequence[Sequence[str]]
    """Of each host's workers, where they are known."""
    interface: str | None = None
    store: socket.socket | None = None
    """Host 0's, on which rank 0 will serve."""


@contextlib.contextmanager
def assembled(
    plan: RunPlan, *, interrupts: Interrupts, tell: Callable[[str], None], token: bytes | None
) -> Iterator[Assembled]:
    """The job, once all its hosts are there. Raises JoinError if they do not come, and `gathering.Interrupted`."""
    if plan.company is None:
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(open_store_socket())
            reserved = stack.enter_context(reserve_master_port(plan.hosts.master_port))
            endpoints = stack.enter_context(free_endpoints(plan))
            start = _start(plan, [plan.devices], endpoints, store=store, reserved=reserved)
            rendezvous = stack.enter_context(rendezvous_port(plan, start.store_address))
            start = msgspec.structs.replace(start, rendezvous_port=rendezvous)
            yield Assembled(others=Nobody(), start=start, devices=(plan.devices,), store=store)
        return
    quick_check(plan, tell)
    if plan.company.place == 0:
        with _as_host_0(plan, plan.company, interrupts, tell, token) as found:
            yield found
    else:
        with _as_another(plan, plan.company, interrupts, tell, token) as found:
            yield found


@contextlib.contextmanager
def _as_host_0(
    plan: RunPlan, company: Company, interrupts: Interrupts, tell: Callable[[str], None], token: bytes | None
) -> Iterator[Assembled]:
    require_own_name(company)
    environment.apply(company.variables)
    token = token_of_host_0(company) if token is None else token
    interface, address = own_address(company)
    own = _facts(plan, company, address)
    with contextlib.ExitStack() as stack:
        hub = Hub(_listen(address, company), token=token, host_count=len(company.hosts))
        stack.callback(hub.close)
        starters: Mapping[int, RemoteAgent | TokenBringer] = {}
        if company.way == "ssh":
            starters = {place: _started(plan, company, place, token, tell) for place in range(1, len(company.hosts))}
        elif must_be_brought(company):
            starters = {place: TokenBringer(company, place, token) for place in range(1, len(company.hosts))}
        for starter in starters.values():
            stack.callback(starter.close)
        store = stack.enter_context(open_store_socket(address))
        reserved = stack.enter_context(reserve_master_port())
        facts = gather(hub, company, own=own, starters=starters, interrupts=interrupts, tell=tell)
        devices = [plan.devices, *(facts[place].devices for place in sorted(facts))]
        addresses = [_address(company, place, facts, own=address) for place in range(len(company.hosts))]
        endpoints = endpoints_of(plan, addresses, [len(some) for some in devices])
        start = _start(plan, devices, endpoints, store=store, reserved=reserved)
        start = msgspec.structs.replace(
            start,
            addresses=(address, *(facts[place].address for place in sorted(facts))),
            rendezvous_port=stack.enter_context(rendezvous_port(plan, address)),
        )
        let_start(hub, start)
        names = [company.hosts[0].address, *(_name(company, place, facts) for place in sorted(facts))]
        others = Led(hub, start, names)
        yield Assembled(others=others, start=start, names=names, devices=devices, interface=interface, store=store)


@contextlib.contextmanager
def _as_another(
    plan: RunPlan, company: Company, interrupts: Interrupts, tell: Callable[[str], None], token: bytes | None
) -> Iterator[Assembled]:
    tokens = tokens_of(company) if token is None else Known(token)

    def facts() -> HostFacts:
        _, address = interface_towards(company.hosts[0].address)
        return _facts(plan, company, address)

    uplink, told = reach(company, facts, tokens, interrupts=interrupts, tell=tell)
    try:
        interface, _ = interface_towards(company.hosts[0].address)
        name = company.hosts[told.place].address
        names = [host.address for host in company.hosts]
        yield Assembled(
            others=Leading(uplink, told.start, told.place, name),
            start=told.start,
            place=told.place,
            names=names,
            devices=(plan.devices,),
            interface=interface,
        )
    finally:
        uplink.close()


def require_own_name(company: Company) -> None:
    """Raise PlanError unless host 0's name is one of this host's."""
    if not addresses_of(company.hosts[0].address) & own_addresses():
        raise PlanError(
            expected=f"host 0, the master, on the host that is called {company.hosts[0]}",
            found="this host, which has no such address",
            fix="--node-rank 0 (--host-rank 0, --rank 0) is the master's own host: number or name this one otherwise",
        )


def own_address(company: Company) -> tuple[str, str]:
    """Host 0's interface and the address on it that the others reach.

    Raises PlanError where no way leads from here to them.
    """
    outward = sorted(each for each in addresses_of(company.hosts[0].address) if not is_loopback(each))
    # As Debian has it, a host's own name means itself alone, there; then the way to another host tells its address.
    towards = company.hosts[1 if company.is_listed else 0].address
    try:
        return (interface_of(outward[0]), outward[0]) if outward else interface_towards(towards)
    except OSError as error:
        raise PlanError(
            expected=f"a way from host 0 to {towards}",
            found=error.strerror or str(error),
            fix="check that the names resolve and the network is up: rankless doctor --hosts …",
        ) from None


def _listen(address: str, company: Company) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, company.port), family=family, backlog=1024)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        found = f"taken by {owner_of(company.port) or 'a connection that lingers'}" if is_taken else error.strerror
        raise JoinError(
            expected=f"port {company.port} of {address} to be free, for the other hosts to come to",
            found=found,
            fix="end what has it, or choose another with --port (port=, --master), on every host",
        ) from None


def _started(plan: RunPlan, company: Company, place: int, token: bytes, tell: Callable[[str], None]) -> RemoteAgent:
    there = msgspec.structs.replace(company, place=place)
    script = None
    if company.copies and plan.program.kind == "script":
        with open(plan.program.target, "rb") as file:
            script = file.read()
    carried = environment.carried_variables() if plan.horovod is None else environment.exported_variables()
    task = RemoteTask(
        program=plan.program,
        request=msgspec.structs.replace(plan.request, company=there, seed=plan.seed),
        token=token,
        environment=carried | dict(company.variables),
        script=script,
    )
    return RemoteAgent(task, tell=tell)


def _facts(plan: RunPlan, company: Company, address: str) -> HostFacts:
    hosts = [f"{host.address}:{host.workers}" for host in company.hosts]
    told = hosts if company.is_listed else [f"{len(hosts)} hosts"]
    return own_facts(plan.program, hosts=told, devices=plan.devices, address=address)


def _name(company: Company, place: int, facts: Mapping[int, HostFacts]) -> str:
    return company.hosts[place].address if company.is_listed else facts[place].name


def _address(company: Company, place: int, facts: Mapping[int, HostFacts], *, own: str) -> str:
    if company.is_listed:
        return company.hosts[place].address
    return own if place == 0 else facts[place].address


def _start(
    plan: RunPlan,
    devices: Sequence[Sequence[str]],
    endpoints: tuple[str, ...],
    *,
    store: socket.socket,
    reserved: socket.socket,
) -> JobStart:
    address = str(store.getsockname()[0])
    apart = [choose_backend(tuple(some)) for some in devices]
    return JobStart(
        run_id=run_name(plan),
        seed=plan.seed,
        workers=tuple(map(len, devices)),
        backend="nccl" if set(apart) == {"nccl"} else "gloo",
        master_address=plan.hosts.master_address if plan.company is None else address,
        master_port=reserved.getsockname()[1],
        store_address=address,
        store_port=store.getsockname()[1],
        endpoints=endpoints,
        recording=plan.recording,
        perturbation_seed=plan.perturbation_seed,
        dtype=plan.dtype,
        watch=plan.watch,
    )
