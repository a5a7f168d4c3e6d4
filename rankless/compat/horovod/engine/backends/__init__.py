"""Backends that move the values of executed operations: memory shared by the ranks of a host, or torch process groups.

Enters: the tensors of a batch, on every rank of a process set in the same order. Leaves: the combined tensors.
`engine.execution` chooses the backend.
"""
