"""The channels of an agent to the workers of its host, over which rounds begin and end."""

from collections.abc import Iterator

import msgspec

from rankless.records.elastic_messages import (
    DriverMessage,
    WorkerMessage,
    open_message_channel,
    receive_worker_message,
    send_message,
)


class WorkerChannels:
    """One channel to each worker of this host, by rank."""

    def __init__(self, ranks: range) -> None:
        """Open a channel to each worker. None if there are no ranks."""
        pairs = {rank: open_message_channel() for rank in ranks}
        self._own = {rank: own for rank, (own, _) in pairs.items()}
        self._worker_ends = [end for _, end in pairs.values()]
        for channel in self._own.values():
            channel.setblocking(False)

    @property
    def descriptors(self) -> list[int]:
        """The workers' ends of the channels, in the order of their ranks."""
        return [end.fileno() for end in self._worker_ends]

    def forget_worker_ends(self) -> None:
        """Close the workers' ends in this process: the workers have them."""
        for end in self._worker_ends:
            end.close()
        self._worker_ends = []

    def close(self) -> None:
        """Close all channels."""
        self.forget_worker_ends()
        for channel in self._own.values():
            channel.close()
        self._own.clear()

    def receive(self) -> Iterator[tuple[int, WorkerMessage]]:
        """Yield the messages that have arrived, each with the rank of its worker."""
        for rank in list(self._own):
            for message in self._receive_from(rank):
                yield rank, message

    def send(self, rank: int, message: DriverMessage) -> None:
        """Send a message to a worker of this host. One that has ended gets none."""
        channel = self._own.get(rank)
        if channel is not None:
            try:
                send_message(channel, message)
            except OSError:  # the worker has ended, which the fork server reports
                return

    def _receive_from(self, rank: int) -> Iterator[WorkerMessage]:
        while rank in self._own:
            try:
                message = receive_worker_message(self._own[rank])
            except BlockingIOError:
                return
            except msgspec.MsgspecError:
                continue  # a user's process may write other data to the descriptor
            if message is None:
                self._own.pop(rank).close()  # the fork server reports how the worker ended
                return
            yield message
