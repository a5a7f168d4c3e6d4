"""`oneflow.data`: a data set of handwritten digits that needs no download."""

import numpy
import torch
import torch.nn.functional as F

from .missing import getattr_of, refuse, refuse_given

__getattr__ = getattr_of("data")

Batches = tuple[numpy.ndarray, numpy.ndarray]


def load_mnist(train_batch_size: int = 100, test_batch_size: int = 100, **not_taken: object) -> tuple[Batches, Batches]:
    """Return batches of handwritten digits: scikit-learn's 1,797 images, enlarged to MNIST's 28 x 28 pixels.

    MNIST itself would be a download. There are 1,500 images to train on and 297 to test with. A last, smaller batch is
    left out.

    Args:
        train_batch_size: The size of batches to train on.
        test_batch_size: The size of batches to test with.
        **not_taken: Other layouts of images are refused.

    Returns:
        (train images, train labels), (test images, test labels). Images have the shape (batches, size, 1, 28, 28), are
        float32, and lie between 0 and 1. Labels have the shape (batches, size), and are int32.

    Raises:
        ConfigError: An argument is invalid, or scikit-learn is not installed.
    """
    refuse_given("flow.data.load_mnist", **not_taken)
    images, labels = _read_digits()
    train, test = slice(0, 1500), slice(1500, None)
    return (
        (_cut(images[train], train_batch_size), _cut(labels[train], train_batch_size)),
        (_cut(images[test], test_batch_size), _cut(labels[test], test_batch_size)),
    )


def _read_digits() -> Batches:
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  # only this function needs scikit-learn
    except ImportError as error:
        fix = "pip install scikit-learn, which has the digits, or pass arrays of your own to the job"
        raise refuse("flow.data.load_mnist", str(error), fix) from error
    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(small, size=(28, 28), mode="bilinear").numpy()
    order = numpy.random.RandomState(1).permutation(len(images))
    return images[order], digits.target[order].astype(numpy.int32)


def _cut(values: numpy.ndarray, size: int) -> numpy.ndarray:
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= len(values):
        raise refuse("flow.data.load_mnist", f"a batch size of {size!r}", f"pass a number from 1 to {len(values)}")
    count = len(values) // size
    return values[: count * size].reshape(count, size, *values.shape[1:])
