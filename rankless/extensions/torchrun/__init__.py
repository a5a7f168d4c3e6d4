"""torchrun and `python -m torch.distributed.launch`: their options, and the profile of their programs."""
