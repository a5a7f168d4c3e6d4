"""Every operator of a program has its line and its module, in the forward and in the backward pass."""

import functools
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from simulated_ranks import run_on_simulated_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankless.compiler.ir.operator_origin import ModuleName, OperatorOrigin, decode_origin
from rankless.user_code import display_name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.norm(self.linear(values)).relu() * values  # used twice: gradients are added


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.checkpointed = Block()
        self.called_by_forward = Block()

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        values = checkpoint(self.checkpointed, values, use_reentrant=False)
        return self.called_by_forward.forward(values).sin()


def test_operators_of_both_passes_have_lines_and_modules() -> None:
    torch.manual_seed(0)
    model = Model()
    outcome = run_on_simulated_ranks(lambda x: F.mse_loss(model(x), x), {"model": model}, [torch.randn(6, 6)], 2)
    found: dict[bool, set[str]] = {False: set(), True: set()}
    for node in outcome.sharded.logical.graph.nodes:
        if node.op == "call_function":
            assert re.fullmatch(re.escape(display_name(__file__)) + r":\d+|", node.meta["line"]), node.meta["line"]
            module = node.meta["module"]
            found[node.meta["backward"]].add("" if module is None else f"{module.path} ({module.kind})")
    expected = {
        *(f"model.blocks.{number}{part}" for number in range(2) for part in (" (Block)", ".linear (Linear)")),
        *(f"model.checkpointed{part}" for part in (" (Block)", ".linear (Linear)", ".norm (LayerNorm)")),
        "model.called_by_forward.linear (Linear)",
    }
    assert found[False] >= expected | {"", "model (Model)"}
    assert found[True] >= expected | {""}


@pytest.mark.parametrize("job", ["own function", "the package's"])
def test_operators_of_an_installed_package_have_the_line_of_the_script_that_called_it(job: str, tmp_path: Path) -> None:
    file = tmp_path / "site-packages" / "zoo.py"
    file.parent.mkdir()
    file.write_text("import torch\n\n\ndef loss(model, x):\n    return (model(x) - x).square().mean()\n")
    zoo = runpy.run_path(str(file))
    model = nn.Linear(6, 6)

    def own(x: Tensor) -> Tensor:
        return zoo["loss"](model, x)

    if job == "own function":
        function, line = own, f"{display_name(__file__)}:{own.__code__.co_firstlineno + 1}"
    else:
        function, line = functools.partial(zoo["loss"], model), f"{display_name(str(file))}:5"
    outcome = run_on_simulated_ranks(function, {"model": model}, [torch.randn(6, 6)], 2)
    operators = [node for node in outcome.sharded.logical.graph.nodes if node.op == "call_function"]
    assert {node.meta["line"] for node in operators} - {""} == {line}


def test_the_origin_survives_what_pytorch_appends_to_it() -> None:
    inside = OperatorOrigin("/a/train.py:12", ModuleName("model.layers.0", "Linear"))
    for origin in (inside, OperatorOrigin("/a/train.py:12"), OperatorOrigin("")):
        assert decode_origin(origin.encode()) == origin
        assert decode_origin(origin.encode() + "Gradient addition node due to multiple use of tensor around:") == origin
    assert decode_origin(None) == decode_origin("") == OperatorOrigin("")
    assert decode_origin("train.py:3") == OperatorOrigin("train.py:3")
