"""Backends that move the values of executed operations.

Enters: the tensors of a batch, on every rank of a process set in the same order. Leaves: the combined tensors.
`engine.execution` calls `opening`, which chooses: `shared_memory` uses groups of `rankless.collectives.backends`, for
tensors on the CPU of ranks that share a host; `process_group` uses Gloo and NCCL.
"""
