"""What the agent says to the workers' parent on the lifeline."""

from collections.abc import Iterator

KILL = b"K"
"""End everything at once, as when the lifeline ends."""

CUT = b"C"
"""Shut down the workers' connections to other ranks: who waits in one raises."""

_SIGNAL = 0x80


def signalling(number: int) -> bytes:
    """Send the workers signal `number`."""
    return bytes([_SIGNAL | number])


def signals_in(words: bytes) -> Iterator[int]:
    """The numbers of the signals that the workers are to be sent."""
    return (word & ~_SIGNAL for word in words if word & _SIGNAL)
