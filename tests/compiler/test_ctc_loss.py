"""The CTC loss in a job: lengths as lists, tuples and tensors; targets padded and one after the other; all options."""

import pytest
import torch
import torch.nn.functional as F
from simulated_ranks import assert_same_as_plain
from torch import nn

TIMES, SEQUENCES, CLASSES = 9, 7, 5
SCORE_LENGTHS = [9, 8, 9, 5, 7, 6, 9]
TARGET_LENGTHS = [3, 1, 2, 3, 2, 1, 0]


def make_scores(model, features):
    return model(features).log_softmax(2).transpose(0, 1)


def make_batch():
    torch.manual_seed(2)
    model = nn.Linear(4, CLASSES).double()
    features = torch.randn(SEQUENCES, TIMES, 4, dtype=torch.float64)
    return model, features, torch.randint(1, CLASSES, (SEQUENCES, 3))


LENGTHS = {
    "lists": (SCORE_LENGTHS, TARGET_LENGTHS),
    "tuples": (tuple(SCORE_LENGTHS), tuple(TARGET_LENGTHS)),
    "tensors": (torch.tensor(SCORE_LENGTHS), torch.tensor(TARGET_LENGTHS)),
    "narrow tensors": (torch.tensor(SCORE_LENGTHS, dtype=torch.int32), torch.tensor(TARGET_LENGTHS, dtype=torch.int32)),
}


@pytest.mark.ci_sample(2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", LENGTHS)
def test_lengths_of_every_kind_are_exact_and_split(kind: str, reduction: str):
    model, features, targets = make_batch()
    lengths = LENGTHS[kind]

    def loss(rows, labels):
        return F.ctc_loss(make_scores(model, rows), labels, *lengths, reduction=reduction)

    for ranks in (2, 3):
        outcome = assert_same_as_plain(loss, {"model": model}, [features, targets], ranks)
        assert not [record for record in outcome.local.collectives if record.gathered and record.purpose == "operator"]


def test_lengths_that_are_arguments_of_the_job_are_divided_with_the_batch():
    model, features, targets = make_batch()

    def loss(rows, labels, score_lengths, target_lengths):
        return F.ctc_loss(make_scores(model, rows), labels, score_lengths, target_lengths)

    arguments = [features, targets, torch.tensor(SCORE_LENGTHS), torch.tensor(TARGET_LENGTHS)]
    outcome = assert_same_as_plain(loss, {"model": model}, arguments, 2)
    assert not [record for record in outcome.local.collectives if record.gathered]


@pytest.mark.parametrize("blank", [0, 4])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_a_blank_and_losses_that_are_infinite(blank: int, zero_infinity: bool):
    model, features, _ = make_batch()
    labels = torch.full((SEQUENCES, 3), 2)
    lengths = [*SCORE_LENGTHS[:-1], 3 if zero_infinity else 9]  # three times cannot say "2 2 2" with blanks between
    ctc = nn.CTCLoss(blank=blank, zero_infinity=zero_infinity)

    def loss(rows, targets):
        return ctc(make_scores(model, rows), targets, lengths, [3, 3, 3, 1, 2, 3, 3])

    assert_same_as_plain(loss, {"model": model}, [features, labels], 2)


def test_targets_one_after_the_other():
    model, features, targets = make_batch()
    joined = torch.cat([row[:length] for row, length in zip(targets, TARGET_LENGTHS, strict=True)])

    def loss(rows):
        return F.ctc_loss(make_scores(model, rows), joined, SCORE_LENGTHS, TARGET_LENGTHS)

    assert_same_as_plain(loss, {"model": model}, [features], 2)


def test_one_sequence_without_a_batch():
    model, features, targets = make_batch()

    def loss(rows):
        scores = model(rows[0]).log_softmax(1)
        return F.ctc_loss(scores, targets[0], torch.tensor(TIMES), torch.tensor(3)) + model(rows).square().mean()

    assert_same_as_plain(loss, {"model": model}, [features], 2)


def test_fewer_sequences_than_ranks():
    model, features, targets = make_batch()

    def loss(rows, labels):
        return F.ctc_loss(make_scores(model, rows), labels, [9, 8], [2, 1])

    assert_same_as_plain(loss, {"model": model}, [features[:2], targets[:2]], 3, splits_few_rows=True)


def test_scores_weighted_after_the_loss():
    model, features, targets = make_batch()

    def loss(rows, labels):
        losses = F.ctc_loss(make_scores(model, rows), labels, SCORE_LENGTHS, TARGET_LENGTHS, reduction="none")
        return (losses * losses.detach().softmax(0)).sum(), losses

    assert_same_as_plain(loss, {"model": model}, [features, targets], 2)


def test_a_list_beside_a_tensor_raises_the_error_of_pytorch():
    model, features, targets = make_batch()

    def loss(rows, labels):
        return F.ctc_loss(make_scores(model, rows), labels, SCORE_LENGTHS, torch.tensor(TARGET_LENGTHS))

    with pytest.raises(TypeError, match="invalid combination of arguments"):
        assert_same_as_plain(loss, {"model": model}, [features, targets], 2)


def test_invalid_lengths_raise_the_error_of_pytorch():
    model, features, targets = make_batch()

    def loss(rows, labels):
        return F.ctc_loss(make_scores(model, rows), labels, [99] * SEQUENCES, TARGET_LENGTHS)

    with pytest.raises(RuntimeError, match="Expected input_lengths to have value at most 9"):
        assert_same_as_plain(loss, {"model": model}, [features, targets], 2)
