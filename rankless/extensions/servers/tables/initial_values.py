"""Initial values of rows, as a function of the id and of the table's seed.

They are drawn by Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
The id and the number of a block of four elements are its counter, and the seed is its key. So no server needs to know
another one's draws, and an id that comes back after its row expired begins with the same values.
"""

import math

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.tables.compiled_functions import compiled

CONSTANT, UNIFORM, NORMAL = 0, 1, 2
"""Kinds of distributions. Their two parameters: value and nothing; low and high; mean and standard deviation."""
ROUNDS = 10
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_INCREMENT_0, _INCREMENT_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@compiled
def philox(
    word0: np.uint64, word1: np.uint64, word2: np.uint64, word3: np.uint64, seed: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return four words of 32 bits for a counter of four words and a key of 64 bits."""
    key0, key1 = seed & _LOW_WORD, seed >> _WORD_BITS
    for _ in range(ROUNDS):
        product0, product1 = word0 * _MULTIPLIER_0, word2 * _MULTIPLIER_1
        word0, word2 = (product1 >> _WORD_BITS) ^ word1 ^ key0, (product0 >> _WORD_BITS) ^ word3 ^ key1
        word1, word3 = product1 & _LOW_WORD, product0 & _LOW_WORD
        key0, key1 = (key0 + _INCREMENT_0) & _LOW_WORD, (key1 + _INCREMENT_1) & _LOW_WORD
    return word0, word1, word2, word3


@compiled
def _unit_interval(word: np.uint64) -> float:
    return (np.float64(word) + 0.5) / 4294967296.0


@compiled
def _normal_pair(word0: np.uint64, word1: np.uint64) -> tuple[float, float]:
    """Return two normally distributed numbers (Box and Muller, 1958)."""
    radius = math.sqrt(-2.0 * math.log(_unit_interval(word0)))
    angle = 2.0 * math.pi * _unit_interval(word1)
    return radius * math.cos(angle), radius * math.sin(angle)


@compiled
def write_initial_values(
    row: NDArray[np.floating], row_id: int | np.int64, seed: np.uint64, kind: int, parameter0: float, parameter1: float
) -> None:
    """Write the initial values of an id.

    Args:
        row: Where to write them, of shape (dim,), float32 or float64.
        row_id: The id, any int64.
        seed: The table's seed.
        kind: `CONSTANT`, `UNIFORM` or `NORMAL`.
        parameter0: The distribution's first parameter.
        parameter1: Its second one.
    """
    dim = row.shape[0]
    if kind == CONSTANT:
        for column in range(dim):
            row[column] = parameter0
        return
    low, high = np.uint64(row_id) & _LOW_WORD, np.uint64(row_id) >> _WORD_BITS
    for block in range((dim + 3) // 4):
        words = philox(low, high, np.uint64(block), np.uint64(0), seed)
        if kind == UNIFORM:
            span = parameter1 - parameter0
            samples = (
                parameter0 + span * _unit_interval(words[0]),
                parameter0 + span * _unit_interval(words[1]),
                parameter0 + span * _unit_interval(words[2]),
                parameter0 + span * _unit_interval(words[3]),
            )
        else:
            first, second = _normal_pair(words[0], words[1])
            third, fourth = _normal_pair(words[2], words[3])
            samples = (
                parameter0 + parameter1 * first,
                parameter0 + parameter1 * second,
                parameter0 + parameter1 * third,
                parameter0 + parameter1 * fourth,
            )
        for column in range(4 * block, min(4 * block + 4, dim)):
            row[column] = samples[column - 4 * block]
