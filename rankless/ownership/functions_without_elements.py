"""The functions of PyTorch that read no elements of a tensor, so that divided tensors need not be gathered for them."""

from typing import Any

import torch
from torch import Tensor


def list_functions_without_elements() -> frozenset[Any]:
    """Return the functions of PyTorch that need a tensor's shape, dtype, gradient or the like, but not its elements."""
    properties = (
        "shape dtype device layout ndim itemsize requires_grad grad grad_fn is_leaf output_nr _version name names "
        "is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_nested is_xpu is_mps is_vulkan is_mtia is_maia "
        "is_ipu is_xla is_sparse_csr retains_grad _backward_hooks _post_accumulate_grad_hooks _grad_fn nbytes volatile"
    )
    methods = (
        "size stride dim numel nelement element_size ndimension storage_offset is_floating_point is_complex is_signed "
        "is_contiguous is_inference is_conj is_neg is_same_size get_device has_names requires_grad_ register_hook "
        "register_post_accumulate_grad_hook retain_grad __len__ __hash__ _is_view _is_zerotensor sym_size dim_order "
        "is_pinned is_shared"
    )
    found: set[Any] = set()
    for name in properties.split():
        attribute = getattr(Tensor, name, None)
        for accessor in ("__get__", "__set__", "__delete__"):
            if hasattr(attribute, accessor):
                found.add(getattr(attribute, accessor))
    found.update(getattr(Tensor, name) for name in methods.split() if hasattr(Tensor, name))
    found.update((torch.numel, torch.is_floating_point, torch.is_complex, torch.is_tensor))
    return frozenset(found)


WITHOUT_ELEMENTS = list_functions_without_elements()
