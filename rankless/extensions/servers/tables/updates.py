"""Updates of rows by an optimizer, in one pass over each row: the sparse updates of PyTorch's optimizers.

Each function takes the row numbers of one step, without duplicates, and their gradients. Rows with the number `NO_ROW`
are left out. Scalars take the type of the rows, as in PyTorch.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rankless.extensions.servers.tables.compiled_functions import compiled
from rankless.extensions.servers.tables.id_map import IdMap, find_entry
from rankless.extensions.servers.tables.momentum import MomentumState
from rankless.extensions.servers.tables.rows import Rows


class MomentumScalars(NamedTuple):
    """Numbers of one step of SGD with momentum, float64."""

    learning_rate: float
    momentum: float
    gradient_factor: float
    nesterov: bool


class AdamScalars(NamedTuple):
    """Numbers of one step of Adam, float64.

    Args:
        rate: The learning rate with the bias correction of the mean.
        beta1: Decay of the mean.
        beta2: Decay of the mean of squares.
        square_correction: The square root of the bias correction of the mean of squares.
        epsilon: Added to the denominator.
        weight_decay: Adam's, which is added to the gradient.
        kept: AdamW's, the factor of the value before the step.
    """

    rate: float
    beta1: float
    beta2: float
    square_correction: float
    epsilon: float
    weight_decay: float
    kept: float


@compiled
def update_sgd(
    rows: Rows, row_numbers: NDArray[np.int64], gradients: NDArray[np.floating], learning_rate: float
) -> None:
    """Subtract gradients times the learning rate."""
    rate = rows.values.dtype.type(learning_rate)
    for number in range(row_numbers.shape[0]):
        if row_numbers[number] >= 0:
            row, gradient = rows.values[row_numbers[number]], gradients[number]
            for column in range(rows.dim):
                row[column] -= rate * gradient[column]


@compiled
def update_momentum(
    rows: Rows,
    row_numbers: NDArray[np.int64],
    gradients: NDArray[np.floating],
    state: MomentumState,
    scalars: MomentumScalars,
) -> None:
    """Let rows catch up with the steps so far, and make one more: the state is one momentum buffer."""
    number_type = rows.values.dtype.type
    rate, momentum = number_type(scalars.learning_rate), number_type(scalars.momentum)
    gradient_factor = number_type(scalars.gradient_factor)
    for number in range(row_numbers.shape[0]):
        row_number = row_numbers[number]
        if row_number < 0:
            continue
        row, gradient = rows.values[row_number], gradients[number]
        since = state.caught_up[row_number]
        moved, decay = number_type(0), number_type(1)
        if since > 0:
            moved, decay = number_type(state.movements[since]), number_type(state.decays[since])
        state.caught_up[row_number] = state.steps + 1
        for column in range(rows.dim):
            buffer = row[rows.dim + column]
            value = row[column] - moved * buffer
            buffer = momentum * (decay * buffer) + gradient_factor * gradient[column]
            row[rows.dim + column] = buffer
            direction = gradient[column] + momentum * buffer if scalars.nesterov else buffer
            row[column] = value - rate * direction


@compiled
def subtract_movements(
    ids: NDArray[np.int64], id_map: IdMap, rows: Rows, state: MomentumState, values: NDArray[np.floating]
) -> None:
    """Let copies of values, of shape (ids, dim), catch up with all steps. The rows stay as they are."""
    for number in range(ids.shape[0]):
        row_number = find_entry(id_map, ids[number]) - 1
        if row_number >= 0 and state.caught_up[row_number] > 0:
            moved = rows.values.dtype.type(state.movements[state.caught_up[row_number]])
            for column in range(rows.dim):
                values[number, column] -= moved * rows.values[row_number, rows.dim + column]


@compiled
def update_adagrad(
    rows: Rows, row_numbers: NDArray[np.int64], gradients: NDArray[np.floating], scalars: tuple[float, float]
) -> None:
    """Make a step of Adagrad (Duchi, Hazan and Singer, JMLR 2011): the state is the sum of squared gradients.

    `scalars` are the learning rate of this step and epsilon.
    """
    rate, epsilon = rows.values.dtype.type(scalars[0]), rows.values.dtype.type(scalars[1])
    for number in range(row_numbers.shape[0]):
        if row_numbers[number] >= 0:
            row, gradient = rows.values[row_numbers[number]], gradients[number]
            for column in range(rows.dim):
                square_sum = row[rows.dim + column] + gradient[column] * gradient[column]
                row[rows.dim + column] = square_sum
                row[column] -= rate * gradient[column] / (np.sqrt(square_sum) + epsilon)


@compiled
def update_sparse_adam(
    rows: Rows,
    row_numbers: NDArray[np.int64],
    gradients: NDArray[np.floating],
    scalars: tuple[float, float, float, float],
) -> None:
    """Make a step of SparseAdam, which leaves the means of other rows: the states are the mean and the squares' mean.

    `scalars` are the learning rate with both bias corrections, beta 1, beta 2 and epsilon.
    """
    number_type = rows.values.dtype.type
    rate, rest1, rest2 = number_type(scalars[0]), number_type(1 - scalars[1]), number_type(1 - scalars[2])
    epsilon = number_type(scalars[3])
    dim = rows.dim
    for number in range(row_numbers.shape[0]):
        if row_numbers[number] >= 0:
            row, gradient = rows.values[row_numbers[number]], gradients[number]
            for column in range(dim):
                mean, square = row[dim + column], row[2 * dim + column]
                mean += (gradient[column] - mean) * rest1
                square += (gradient[column] * gradient[column] - square) * rest2
                row[dim + column], row[2 * dim + column] = mean, square
                row[column] -= rate * mean / (np.sqrt(square) + epsilon)


@compiled
def update_adam(
    rows: Rows, row_numbers: NDArray[np.int64], gradients: NDArray[np.floating], scalars: AdamScalars
) -> None:
    """Make a step of Adam (Kingma and Ba, ICLR 2015) or AdamW (Loshchilov and Hutter, ICLR 2019), dense ones.

    The states are the mean and the mean of squares. A third one is the largest mean of squares (Reddi and others, ICLR
    2018).
    """
    number_type = rows.values.dtype.type
    rate, epsilon = number_type(scalars.rate), number_type(scalars.epsilon)
    rest1, beta2 = number_type(1 - scalars.beta1), number_type(scalars.beta2)
    rest2, correction = number_type(1 - scalars.beta2), number_type(scalars.square_correction)
    weight_decay, kept = number_type(scalars.weight_decay), number_type(scalars.kept)
    dim = rows.dim
    keeps_largest = rows.values.shape[1] == 4 * dim
    for number in range(row_numbers.shape[0]):
        if row_numbers[number] >= 0:
            row, gradient = rows.values[row_numbers[number]], gradients[number]
            for column in range(dim):
                value = row[column] * kept
                term = gradient[column] + weight_decay * value
                mean, square = row[dim + column], row[2 * dim + column]
                mean += (term - mean) * rest1
                square = square * beta2 + rest2 * term * term
                row[dim + column], row[2 * dim + column] = mean, square
                if keeps_largest:
                    square = max(square, row[3 * dim + column])
                    row[3 * dim + column] = square
                row[column] = value - rate * mean / (np.sqrt(square) / correction + epsilon)


class FtrlScalars(NamedTuple):
    """Numbers of one step of FTRL, float64.

    Args:
        learning_rate: The learning rate, more than 0.
        power: By which power of the squares' sum the learning rate of an element falls, at least 0.
        initial: Where the squares' sum begins.
        l1: The weight of the sum of absolute values.
        l2: The weight of the sum of squares, halved.
        beta: Added to the power of the squares' sum.
    """

    learning_rate: float
    power: float
    initial: float
    l1: float
    l2: float
    beta: float


@compiled
def update_ftrl(
    rows: Rows, row_numbers: NDArray[np.int64], gradients: NDArray[np.floating], scalars: FtrlScalars
) -> None:
    """Make a step of FTRL-proximal (McMahan and others, KDD 2013).

    The states are the sum of squared gradients, without its initial value, and the coefficients of the linear term.
    """
    number_type = rows.values.dtype.type
    rate, power, initial = (
        number_type(scalars.learning_rate),
        number_type(scalars.power),
        number_type(scalars.initial),
    )
    l1, l2, beta = number_type(scalars.l1), number_type(scalars.l2), number_type(scalars.beta)
    dim, takes_root = rows.dim, scalars.power == 0.5
    for number in range(row_numbers.shape[0]):
        if row_numbers[number] >= 0:
            row, gradient = rows.values[row_numbers[number]], gradients[number]
            for column in range(dim):
                before = initial + row[dim + column]
                square_sum = row[dim + column] + gradient[column] * gradient[column]
                after = initial + square_sum
                if takes_root:
                    old, new = np.sqrt(before), np.sqrt(after)
                else:
                    old, new = before**power, after**power
                linear = row[2 * dim + column] + gradient[column] - (new - old) / rate * row[column]
                row[dim + column], row[2 * dim + column] = square_sum, linear
                curvature = (beta + new) / rate + l2
                if curvature == 0 or abs(linear) <= l1:
                    row[column] = 0
                else:
                    row[column] = (np.sign(linear) * l1 - linear) / curvature


@compiled
def add_weight_decay(
    rows: Rows, row_numbers: NDArray[np.int64], gradients: NDArray[np.floating], weight_decay: float
) -> None:
    """Add each row's values times the weight decay to its gradients. All rows must hold all steps so far."""
    decay = rows.values.dtype.type(weight_decay)
    for number in range(row_numbers.shape[0]):
        if row_numbers[number] >= 0:
            row, gradient = rows.values[row_numbers[number]], gradients[number]
            for column in range(rows.dim):
                gradient[column] += decay * row[column]


@compiled
def catch_up_states(ids: NDArray[np.int64], id_map: IdMap, state: MomentumState, buffers: NDArray[np.floating]) -> None:
    """Let copies of momentum buffers, of shape (ids, dim), catch up with all steps."""
    for number in range(ids.shape[0]):
        row_number = find_entry(id_map, ids[number]) - 1
        if row_number >= 0 and state.caught_up[row_number] > 0:
            decay = state.decays[state.caught_up[row_number]]
            for column in range(buffers.shape[1]):
                buffers[number, column] *= decay
