"""A collective of all hosts, really run: a process on each imports torch and sums tensors with the others by Gloo."""

from collections.abc import Mapping

import msgspec

from rankless.config.collective_test import AreYouThere, Here, OpenStore, Reduce, Reduced, StoreOpened, TrialTask
from rankless.launch.doctor.probe_protocol import Answer, Failed, Prepare, Relay
from rankless.launch.doctor.remote_probes import Visits
from rankless.records.check_results import Row, failed, passed, placed
from rankless.records.quantities import sized, timed

MEET_SECONDS = 10.0
IMPORT_SECONDS = 30.0
WHAT = "all_reduce"


def prepare(visits: Visits) -> None:
    """Let every host's process import torch, while other things are looked at."""
    visits.ask({place: Prepare() for place in visits.open})


def try_collective(visits: Visits, names: list[str], *, address: str, interfaces: Mapping[int, str]) -> list[Row]:
    """The row of the hosts' sums; or of those whose process could not take part."""
    # Whose torch is slow to import would keep the others waiting beyond their patience.
    answers = visits.ask({place: _relay(AreYouThere()) for place in visits.open}, IMPORT_SECONDS)
    failures = {place: found for place, found in answers.items() if not isinstance(found, Here)}
    if failures:
        return _rows(failures, names)
    (opened,) = visits.ask({0: _relay(OpenStore(address=address))}, IMPORT_SECONDS).values()
    if not isinstance(opened, StoreOpened):
        return _rows({0: opened}, names)
    tasks = {
        place: _relay(
            Reduce(
                address=address,
                port=opened.port,
                rank=place,
                size=len(names),
                interface=interfaces[place],
                timeout_seconds=MEET_SECONDS,
            )
        )
        for place in visits.open
    }
    sums = visits.ask(tasks, IMPORT_SECONDS)
    unsummed = {place: found for place, found in sums.items() if not isinstance(found, Reduced)}
    if unsummed:
        return _rows(unsummed, names)
    reduced = [found for found in sums.values() if isinstance(found, Reduced)]
    slowest = {size: max(each.seconds[size] for each in reduced) for size in reduced[0].seconds}
    times = ", ".join(f"{sized(size)} in {timed(seconds)}" for size, seconds in slowest.items())
    cards = ", ".join(dict.fromkeys(interfaces[place] for place in sorted(visits.open)))
    met = max(each.join_seconds for each in reduced)
    return placed([passed(WHAT, f"{times} by Gloo over {cards}; met in {timed(met)}")], "all hosts")


def _relay(task: TrialTask) -> Relay:
    return Relay(line=msgspec.json.encode(task), timeout_seconds=IMPORT_SECONDS - 1)


def _rows(failures: Mapping[int, Answer], names: list[str]) -> list[Row]:
    return [row for place, found in failures.items() for row in placed([_failure(found)], names[place])]


def _failure(found: Answer) -> Row:
    text = _text(found)
    fix = "name the card by hand on every host: export GLOO_SOCKET_IFNAME=…; see the rows of the connections"
    if "No module named" in text:
        fix = "install the same packages there as here"
    return failed(WHAT, text, fix)


def _text(found: Answer) -> str:
    return found.text if isinstance(found, Failed) else f"an answer that does not fit: {type(found).__name__}"
