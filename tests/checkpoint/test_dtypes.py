"""Every dtype of PyTorch is saved to the bit, or refused by name before anything is written."""

import json

import pytest
import torch
from checkpoint.saved_objects import SOLO, Holder, save
from safetensors import safe_open

from rankless.checkpoint.checkpoints import load
from rankless.checkpoint.tensor_file_writer import ELEMENT_CODES, STORED_AS
from rankless.errors import CheckpointError

DTYPES = sorted({item for item in vars(torch).values() if isinstance(item, torch.dtype)}, key=str)
WRITTEN = [item for item in DTYPES if item in ELEMENT_CODES or item in STORED_AS]
WITHOUT_TENSORS = ("bits", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "qint", "quint")
"""What the names of dtypes begin with, after a "u", of which PyTorch makes no plain tensors."""


def to_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_the_table_has_every_dtype_that_has_plain_tensors():
    others = [str(item).removeprefix("torch.") for item in DTYPES if item not in WRITTEN]
    assert [name for name in others if not name.removeprefix("u").startswith(WITHOUT_TENSORS)] == []


@pytest.mark.parametrize("dtype", WRITTEN, ids=str)
def test_a_dtype_is_saved_to_the_bit(dtype, tmp_path):
    plain = (torch.arange(48 * dtype.itemsize) * 3 % 251).to(torch.uint8)
    tensor = (plain % 2).bool() if dtype == torch.bool else plain.view(dtype)
    tensors = {"all": tensor.view(6, 8), "row": tensor[:8].clone(), "none": tensor[:0], "one": tensor[5].clone()}
    save(tmp_path / "saved", {"thing": Holder(tensors)})
    found = Holder({})
    load(tmp_path / "saved", {"thing": found}, mesh=SOLO)
    for name, wanted in tensors.items():
        read = found.state[name].clone()
        assert (read.dtype, read.shape) == (dtype, wanted.shape)
        assert torch.equal(to_bytes(read), to_bytes(wanted)), name
    metadata = safe_open(tmp_path / "saved" / "tensors.safetensors", "pt").metadata()
    listed = json.loads(metadata.get(str(dtype).removeprefix("torch."), "[]"))
    assert sorted(listed) == (sorted(f"thing.{name}" for name in tensors) if dtype in STORED_AS else []), metadata


def test_another_program_reads_the_parts_of_complex_numbers(tmp_path):
    numbers = torch.randn(3, 2, dtype=torch.complex128)
    save(tmp_path / "saved", {"thing": Holder({"numbers": numbers})})
    with safe_open(tmp_path / "saved" / "tensors.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "complex128": '["thing.numbers"]'}
        assert torch.equal(file.get_tensor("thing.numbers"), torch.view_as_real(numbers))


@pytest.mark.parametrize("length", range(1, 18))
def test_complex_numbers_lie_at_multiples_of_their_size(length, tmp_path):
    """PyTorch copies rows of them with instructions that end the process otherwise."""
    save(tmp_path / "saved", {"thing": Holder({"n" * length: torch.ones(3, 2, dtype=torch.complex128)})})
    with open(tmp_path / "saved" / "tensors.safetensors", "rb") as file:
        assert (8 + int.from_bytes(file.read(8), "little")) % torch.complex128.itemsize == 0


def test_a_dtype_that_the_manifest_invents_is_damage(tmp_path):
    save(tmp_path / "saved", {"thing": Holder({"t": torch.ones(2)})})
    file = tmp_path / "saved" / "manifest.json"
    file.write_text(file.read_text().replace('"float32"', '"nn"'))
    assert json.loads(file.read_text())
    with pytest.raises(CheckpointError):
        load(tmp_path / "saved", {"thing": Holder({})}, mesh=SOLO)
