"""Models on GPUs: on several workers the same training as on one GPU.

Workers share a GPU where there are fewer GPUs than workers. Their process group is then Gloo, which copies through
memory of the host; with a GPU for each it is NCCL.
"""

import pytest
from support.model_trainings import verify

MODELS = ("lenet", "gpt", "bert", "llama", "t5", "vit", "towers", "tagger", "mixture")
DIVISIONS = {
    "zero-1": ("-n", "2", "--zero", "optimizer"),
    "zero-2": ("-n", "3", "--zero", "gradients"),
    "zero-3": ("-n", "2", "--zero", "parameters"),
    "tensor": ("--mesh", "tensor=2"),
    "data and tensor": ("--mesh", "data=2,tensor=2"),
    "sequence parallel": ("--mesh", "tensor=2", "--sequence-parallel"),
    "sequence": ("--mesh", "sequence=2"),
    "pipeline": ("--mesh", "pipeline=2", "--schedule", "1f1b"),
    "pipeline and data": ("--mesh", "pipeline=2,data=2", "--schedule", "zero-bubble"),
    "expert": ("--mesh", "expert=2"),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_the_same_training_on_two_workers(tmp_path, model):
    verify(tmp_path, ("-n", "2"), "--model", model, "--device", "cuda")


@pytest.mark.parametrize("model", ["gpt", "mixture"])
@pytest.mark.parametrize("division", DIVISIONS)
def test_a_division_is_the_same_training(tmp_path, division, model):
    first, workers, *options = DIVISIONS[division]
    verify(tmp_path, (first, workers), "--model", model, *options, "--device", "cuda")


@pytest.mark.parametrize("model", ["lenet", "gpt", "llama", "tagger"])
@pytest.mark.parametrize("setting", [("--bfloat16",), ("--random", "counter"), ("--accumulate", "2", "--clip", "1.0")])
def test_a_setting_is_the_same_training(tmp_path, setting, model):
    verify(tmp_path, ("-n", "2"), "--model", model, *setting, "--device", "cuda")
