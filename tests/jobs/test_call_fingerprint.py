"""How ranks check that they make the same call: names, texts and fingerprints of its arguments."""

import torch

from rankless.jobs.arguments import find_leaf_names, flatten_arguments
from rankless.jobs.call_agreement import PIECE_BYTES, PIECES, fingerprint_tensor, format_call, name_tensors


def job(images, *more, scale=1.0, **rest):
    """A job with every kind of argument."""


def call(*args, **kwargs):
    return flatten_arguments(args, kwargs, torch.device("cpu"))


def test_a_tensors_name_has_its_argument_and_path():
    x = torch.zeros(2)
    given = call({"ids": x, "masks": [x, x]}, x, (x,), scale=2.0, labels=x)
    wanted = ["images['ids']", "images['masks'][0]", "images['masks'][1]", "more[0]", "more[1][0]", "labels"]
    assert name_tensors(job, given) == wanted
    assert find_leaf_names(job, given) == [*["images"] * 3, *["more"] * 2, "scale", "labels"]


def test_a_calls_text_has_shapes_and_plain_values_but_no_addresses():
    text = format_call("train", 3, call(torch.zeros(8, 3), 2, "mean", object()))
    assert text == "call 3 of job 'train' with float32[8, 3], 2, 'mean', object"


def test_small_tensors_are_fingerprinted_whole_and_large_ones_sampled():
    small = torch.zeros(PIECES * PIECE_BYTES // 4)
    changed = small.clone()
    changed[-1] = 1
    assert fingerprint_tensor(small) != fingerprint_tensor(changed)
    large = torch.zeros(1 << 20)
    assert fingerprint_tensor(large) == fingerprint_tensor(large.clone())
    assert fingerprint_tensor(large) != fingerprint_tensor(
        torch.rand(1 << 20, generator=torch.Generator(torch.get_default_device()).manual_seed(1))
    )


def test_a_transposed_tensor_is_fingerprinted_by_its_values():
    values = torch.arange(12.0).reshape(3, 4)
    assert fingerprint_tensor(values.t()) == fingerprint_tensor(values.t().clone())
    assert fingerprint_tensor(values.t()) != fingerprint_tensor((values + 1).t())
