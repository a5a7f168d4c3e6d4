"""Operators on images and sequences: pooling, pads, resizing, sampling, patches."""

import torch
import torch.nn.functional as F
from operator_cases import Case, batch_second, numbers, split

aten = torch.ops.aten

IMAGES = {
    "max pool": Case(lambda x: F.max_pool2d(x, 2).square(), (2, 4, 4)),
    "average pool": Case(lambda x: F.avg_pool2d(x, 2, padding=1).square(), (2, 4, 4)),
    "adaptive average pool": Case(lambda x: F.adaptive_avg_pool2d(x, (2, 3)).square(), (2, 4, 4)),
    "adaptive max pool": Case(lambda x: F.adaptive_max_pool2d(x, (2, 3)).square(), (2, 4, 4)),
    "nearest": Case(lambda x: F.interpolate(x, scale_factor=2, mode="nearest").square(), (2, 3, 3)),
    "bilinear": Case(lambda x: F.interpolate(x, size=(5, 4), mode="bilinear").square(), (2, 3, 3)),
    "bicubic": Case(lambda x: F.interpolate(x, size=(5, 4), mode="bicubic").square(), (2, 3, 3)),
    "reflection pad": Case(lambda x: F.pad(x, (1, 1, 1, 0), mode="reflect").square(), (2, 3, 3)),
    "replication pad": Case(lambda x: F.pad(x, (1, 1, 1, 0), mode="replicate").square(), (2, 3, 3)),
    "pixel shuffle": Case(lambda x: F.pixel_shuffle(x, 2).square(), (4, 2, 2)),
    "pixel shuffle of the batch as channels": Case(
        batch_second(lambda x: F.pixel_shuffle(x, 2).square()), (3, 2, 2), 8
    ),
    "pixel unshuffle": Case(lambda x: F.pixel_unshuffle(x, 2).square(), (1, 4, 4)),
    "max pool in space": Case(lambda x: F.max_pool3d(x, 2).square(), (2, 4, 4, 4)),
    "average pool in space": Case(lambda x: F.avg_pool3d(x, 2).square(), (2, 4, 4, 4)),
    "adaptive pool in space": Case(lambda x: F.adaptive_avg_pool3d(x, 3).square(), (2, 4, 4, 4)),
    "pool of the batch as channels": Case(batch_second(lambda x: F.max_pool2d(x, 2).square()), (2, 4, 4)),
}
SPLIT_IMAGES = {
    "pads in one dim": split(
        lambda x: (
            F.pad(x, (2, 1), mode="reflect").square().sum((1, 2)) + F.pad(x, (2, 1), mode="replicate").sum((1, 2))
        ),
        (2, 4),
    ),
    "pads in space": split(
        lambda x: (
            F.pad(x, (1, 1, 1, 1, 1, 0), mode="reflect").square() + F.pad(x, (1, 1, 1, 1, 0, 1), mode="replicate")
        ),
        (2, 3, 3, 3),
    ),
    "circular pad": split(lambda x: F.pad(x, (2, 1), mode="circular").square(), (2, 4)),
    "unpooling": split(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2).square(), (2, 4, 4)),
    "unpooling in space": split(
        lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2).square(), (1, 4, 4, 4)
    ),
    "fractional pooling": split(
        lambda x: F.fractional_max_pool2d(
            x, 2, output_size=2, _random_samples=numbers(1, 2, 2).abs().expand(x.shape[0], 2, 2)
        ).square(),
        (2, 4, 4),
    ),
    "fractional pooling in space": split(
        lambda x: F.fractional_max_pool3d(
            x, 2, output_size=2, _random_samples=numbers(1, 2, 3).abs().expand(x.shape[0], 2, 3)
        ).square(),
        (2, 4, 4, 4),
    ),
    "adaptive max pool in space": split(lambda x: F.adaptive_max_pool3d(x, 3).square(), (2, 4, 4, 4)),
    "sampling at places": split(
        lambda x: F.grid_sample(x, x[:, 0, :, :, None].expand(-1, -1, -1, 2).tanh(), align_corners=False).square(),
        (2, 4, 4),
    ),
    "bicubic sampling of an image for all": split(
        lambda x: F.grid_sample(
            numbers(1, 2, 4, 4).expand(x.shape[0], -1, -1, -1),
            x[..., None].expand(-1, -1, -1, 2).tanh(),
            mode="bicubic",
            align_corners=True,
        ).square(),
        (3, 4),
    ),
    "sampling in space": split(
        lambda x: F.grid_sample(x, x[:, 0, ..., None].expand(-1, -1, -1, -1, 3).tanh(), align_corners=False).square(),
        (2, 3, 3, 3),
    ),
    "affine grid": split(lambda x: F.affine_grid(x, [x.shape[0], 1, 3, 3], align_corners=False).square(), (2, 3)),
    "patches": split(lambda x: F.unfold(x, 2, padding=1).square(), (2, 4, 4)),
    "images of patches": split(lambda x: F.fold(x, (3, 3), 2).square(), (8, 4)),
    "antialiased resizing": split(
        lambda x: (
            F.interpolate(x, size=3, mode="bilinear", antialias=True).square()
            + F.interpolate(x, size=3, mode="bicubic", antialias=True).square()
        ),
        (2, 4, 4),
    ),
    "resizing in every mode": split(
        lambda x: sum(
            F.interpolate(x, size=5, mode=mode).square()
            for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
        ),
        (2, 4, 4),
    ),
    "resizing in space": split(lambda x: F.interpolate(x, size=5, mode="trilinear").square(), (2, 3, 3, 3)),
}
