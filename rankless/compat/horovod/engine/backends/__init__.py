"""What moves the values of operations that are executed: memory that the ranks of a host share, or a group of torch's.

Enters: tensors of a batch, on every rank of a process set at the same place in the order. Leaves: the combined ones.
`execution` chooses the plane.
"""
