"""Fused attention as a GPU has it, in a ring: stand-ins on a CPU have the arguments and results of PyTorch's kernels.

No kernel of a GPU runs here. The stand-ins refuse what the kernels would refuse, as far as their sources say.
"""

from collections import Counter

import pytest
import torch
from simulated_pipelines import capture_job
from simulated_ranks import assert_runs_as_plain, divide_evenly, run_program_on_axes
from torch import Tensor, nn

aten = torch.ops.aten
MULTIPLE = 32
"""The memory-efficient kernels pad logarithms to a multiple of so many queries."""


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return results and logarithms of the sums, as shape (batch, heads, queries)."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        assert query.shape[2] == key.shape[2], "kernels do not agree on the mask of such a block"
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def differentiate(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], logsumexp: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from the result and the logarithms of all blocks."""
    grad, query, key, value, out = tensors
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    weights = (query @ key.transpose(-2, -1) * factor - logsumexp.unsqueeze(-1)).exp()
    if is_causal:
        assert query.shape[2] == key.shape[2], "kernels do not agree on the mask of such a block"
        weights = weights.tril()
    terms = weights * (grad @ value.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True)) * factor
    return terms @ key, terms.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ grad


def run_efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    assert (attn_bias, dropout_p) == (None, 0)
    assert query.numel()
    assert key.numel()
    out, logsumexp = attend(query, key, value, is_causal, scale)
    seeds = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
    if not compute_log_sumexp:
        return out, logsumexp[..., :0], *seeds
    padded = nn.functional.pad(logsumexp, (0, -logsumexp.shape[2] % MULTIPLE), value=torch.inf)
    return out, padded, *seeds


def run_efficient_backward(
    grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
):  # fmt: skip
    assert (attn_bias, dropout_p) == (None, 0)
    assert list(grad_input_mask) == [True, True, True, False]
    assert logsumexp.is_contiguous()
    assert logsumexp.shape[2] == query.shape[2] + -query.shape[2] % MULTIPLE
    assert philox_seed.dtype == philox_offset.dtype == torch.int64
    given = (grad_out_, query, key, value, out)
    return *differentiate(given, logsumexp[..., : query.shape[2]], is_causal, scale), None


def run_flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    assert (return_debug_mask, dropout_p) == (False, 0)
    out, logsumexp = attend(query, key, value, is_causal, scale)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, logsumexp, None, None, query.shape[2], key.shape[2], state, torch.zeros(0), torch.zeros(0)


def run_flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    assert (max_q, max_k, dropout_p) == (query.shape[2], key.shape[2], 0)
    assert cum_seq_q is cum_seq_k is None
    assert all(isinstance(item, Tensor) for item in (philox_seed, philox_offset))
    assert logsumexp.is_contiguous()
    return differentiate((grad_out, query, key, value, out), logsumexp, is_causal, scale)


STAND_INS = {
    "_scaled_dot_product_efficient_attention": run_efficient,
    "_scaled_dot_product_efficient_attention_backward": run_efficient_backward,
    "_scaled_dot_product_flash_attention": run_flash,
    "_scaled_dot_product_flash_attention_backward": run_flash_backward,
}


@pytest.fixture
def _kernels():
    library = torch.library.Library("aten", "IMPL")
    for name, function in STAND_INS.items():
        library.impl(name, function, "CPU")
    yield
    library._destroy()


CALLS = {
    "efficient": lambda q, k, v, causal: aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, is_causal=causal, scale=0.4
    ),
    "flash": lambda q, k, v, causal: aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal),
}


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.ci_sample(3)
def test_the_kernels_of_a_gpu_get_the_arguments_that_they_take(name, is_causal, ranks):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]).double()

    def function(x):
        query, key, value = (layer(x).unflatten(2, (1, 8)).transpose(1, 2) for layer in model)
        return CALLS[name](query, key, value, is_causal)[0].square().mean()

    arguments = [torch.randn(2, 7, 8, dtype=torch.float64)]
    program = capture_job(function, {"model": model}, arguments, True)
    targets = {str(node.target) for node in program.graph.nodes}
    assert any(name in target and "backward" in target for target in targets)
    shardings = [divide_evenly(arguments[0].shape, (ranks,), [1])]
    outcome = assert_runs_as_plain(
        lambda: run_program_on_axes(program, arguments, {"model": model}, (ranks,), shardings, {}),
        function,
        {"model": model},
        arguments,
    )
    moves = Counter((item.kind, item.backward) for item in outcome.local.collectives if item.purpose != "output")
    assert moves == {("ring_shift", False): 2 * (ranks - 1), ("ring_shift", True): 4 * (ranks - 1)}
