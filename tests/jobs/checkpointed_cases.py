"""Models in which the script itself uses `torch.utils.checkpoint`, in the forms that people write."""

import functools

import torch
import torch.nn.functional as F
from recomputed_cases import WIDTH, Block, Blocks, Noisy, train
from support.trainings import CLASSES, list_cases
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)


def checkpoints_with_dropout(make):
    return train(make, Blocks(lambda block, x: checkpoint(block, x, use_reentrant=False)))


def reentrant_checkpoints_with_noise(make):
    return train(make, Blocks(lambda block, x: checkpoint(block, x, use_reentrant=True), (Noisy, Noisy)))


def nested_checkpoints(make):
    def outer(block, x):
        return checkpoint(lambda value: checkpoint(block, value, use_reentrant=False).sin(), x, use_reentrant=False)

    return train(make, Blocks(outer))


def checkpoints_of_sequences(make):
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES))

    def loss(x, y):
        return F.cross_entropy(model[4](checkpoint_sequential(model[:4], 2, x, use_reentrant=False)), y)

    return train(make, model, loss)


def keep_products(_context, operator, *_args, **_kwargs):
    kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective_checkpoints(make):
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    return train(make, Blocks(lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)))


def checkpoints_in_some_blocks(make):
    model = Blocks()
    model.run = lambda block, x: checkpoint(block, x, use_reentrant=False) if block is model.layers[1] else block(x)
    return train(make, model)


def a_checkpoint_with_parts_outside_of_modules(make):
    weight = nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleDict({"weight": weight, "head": nn.Linear(WIDTH, CLASSES)})

    def loss(x, y):
        hidden = checkpoint(lambda value, scale=2.0: (weight(value) * scale).exp().log1p(), x, use_reentrant=False)
        return F.cross_entropy(model["head"](hidden), y)

    return train(make, model, loss)


def an_embedding_in_a_checkpoint(make):
    model = nn.ModuleDict({"words": nn.Embedding(7, WIDTH), "head": nn.Linear(WIDTH, CLASSES)})

    def loss(x, y):
        ids = x.abs().mul(3).long().clamp(max=6)
        hidden = checkpoint(lambda value: F.gelu(model["words"](value)).mean(1), ids, use_reentrant=False)
        return F.cross_entropy(model["head"](hidden), y)

    return train(make, model, loss)


CASES = list_cases(globals())
