"""Another host than host 0, until the job starts: finding host 0, and waiting for its word."""

import selectors
import time
from collections.abc import Callable

from rankless.errors import JoinError
from rankless.launch.control.frames import Here, Refused, Start, Waiting
from rankless.launch.control.session import BrokenOff
from rankless.launch.control.uplink import NotReached, NotTrusted, Uplink, connect
from rankless.launch.hosts.gathering import TELL_EVERY_SECONDS, Interrupted
from rankless.launch.hosts.host_facts import HostFacts
from rankless.launch.hosts.tokens import Tokens
from rankless.launch.interrupts import Interrupts
from rankless.plan.run_plan import Company

TRY_SECONDS = 2.0
NAP_SECONDS = 0.1


def reach(
    company: Company,
    facts: Callable[[], HostFacts],
    tokens: Tokens,
    *,
    interrupts: Interrupts,
    tell: Callable[[str], None],
) -> tuple[Uplink, Start]:
    """The connection to host 0, and its word to start, once all hosts are there and agree.

    Raises JoinError if host 0 is not reached in time, or refuses; Interrupted on a signal.
    """
    start = told = time.monotonic()
    why = "not tried yet"
    while (waited := time.monotonic() - start) < company.join_timeout_seconds:
        try:
            token = tokens.current()
            if token is None:
                raise NotReached("it has not brought the job's token here by ssh yet")
            session = connect(company.hosts[0].address, company.port, token=token, timeout_seconds=TRY_SECONDS)
            session.send(Here(host=company.place, facts=facts()))
            found = _await_start(Uplink(session), company, interrupts=interrupts, tell=tell)
            tokens.used()
            return found
        except NotReached as error:
            why = str(error)
        except NotTrusted as error:
            why = "it has another token"
            if not tokens.refused():
                raise _not_started(company, error) from None
        if time.monotonic() - told > TELL_EVERY_SECONDS:
            told = time.monotonic()
            tell(f"waiting for host 0, {company.hosts[0]}: {why}, {waited:.0f} s")
        _heed(interrupts, NAP_SECONDS)
    raise JoinError(
        expected=f"host 0 at {company.hosts[0]}:{company.port} in {company.join_timeout_seconds:g} s (--join-timeout)",
        found=why,
        fix=f"start the same line on {company.hosts[0]}, with the same --port; rankless doctor looks further",
    )


def _await_start(
    uplink: Uplink, company: Company, *, interrupts: Interrupts, tell: Callable[[str], None]
) -> tuple[Uplink, Start]:
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(uplink, selectors.EVENT_READ)
            selector.register(interrupts, selectors.EVENT_READ)
            while True:
                selector.select(0.2)
                _heed(interrupts, 0)
                for frame in uplink.turn(time.monotonic()):
                    if isinstance(frame, Start):
                        return uplink, frame
                    if isinstance(frame, Refused):
                        raise JoinError(expected=frame.expected, found=frame.found, fix=frame.fix)
                    if isinstance(frame, Waiting):
                        tell(frame.text)
    except NotTrusted:
        uplink.close()
        raise
    except BrokenOff as broken:
        uplink.close()
        raise _not_started(company, broken) from None
    except BaseException:
        uplink.close()
        raise


def _not_started(company: Company, broken: BrokenOff) -> JoinError:
    return JoinError(
        expected=f"host 0, {company.hosts[0]}, to start the job",
        found=str(broken),
        fix="look at its terminal; all hosts need the same token (RANKLESS_TOKEN_FILE), or none (--insecure)",
    )


def _heed(interrupts: Interrupts, seconds: float) -> None:
    """Wait for a signal. Raises Interrupted if one has come."""
    with selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ)
        selector.select(seconds)
    if numbers := interrupts.read():
        raise Interrupted(numbers[0])
