"""Sparse tensors in a program: every rank has the whole one, because pieces of it cannot be taken or joined."""

import torch
from simulated_ranks import run_on_simulated_ranks
from torch import nn


def run(job, modules, batch):
    plain = job(batch)
    plain.backward()
    wanted = {name: item.grad for module in modules.values() for name, item in module.named_parameters()}
    found = run_on_simulated_ranks(job, modules, [batch], 2)
    return found.gradients, wanted


def test_the_sparse_gradient_of_an_embedding_keeps_its_form():
    embedding = nn.Embedding(9, 6, sparse=True).double()

    def loss(words):
        return embedding(words).sin().sum()

    found, wanted = run(loss, {"embedding": embedding}, torch.arange(5))
    assert found["embedding.weight"].is_sparse
    assert torch.equal(found["embedding.weight"].to_dense(), wanted["weight"].to_dense())


def test_a_sparse_gradient_that_an_operator_changes_is_not_cut():
    """The rule of the product would cut both of its arguments, and cutting a sparse tensor crashed."""
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(4, 6, dtype=torch.float64)) for name in ("a", "b")})

    def loss(bags):
        weight = model["a"] * model["b"]
        return nn.functional.embedding_bag(bags, weight, torch.tensor([0, 3]), mode="sum", sparse=True).sin().sum()

    found, wanted = run(loss, {"model": model}, torch.tensor([0, 1, 3, 2, 1, 0]))
    for name in ("a", "b"):
        torch.testing.assert_close(found[f"model.{name}"].to_dense(), wanted[name].to_dense(), rtol=1e-12, atol=1e-12)
