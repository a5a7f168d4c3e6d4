import pytest
import torch
from embedding_pair import OPTIMIZERS, EmbeddingPair


@pytest.fixture
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=OPTIMIZERS)
def pair(request, float64_by_default):  # noqa: ARG001  # the pair is in float64
    return EmbeddingPair(OPTIMIZERS[request.param])
