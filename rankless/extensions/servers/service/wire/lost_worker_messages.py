"""What workers tell servers of other workers that are lost, as JSON in the first frame."""

import msgspec


class LostWorkersMessage(msgspec.Struct, frozen=True):
    """What a worker says of others that are lost. `round` is the number of the round of those that are left."""

    lost: list[int]
    round: int


class LostChangeMessage(msgspec.Struct, frozen=True):
    """Whose change a worker sends for a lost one, and its number among those in the transaction."""

    worker: int
    number: int
