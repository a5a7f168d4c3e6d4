"""The house's rules of shape: STYLE's sizes and names, on every file."""

import ast
from collections.abc import Iterator
from pathlib import Path

from architecture.sources import PACKAGE, nodes_of, parsed, python_files, short

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "core"}
FORBIDDEN_ENDINGS = ("Manager", "Handler", "Helper", "Wrapper", "Engine")

# Each exception has its reason; these lists only shrink.
REFERENCE = "its docstrings are the API reference: every argument, error and an example"
LONG_FILES = {"rankless/api.py": REFERENCE}
LONG_FUNCTIONS = {
    "rankless/api.py:job": REFERENCE,
    "rankless/api.py:loader": REFERENCE,
    "rankless/collectives/data_movement.py:all_gather_coalesced": REFERENCE,
    "rankless/collectives/data_movement.py:all_to_all_single": REFERENCE,
    "rankless/collectives/data_movement.py:gather": REFERENCE,
    "rankless/collectives/data_movement.py:scatter": REFERENCE,
    "rankless/collectives/object_collectives.py:scatter_object_list": REFERENCE,
    "rankless/collectives/reducing_collectives.py:reduce_scatter": REFERENCE,
    "rankless/compiler/capture/capture.py:capture": "its docstring describes every argument",
    "rankless/jobs/job.py:__call__": REFERENCE,
}
FOREIGN_NAMES = {
    "rankless/extensions/horovod/common": "scripts import horovod.common.…",
    "rankless/extensions/horovod/common/util.py": "scripts import horovod.common.util",
    "rankless/extensions/horovod/runner/common": "tools import horovod.runner.common.…",
    "rankless/extensions/horovod/runner/common/util": "tools import horovod.runner.common.util.…",
    "rankless/extensions/horovod/runner/util": "tools import horovod.runner.util.threads",
}
FOREIGN_CLASSES = {
    "rankless/extensions/horovod/common/elastic.py": "tools import Horovod's WorkerNotificationManager",
    "rankless/extensions/horovod/torch/elastic/state.py": "users derive from Horovod's StateHandler and its kin",
    "tests/extensions/horovod/test_hvd_elastic_state.py": "derives from it as they do",
}
AS_USERS_WRITE = PACKAGE.parent / "tests/scripts/training"
"""Scripts in the shape that their authors give them: a long `main`, say."""
HOROVODS = {
    "torch/operations/allreduce.py": (
        *("allreduce", "allreduce_async", "allreduce_", "allreduce_async_"),
        *("grouped_allreduce", "grouped_allreduce_async", "grouped_allreduce_", "grouped_allreduce_async_"),
    ),
    "torch/operations/reducescatter.py": ("reducescatter", "grouped_reducescatter"),
    "torch/optimizer.py": ("DistributedOptimizer",),
    "runner/util/threads.py": ("on_event",),
}
"""Functions that scripts call by Horovod's signatures."""
MANY_PARAMETERS = {
    **{
        f"rankless/extensions/horovod/{file}:{name}": "takes what Horovod's function takes, under its names"
        for file, names in HOROVODS.items()
        for name in names
    },
    "rankless/extensions/horovod/runner/__init__.py:run": "is horovod.run",
    "rankless/collectives/distributed_sampler.py:__init__": "takes what torch's DistributedSampler takes, and padding=",
    "rankless/plain_script/file_effects.py:open": "takes what Python's open takes",
    "rankless/api.py:job": "the one decorator of the package: every switch of a job is one of its keywords",
    "rankless/api.py:loader": "takes what torch's DataLoader takes, under its names",
    "rankless/api.py:checkpoints": "every setting of a series of checkpoints is one of its keywords",
    "rankless/extensions/servers/embedding.py:__init__": "the settings of a table, beside what torch's Embedding takes",
    "rankless/extensions/servers/ftrl.py:__init__": "the settings of FTRL, as torch's optimizers have theirs",
    "rankless/compiler/tracing/replaced_functions.py:run_attention": "takes what PyTorch's own operator takes",
    "rankless/compiler/tracing/replaced_functions.py:run_encoder_layer": "takes what PyTorch's own operator takes",
    "rankless/compiler/ir/custom_ops.py:capture_recurrent": "takes what PyTorch's own operator takes",
}


def functions(file: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in nodes_of(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{short(file)}:{node.name}", node


def parameter_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in named if argument.arg not in ("self", "cls")]


def is_custom_operator(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the signature is an operator's of PyTorch: a foreign API, exempt by STYLE."""
    return any(
        "torch" in ast.unparse(decorator) or "register" in ast.unparse(decorator)
        for decorator in function.decorator_list
    )


def test_no_file_is_longer_than_600_lines():
    files = python_files("rankless", "tests", "examples", "bench")
    long = {short(file) for file in files if len(file.read_text().splitlines()) > 600}
    assert long == set(LONG_FILES)


def test_no_function_is_longer_than_50_lines():
    found = {
        name
        for file in python_files("rankless", "tests", "bench")
        for name, function in functions(file)
        if (function.end_lineno or 0) - function.lineno + 1 > 50 and AS_USERS_WRITE not in file.parents
    }
    assert found == set(LONG_FUNCTIONS)


def test_no_function_has_more_than_6_parameters():
    found = {
        name
        for file in python_files("rankless")
        for name, function in functions(file)
        if len(parameter_names(function)) > 6 and not is_custom_operator(function)
    }
    assert found == set(MANY_PARAMETERS)


def test_no_file_folder_or_class_has_a_name_that_says_nothing():
    for path in PACKAGE.rglob("*"):
        assert path.stem not in FORBIDDEN_NAMES or short(path) in FOREIGN_NAMES, path
    for file in python_files("rankless", "tests", "bench"):
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef) and short(file) not in FOREIGN_CLASSES:
                assert not node.name.endswith(FORBIDDEN_ENDINGS), f"{short(file)}: {node.name}"


def test_every_package_says_what_enters_and_leaves():
    for file in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(parsed(file)), f"{short(file)} has no docstring"


def test_no_two_test_files_have_one_name():
    """The folders of the tests are no packages: pytest imports a file by its name, and refuses a second."""
    files = sorted((PACKAGE.parent / "tests").rglob("test_*.py"))
    folders: dict[str, list[str]] = {}
    for file in files:
        folders.setdefault(file.name, []).append(short(file.parent))
    assert len(files) > 400
    assert {name: found for name, found in folders.items() if len(found) > 1} == {}
