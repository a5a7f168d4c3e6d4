"""What PyTorch's modules decide by themselves, and what a capture answers: a new version that asks more is noticed.

The optimizers' choices (foreach, fused, capturable) are not here: optimizers run as in a plain script, never in a
trace. The kernels of attention and of cuDNN are chosen by switches, which are part of a program's key
(`capture.global_modes`). All other choices of `torch.nn` follow from the questions below.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

from rankless.torch_versions import find_torch_version

QUESTIONS = frozenset(
    {
        *("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_fastpath_enabled"),
        *("has_torch_function", "is_compiling", "is_dynamo_compiling", "is_exporting", "is_tracing"),
        *("_is_make_fx_tracing", "_get_tracing_state", "is_nested", "are_deterministic_algorithms_enabled"),
    }
)
AS_PLAIN = "`tracing.replaced_functions` answers as in a plain run"
SAME = "the answer in a capture is that of a plain run"
KEY = "the switch is part of a program's key"
SCRIPTED = "asks for a trace of torch.jit, which a capture is not"
NOT_VALUES = "decides what happens after an error, or which copies are kept: no values"

CHOICES: dict[tuple[str, str], tuple[set[str], str]] = {
    ("nn/modules/activation.py", "_is_make_fx_tracing"): ({"is_exporting"}, AS_PLAIN),
    ("nn/modules/activation.py", "MultiheadAttention.forward"): (
        {
            *("get_fastpath_enabled", "has_torch_function", "is_autocast_enabled", "is_grad_enabled", "is_nested"),
            "_is_make_fx_tracing",
        },
        AS_PLAIN,
    ),
    ("nn/modules/linear_cross_entropy.py", "_linear_cross_entropy_batch_chunked"): ({"is_grad_enabled"}, SAME),
    ("nn/modules/module.py", "Module._slow_forward"): ({"_get_tracing_state"}, SCRIPTED),
    ("nn/modules/module.py", "Module._call_impl"): ({"_get_tracing_state", "is_compiling"}, NOT_VALUES),
    ("nn/modules/transformer.py", "_get_seq_len"): ({"is_nested"}, AS_PLAIN),
    ("nn/modules/transformer.py", "TransformerEncoder.forward"): (
        {
            *("get_fastpath_enabled", "has_torch_function", "is_autocast_enabled", "is_compiling", "is_grad_enabled"),
            "is_nested",
        },
        AS_PLAIN,
    ),
    ("nn/modules/transformer.py", "TransformerEncoderLayer.forward"): (
        {"get_fastpath_enabled", "has_torch_function", "is_autocast_enabled", "is_grad_enabled", "is_nested"},
        AS_PLAIN,
    ),
    ("nn/functional.py", "max_pool3d_with_indices"): ({"are_deterministic_algorithms_enabled"}, KEY),
    ("nn/functional.py", "embedding_bag"): ({"is_nested"}, SAME),
    ("nn/functional.py", "linear_cross_entropy"): ({"is_compiling", "is_grad_enabled", "is_tracing"}, NOT_VALUES),
    ("nn/functional.py", "interpolate"): ({"_get_tracing_state", "are_deterministic_algorithms_enabled"}, KEY),
    ("nn/functional.py", "pad"): ({"are_deterministic_algorithms_enabled", "is_compiling"}, KEY),
    ("nn/functional.py", "multi_head_attention_forward"): ({"is_tracing"}, SCRIPTED),
    ("functional.py", "broadcast_shapes"): ({"is_tracing"}, SCRIPTED),
    ("nn/utils/parametrize.py", "_inject_property.get_parametrized"): ({"_get_tracing_state"}, SCRIPTED),
    ("nn/utils/rnn.py", "pack_padded_sequence"): ({"_get_tracing_state"}, SCRIPTED),
    ("nn/utils/rnn.py", "pad_sequence"): ({"is_tracing"}, SCRIPTED),
    ("nn/utils/stateless.py", "_functional_call"): ({"is_tracing"}, SCRIPTED),
}
if find_torch_version().startswith(("2.11", "2.12")):
    del CHOICES["nn/modules/linear_cross_entropy.py", "_linear_cross_entropy_batch_chunked"]
    del CHOICES["nn/functional.py", "max_pool3d_with_indices"]
    del CHOICES["nn/functional.py", "linear_cross_entropy"]
if find_torch_version().startswith("2.11"):
    CHOICES["nn/functional.py", "pad"] = ({"are_deterministic_algorithms_enabled"}, KEY)
if find_torch_version().startswith("2.15"):
    del CHOICES["nn/modules/linear_cross_entropy.py", "_linear_cross_entropy_batch_chunked"]
    CHOICES |= {
        ("nn/modules/linear_cross_entropy.py", "_check_batch_chunked_grad_flags"): ({"is_grad_enabled"}, SAME),
        ("nn/functional.py", "_linear_cross_entropy_chunked_applies"): ({"is_grad_enabled", "is_tracing"}, SAME),
        ("nn/functional.py", "linear_cross_entropy"): ({"is_compiling", "is_grad_enabled"}, NOT_VALUES),
        ("nn/modules/module.py", "Module._call_impl"): ({"is_compiling"}, NOT_VALUES),
    }


def list_questions(node: ast.AST, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield where a file of PyTorch asks, and what."""
    for child in ast.iter_child_nodes(node):
        inner = (*path, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else path
        name = child.attr if isinstance(child, ast.Attribute) else ""
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
            # `nn.functional` asks whether to hand a call to a mode, which the capture needs.
            name = child.func.id if child.func.id != "has_torch_function" else ""
        if name in QUESTIONS:
            yield ".".join(inner), name
        yield from list_questions(child, inner)


def test_pytorch_decides_by_nothing_but_the_listed_questions():
    root = Path(torch.__file__).parent
    files = [*root.glob("nn/modules/*.py"), *root.glob("nn/utils/*.py"), root / "nn/functional.py"]
    found: dict[tuple[str, str], set[str]] = {}
    for file in [*files, root / "functional.py"]:
        for place, name in list_questions(ast.parse(file.read_text())):
            found.setdefault((str(file.relative_to(root)), place), set()).add(name)
    assert found == {place: names for place, (names, _) in CHOICES.items()}
