"""Elastic training: a state that can be committed and restored, and the loop that continues when workers change.

Note [one decision about sync]: a worker cannot decide alone whether the state is synchronized after a round. In Horovod
(issue #3494), workers that had seen other workers leave skipped it, while a new worker waited for it forever. Here each
worker reports how it left its round, and the driver sends the same decision to all workers of the next round.
"""

import copy
import functools
import queue
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rankless.extensions.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from rankless.runtime.elastic_round import current_member

NO_UPDATE, REMOVED, ADDED = 0, 1, 2
"""How the hosts changed, in Horovod's numbers. 3 means both."""


class State:
    """The state of an elastic training. Subclasses define how it is saved, restored and synchronized.

    Args:
        bcast_object: Broadcasts an object from rank 0 to all ranks, and returns it.
        get_rank: Returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call these after each reset: to scale the learning rate by the new number of workers, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the new workers. Called after each reset."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Record that hosts were added or will be removed. Later changes have greater timestamps."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, which is restored if a worker fails, and check for changed hosts.

        Raises HostsUpdatedInterrupt if hosts have changed. All ranks commit at the same step.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 has received a change of hosts."""
        before = latest = self._last_updated_timestamp
        update = NO_UPDATE
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                update |= change
        before, self._last_updated_timestamp, update = self._bcast_object((before, latest, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == REMOVED)

    def save(self) -> None:
        """Keep the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy rank 0's state to all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the state to the new workers."""


class ObjectState(State):
    """A state of plain Python objects. Each keyword argument becomes an attribute.

    Args:
        bcast_object: Broadcasts an object from rank 0 to all ranks, and returns it.
        get_rank: Returns this process's rank.
        kwargs: The objects. They are copied with `copy.deepcopy`.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        """Copy the current attributes."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to the saved copies."""
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Copy rank 0's current attributes to all ranks, and save them.

        Horovod sends the attributes saved last, but the current model. After an interrupt without a commit these do
        not match.
        """
        if not self._saved_state:
            return
        ObjectState.save(self)
        self._saved_state = self._bcast_object(self._saved_state)
        if self._rank() != 0:
            ObjectState.restore(self)


class HostUpdateResult:
    """How the hosts changed."""

    no_update = NO_UPDATE
    removed = REMOVED
    added = ADDED
    mixed = REMOVED | ADDED


class _HostUpdateTarget(Protocol):
    def on_hosts_updated(self, timestamp: int, update_res: int) -> None: ...


class _HostUpdateListener:
    """Forwards changes of hosts to a worker's state."""

    def __init__(self, state: _HostUpdateTarget) -> None:
        self._state = state

    def on_hosts_changed(self, round: int, *, removed: bool, added: bool) -> None:
        # Timestamps rise within a round (its second change includes the first) and from round to round.
        change = (REMOVED if removed else NO_UPDATE) | (ADDED if added else NO_UPDATE)
        self._state.on_hosts_updated(4 * round + change, change)


class WorkerNotificationManager:
    """Tells its listeners when the hosts of an elastic job change."""

    def __init__(self) -> None:
        self._listeners: dict[int, tuple[_HostUpdateTarget, _HostUpdateListener]] = {}

    def init(self) -> None:
        """Do nothing: a worker is connected to its driver from its start."""

    def register_listener(self, listener: _HostUpdateTarget) -> None:
        """Call `listener.on_hosts_updated(timestamp, update)` at each change, also for the changes of this round."""
        self.remove_listener(listener)
        _, forwarding = self._listeners[id(listener)] = listener, _HostUpdateListener(listener)
        if (member := current_member()) is not None:
            member.add_listener(forwarding)

    def remove_listener(self, listener: _HostUpdateTarget) -> None:
        """Call the listener no more. Does nothing for one that was not registered."""
        _, forwarding = self._listeners.pop(id(listener), (None, None))
        if forwarding is not None and (member := current_member()) is not None:
            member.remove_listener(forwarding)

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Tell the listeners about a change.

        Args:
            timestamp: A number that rises from change to change.
            update_res: How the hosts changed, as in `HostUpdateResult`.
        """
        for listener, _ in list(self._listeners.values()):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
"""Tells the states of this process about changes."""


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that calls `func` again after each reset, until it returns.

    If a worker has failed, the state is restored first. If hosts have changed, the current state is kept.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        member = current_member()
        notification_manager.init()
        notification_manager.register_listener(state)
        skip_sync = is_reset_due = False
        try:
            while True:
                try:
                    if is_reset_due:
                        skip_sync = _reset_and_rejoin(state, reset, skip_sync)
                    if not skip_sync:
                        state.sync()
                    if member is not None:
                        member.report_synced()
                    return func(state, *args, **kwargs)
                except HorovodInternalError:
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    skip_sync = interrupt.skip_sync
                is_reset_due = True
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _reset_and_rejoin(state: State, reset: Callable[[], None], skip_sync: bool) -> bool:
    """Join the next round, and return whether synchronizing the state can be skipped."""
    member = current_member()
    notification_manager.remove_listener(state)
    if member is not None:
        member.keeps_state = skip_sync
    reset()
    state.on_reset()
    notification_manager.register_listener(state)  # it is told of this round's changes again, from before the reset
    if member is None:
        return skip_sync
    return member.round is not None and not member.round.must_sync
