"""Orders in which the messages, deaths and restarts of a `ProtocolModel` happen."""

import random
from collections.abc import Callable

from protocol_model import Action, ProtocolModel, copy_frames

from rankless.extensions.servers.service.wire.messages import Kind, decode_message


def first_action(model: ProtocolModel, actions: list[Action]) -> Action:  # noqa: ARG001
    """Choose without faults."""
    return actions[0]


class HeldBack:
    """Holds requests back until nothing else can happen. Then faults come, and the rest in the usual order.

    Args:
        holds: Whether a request is held back, by its kind, worker, server and transaction.
        kills: The servers that are killed then, one after the other, with all requests and answers on their way.
        patience: How often workers look at their connections after that, before the requests arrive.
    """

    def __init__(self, holds: Callable[[Kind, int, int, int], bool], kills: list[int], patience: int = 0) -> None:
        self._holds, self._kills, self._patience = holds, list(kills), patience
        self.held = 0

    def __call__(self, model: ProtocolModel, actions: list[Action]) -> Action:
        if not self._kills and not self._patience:
            return actions[0]
        others = [each for each in actions if not self._is_held(each)]
        if others:
            return others[0]
        self.held += 1
        if self._kills:
            return ("kill", model.servers[self._kills.pop(0)], 1, 1)
        self._patience -= 1
        passing = model.list_passing_time()
        return passing[self._patience % len(passing)]

    def _is_held(self, action: Action) -> bool:
        name, subject = action
        if name != "request":
            return False
        header, _ = decode_message(copy_frames(subject.requests[0]))
        return self._holds(Kind(header.kind), subject.worker, subject.server, header.transaction)


class RandomOrder:
    """Chooses any action, with faults at random, up to a number of them: pairs of kills follow each other closely.

    In each run some connections and some restarts are much slower than others.
    """

    def __init__(self, seed: int, faults: int) -> None:
        self._generator, self._faults = random.Random(seed), faults
        self._rate = self._generator.choice((0.01, 0.03, 0.1))
        self._speeds: dict[tuple[str, int, int], float] = {}

    def __call__(self, model: ProtocolModel, actions: list[Action]) -> Action:
        draw = self._generator
        if self._faults and draw.random() < (0.2 if self._killed_lately(model) else self._rate):
            living = [each for each in model.servers if each.process is not None]
            connected = [each for each in model.sockets if each.identity is not None]
            lost = (draw.choice((0, 0.5, 1)), draw.choice((0, 0.5, 1)))
            self._faults -= 1
            if connected and draw.random() < 0.15:
                return ("break", draw.choice(connected), *lost)
            if living:
                return ("kill", draw.choice(living), *lost)
        actions = [*actions, *model.list_passing_time()]
        return draw.choices(actions, [self._speed(model, action) for action in actions])[0]

    def _killed_lately(self, model: ProtocolModel) -> bool:
        return any(action[0] == "kill" for action in model.log[-8:])

    def _speed(self, model: ProtocolModel, action: Action) -> float:
        name, subject = action
        if name in ("time", "tend"):
            return 0.05
        if name == "late":
            return 0.5
        if name == "restart":
            key = (name, model.servers.index(subject), subject.incarnation)
        else:
            key = (name, subject.worker, subject.server)
        return self._speeds.setdefault(key, self._generator.choice((1, 1, 0.1, 0.01)))
