"""Changes of tensors outside jobs are found by version and address, and dead tensors are forgotten."""

import gc

import pytest
import torch
from torch import nn

from rankless.context.changes_outside_jobs import ModelChangeDetector


def replace_data(tensor):
    tensor.data = torch.zeros_like(tensor)


def change_in_place(tensor):
    with torch.no_grad():
        tensor.add_(1)


CHANGES = {"data": replace_data, "in place": change_in_place}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("place", [0, 2])
def test_a_change_of_one_tensor_is_found_until_it_is_recorded(change, place):
    tensors = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    detector = ModelChangeDetector()
    assert detector.have_changed(tensors)
    detector.record_versions(tensors)
    assert not detector.have_changed(tensors)
    change(tensors[place])
    assert detector.have_changed(tensors)
    detector.record_versions(tensors)
    assert not detector.have_changed(tensors)


def test_a_new_tensor_is_a_change():
    tensors = [torch.ones(2), torch.ones(2)]
    detector = ModelChangeDetector()
    detector.record_versions(tensors)
    assert detector.have_changed([*tensors, torch.ones(2)])
    assert not detector.have_changed(tensors[1:])


def test_a_tensor_with_the_id_of_a_dead_one_is_new():
    detector = ModelChangeDetector()
    for _ in range(50):
        tensor = torch.ones(2)
        assert detector.have_changed([tensor])
        detector.record_versions([tensor])
        del tensor
    gc.collect()
    assert not detector._versions
    assert not detector._references


def test_a_tensor_without_an_address_is_recorded_by_its_version():
    tensors = [torch.ones(2), torch.eye(3).to_sparse()]
    detector = ModelChangeDetector()
    detector.record_versions(tensors)
    assert not detector.have_changed(tensors)
    change_in_place(tensors[0])
    assert detector.have_changed(tensors)
