"""Horovod's API for PyTorch: `import horovod.torch as hvd`."""
