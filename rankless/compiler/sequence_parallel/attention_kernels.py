"""Fused attention of some queries to blocks of keys and values, one block after the other, and its gradients.

Lowered programs call these plain functions on local tensors, below autograd. They change no argument.

Note [blocks of attention]: PyTorch's fused kernels return, besides the result, the logarithm of the sum of exponentials
of each query's scores. The results for two blocks of keys are merged with these sums as weights, so no one needs all
keys at once (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The gradient of one block is
what the kernel for gradients returns for it, given the result and the logarithm of all blocks: the probabilities follow
from the latter. So blocks can travel between workers (Liu et al., "Ring Attention with Blockwise Transformers", 2023).

Note [causal blocks]: kernels align a causal mask with their first query, and not all alike if there are more keys than
queries. So a block is cut into pieces: all queries see a key before the first of them, none sees a key after the last
of them, and in between queries and keys of the same positions are a square.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

Range = tuple[int, int]
"""A first index and a length."""
State = tuple[Tensor, Tensor]
"""The results for some blocks, shape (batch, heads, queries, features), in the dtype of the second: the logarithms of
the sums, shape (batch, heads, queries). Without any key the first is zero and the second minus infinity."""
Block = tuple[Tensor, Tensor]
"""Keys and values, shape (batch, heads, keys, features). They may have fewer heads than queries."""

CONSTANTS = {
    "dropout_p": 0.0,
    "return_debug_mask": False,
    "compute_log_sumexp": True,
    "grad_input_mask": [True, True, True, False],
}
"""Arguments that are always the same, by the names in PyTorch's schemas. Absent tensors are None."""
ROW_MULTIPLES = {
    aten._scaled_dot_product_efficient_attention.default: 32,
    aten._scaled_dot_product_efficient_attention_backward.default: 32,
}
"""Operators whose logarithms are padded to a multiple of so many queries."""


@dataclass(frozen=True)
class Piece:
    """Some queries and keys of a block, counted within it; see Note [causal blocks]."""

    queries: Range
    keys: Range
    is_causal: bool


@dataclass(frozen=True)
class AttentionBlock:
    """What PyTorch's kernels need besides tensors to compute a block.

    Args:
        operator: The operator of the program, the forward or the backward one.
        scale: The factor of scores. None for that of PyTorch.
        is_causal: Whether a query sees only keys of its own position, and of earlier ones.
    """

    operator: Any
    scale: float | None
    is_causal: bool

    def run(self, tensors: dict[str, Tensor | None], is_causal: bool) -> Any:
        """Call the operator for one piece; arguments have the names of PyTorch's schema."""
        given: dict[str, Any] = {**CONSTANTS, **tensors, "scale": self.scale, "is_causal": is_causal}
        query, key = given["query"], given["key"]
        given |= {"max_q": query.shape[2], "max_k": key.shape[2]}
        # Kernels read the state of the generator for dropout only.
        given |= dict.fromkeys(("philox_seed", "philox_offset"), query.new_zeros((), dtype=torch.int64))
        names = [described.name for described in self.operator._schema.arguments]
        return self.operator(**{name: given.get(name) for name in names})


def run_cpu_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> State:
    """Run PyTorch's kernel for CPUs, which would end the process for a rank that has no queries."""
    if not query.shape[2]:
        return finish_attention(make_empty_state(query, value), query.dtype)
    found: State = aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, *args, **kwargs)
    return found


def list_pieces(queries: Range, keys: Range, is_causal: bool) -> list[Piece]:
    """Return the pieces of a block in which queries see keys; see Note [causal blocks].

    Args:
        queries: The range of queries among all positions.
        keys: The range of keys.
        is_causal: Whether a query sees only keys of its own position, and of earlier ones.
    """
    (first_query, rows), (first_key, columns) = queries, keys
    if not is_causal:
        pieces = [Piece((0, rows), (0, columns), is_causal=False)]
    else:
        earlier = min(max(first_query - first_key, 0), columns)  # keys that all queries see
        blind = min(max(first_key - first_query, 0), rows)  # queries that see no key
        square = min(rows - blind, columns - earlier)
        after = blind + square
        pieces = [
            Piece((blind, rows - blind), (0, earlier), is_causal=False),
            Piece((blind, square), (earlier, square), is_causal=True),
            Piece((after, rows - after), (earlier, square), is_causal=False),
        ]
    return [piece for piece in pieces if piece.queries[1] > 0 and piece.keys[1] > 0]


def attend_to_block(
    settings: AttentionBlock,
    query: Tensor,
    mask: Tensor | None,
    block: Block,
    starts: tuple[int, int],
    state: State | None,
) -> State:
    """Return the state after one more block.

    Args:
        settings: The kernel.
        query: Queries, shape (batch, heads, queries, features).
        mask: What is added to the scores of these queries and all keys. Dims may have size one.
        block: Keys and values.
        starts: The positions of the first query and of the first key.
        state: The state after the blocks before this one. None for the first.
    """
    key, value = block
    pieces = list_pieces((starts[0], query.shape[2]), (starts[1], key.shape[2]), settings.is_causal)
    for piece in pieces if query.numel() and key.numel() else ():
        rows = take_rows(query, piece.queries)
        part = take_mask(mask, piece.queries, (starts[1] + piece.keys[0], piece.keys[1]))
        keys, values = take_rows(key, piece.keys), take_rows(value, piece.keys)
        tensors = {"query": rows, "key": keys, "value": values, "attn_mask": part}
        out, logsumexp, *_ = settings.run(tensors, piece.is_causal)
        logsumexp = logsumexp.narrow(2, 0, rows.shape[2])
        if part is not None:
            # The kernel returns zero for queries that see no key, as if the sum of exponentials were one.
            logsumexp = torch.where((part == -torch.inf).all(-1), -torch.inf, logsumexp)
        found = out.to(logsumexp.dtype), logsumexp
        if state is None and piece.queries[1] == query.shape[2]:
            state = found
            continue
        state = state or make_empty_state(query, value)
        before = take_rows(state[0], piece.queries), take_rows(state[1], piece.queries)
        merged = merge_states(before, found)
        state = put_rows(state[0], merged[0], piece.queries), put_rows(state[1], merged[1], piece.queries)
    return state or make_empty_state(query, value)


