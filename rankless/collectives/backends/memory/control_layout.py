"""Where the words of a group's control block lie. The block is at the start of the group's shared memory.

The block starts with the word that ends the group, and a mark. A part for each rank follows. Words of different
writers are on different cache lines, two lines apart because processors fetch lines in pairs.
"""

from dataclasses import dataclass

from rankless.records.group_failures import WORD_BYTES

LINE_WORDS = 16
CHANNELS = 2
"""Collectives sleep on one word of their rank, messages from one rank to another on a second."""


@dataclass(frozen=True)
class ControlLayout:
    """The offsets of the control block of a group with `size` ranks, in words of 8 bytes."""

    size: int

    @property
    def table_words(self) -> int:
        """The words that a rank publishes about a call: its signature, a number, and a number for each rank."""
        return _round_up(2 + self.size)

    @property
    def rank_words(self) -> int:
        """The words of one rank."""
        return (1 + CHANNELS) * LINE_WORDS + 2 * self.table_words

    @property
    def word_count(self) -> int:
        """The words of the whole block."""
        return LINE_WORDS + self.size * self.rank_words

    @property
    def byte_count(self) -> int:
        """The bytes of the whole block."""
        return WORD_BYTES * self.word_count

    def posted(self, rank: int) -> int:
        """The word with the number of the last phase that a rank has reached. The rank writes it."""
        return LINE_WORDS + rank * self.rank_words

    def closed(self, rank: int) -> int:
        """The word that is not 0 after a rank has closed the group. The rank writes it."""
        return self.posted(rank) + 1

    def sleeper(self, rank: int, channel: int) -> int:
        """The word on which a rank sleeps. It sets what it waits for; the rank that wakes it sets 0."""
        return self.posted(rank) + (1 + channel) * LINE_WORDS

    def table(self, rank: int, half: int) -> int:
        """The first word of what a rank publishes about the call that uses this half of its slot."""
        return self.posted(rank) + (1 + CHANNELS) * LINE_WORDS + half * self.table_words


def _round_up(words: int) -> int:
    return -(-words // LINE_WORDS) * LINE_WORDS
