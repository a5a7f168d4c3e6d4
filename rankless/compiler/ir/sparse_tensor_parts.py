"""The dense tensors of which a sparse tensor consists."""

import torch
from torch import Tensor


def list_dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors of which a sparse one consists, or a dense tensor itself. They share its memory."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
