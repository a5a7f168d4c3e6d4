"""Tensors and small typed messages between the processes of a mesh.

Enters: a tensor, and the mesh it moves over. Leaves: the tensor after the collective. Called by `program`,
`checkpoint` and `views`; nobody else talks to `torch.distributed`, save `runtime`, which makes the groups.
"""
