"""What tells ranks that they make the same call: names, texts and digests of its arguments."""

import torch

from rankless.jobs.arguments import leaf_names, taken_apart
from rankless.jobs.call_fingerprint import PIECE_BYTES, PIECES, call_text, digest_of, names_of


def job(images, *more, scale=1.0, **rest):
    """A job with every kind of argument."""


def call(*args, **kwargs):
    return taken_apart(args, kwargs, torch.device("cpu"))


def test_every_tensor_has_the_name_of_its_argument_and_the_way_to_it():
    x = torch.zeros(2)
    given = call({"ids": x, "masks": [x, x]}, x, (x,), scale=2.0, labels=x)
    wanted = ["images['ids']", "images['masks'][0]", "images['masks'][1]", "more[0]", "more[1][0]", "labels"]
    assert names_of(job, given) == wanted
    assert leaf_names(job, given) == [*["images"] * 3, *["more"] * 2, "scale", "labels"]


def test_the_text_has_shapes_and_plain_values_but_no_addresses():
    text = call_text("train", 3, call(torch.zeros(8, 3), 2, "mean", object()))
    assert text == "call 3 of job 'train' with float32[8, 3], 2, 'mean', object"


def test_small_tensors_are_digested_whole_and_large_ones_in_pieces():
    small = torch.zeros(PIECES * PIECE_BYTES // 4)
    changed = small.clone()
    changed[-1] = 1
    assert digest_of(small) != digest_of(changed)
    large = torch.zeros(1 << 20)
    assert digest_of(large) == digest_of(large.clone())
    assert digest_of(large) != digest_of(torch.rand(1 << 20, generator=torch.Generator().manual_seed(1)))


def test_a_transposed_tensor_is_digested_by_its_values():
    values = torch.arange(12.0).reshape(3, 4)
    assert digest_of(values.t()) == digest_of(values.t().clone())
    assert digest_of(values.t()) != digest_of((values + 1).t())