def make_empty_state(query: Tensor, value: Tensor) -> State:
    """Return the state before the first block, with the layout that kernels give their results."""
    batch, heads, rows, _ = query.shape
    dtype = accumulate_in(query)
    out = query.new_zeros((batch, rows, heads, value.shape[3]), dtype=dtype)
    return out.transpose(1, 2), query.new_full((batch, rows, heads), -torch.inf, dtype=dtype).transpose(1, 2)


def accumulate_in(query: Tensor) -> torch.dtype:
    """Return the dtype of states: that of the logarithms which kernels return."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def merge_states(one: State, other: State) -> State:
    """Return the state of the blocks of two states. The first tensor of the second state is overwritten."""
    total = torch.logaddexp(one[1], other[1])
    own, others = (weigh(item[1], total) for item in (one, other))
    return other[0].mul_(others).addcmul_(one[0], own), total


def weigh(logsumexp: Tensor, total: Tensor) -> Tensor:
    """Return the part that a state has of a merged one, for each query, with a last dim of size one."""
    weight = (logsumexp - total).exp()
    return weight.masked_fill_(logsumexp == -torch.inf, 0).unsqueeze(-1)  # also where no block has a key


def finish_attention(state: State, dtype: torch.dtype) -> State:
    """Return results in the dtype of queries, and the logarithms: zero for queries that see no key, as kernels do."""
    out, logsumexp = state
    return out.to(dtype), torch.where(logsumexp == -torch.inf, 0, logsumexp)


def differentiate_block(
    settings: AttentionBlock,
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    block: Block,
    starts: tuple[int, int],
    grad_query: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries for the blocks so far, and those of one block's keys and values.

    Args:
        settings: The kernel.
        given: Gradients of results, queries, results and logarithms of all blocks, and the mask of all keys.
        block: Keys and values.
        starts: The positions of the first query and of the first key.
        grad_query: The gradients of queries for the blocks before this one. None for the first block.

    Returns:
        Gradients in the shapes of queries, keys and values; the first in the dtype of states.
    """
    grad, query, out, logsumexp, mask = given
    key, value = block
    wide = accumulate_in(query)
    found: list[Tensor | None] = [None, None, None]
    pieces = list_pieces((starts[0], query.shape[2]), (starts[1], key.shape[2]), settings.is_causal)
    for piece in pieces if query.numel() and key.numel() else ():
        rows, columns = piece.queries, piece.keys
        tensors = {
            "query": take_rows(query, rows),
            "key": take_rows(key, columns),
            "value": take_rows(value, columns),
            "out": take_rows(out, rows),
            "logsumexp": pad_rows(take_rows(logsumexp, rows), ROW_MULTIPLES.get(settings.operator, 1)),
            "attn_mask": take_mask(mask, rows, (starts[1] + columns[0], columns[1])),
        }
        tensors |= dict.fromkeys(("grad_out", "grad_out_"), take_rows(grad, rows))
        by_query, by_key, by_value, *_ = settings.run(tensors, piece.is_causal)
        parts = ((by_query.to(wide), query, rows), (by_key, key, columns), (by_value, value, columns))
        found = [add_rows(total, *part) for total, part in zip(found, parts, strict=True)]
    by_query, by_key, by_value = found
    if grad_query is not None:
        by_query = grad_query if by_query is None else by_query.add_(grad_query)
    if by_query is None:
        by_query = torch.zeros_like(query, dtype=wide)
    return (
        by_query,
        torch.zeros_like(key) if by_key is None else by_key,
        torch.zeros_like(value) if by_value is None else by_value,
    )


def add_rows(total: Tensor | None, part: Tensor, whole: Tensor, rows: Range) -> Tensor:
    """Add to some rows of a sum that has the shape of `whole`; None is a sum without terms. The sum is overwritten."""
    if total is None and rows == (0, whole.shape[2]):
        return part
    if total is None:
        total = torch.zeros_like(whole, dtype=part.dtype)
    total.narrow(2, *rows).add_(part)
    return total


def take_rows(value: Tensor, rows: Range) -> Tensor:
    """Return a range of the positions, dim 2, of a value."""
    return value if rows == (0, value.shape[2]) else value.narrow(2, *rows)


def put_rows(value: Tensor, part: Tensor, rows: Range) -> Tensor:
    """Return a value with other contents in a range of its positions."""
    if rows == (0, value.shape[2]):
        return part
    return value.slice_scatter(part, 2, rows[0], sum(rows))


def take_mask(mask: Tensor | None, rows: Range, columns: Range) -> Tensor | None:
    """Return the part of a mask for some queries and keys; dims of size one hold for all of them."""
    if mask is None:
        return None
    for dim, part in ((-2, rows), (-1, columns)):
        if mask.shape[dim] != 1:
            mask = mask.narrow(dim, *part)
    return mask


def pad_rows(logsumexp: Tensor, multiple: int) -> Tensor:
    """Return logarithms, contiguous and padded to a multiple of queries as some kernels take them."""
    missing = -logsumexp.shape[2] % multiple
    if not missing:
        return logsumexp.contiguous()
    return torch.nn.functional.pad(logsumexp, (0, missing), value=torch.inf)
