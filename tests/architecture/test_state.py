"""No mutable module state, and every error says what was expected, what was found and the fix."""

import ast
from collections.abc import Iterator
from pathlib import Path

from architecture.sources import nodes_of, parsed, python_files, short

from rankless import errors

MUTABLE_CALLS = {
    "list",
    "dict",
    "set",
    "defaultdict",
    "deque",
    "Counter",
    "OrderedDict",
    "bytearray",
    "WeakKeyDictionary",
}
MUTATING_METHODS = {
    "append", "add", "extend", "insert", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard"
}  # fmt: skip

# Each exception has its reason; this list only shrinks.
MODULE_STATE = {
    "rankless/runtime/current_context.py": "holds the process's one joined runtime, read by rankless.api",
    "rankless/extensions/horovod/context.py": "Horovod's API is global by nature",
    "rankless/collectives/checked_process_group.py": "queues of torch's groups, global and without attributes (0010)",
    "rankless/runtime/elastic_round.py": "the process's one tie to the driver of its elastic job, across hvd.init's",
    "rankless/extensions/horovod/torch/elastic/state.py": "set_handler_registry: Horovod's API has one registry",
}


def module_names(tree: ast.Module) -> set[str]:
    """Names bound at the top of a module to something that can change."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    called = value.func if isinstance(value, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    return name in MUTABLE_CALLS


def changes(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """What inside functions writes to those names, or rebinds any global."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield f"line {node.lineno}: global {', '.join(node.names)}"
            yield from (f"line {line}: {name} is changed" for name, line in written(node) if name in names)


def written(node: ast.AST) -> Iterator[tuple[str, int]]:
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and called.attr in MUTATING_METHODS and isinstance(called.value, ast.Name):
        yield called.value.id, called.lineno
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
    targets = [node.target] if isinstance(node, ast.AugAssign) else targets
    for target in targets:
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            yield target.value.id, node.lineno


def changed_state(file: Path) -> list[str]:
    tree = parsed(file)
    return list(changes(tree, module_names(tree)))


def test_nothing_at_the_top_of_a_module_changes_after_import():
    found = {short(file): changed_state(file) for file in python_files("rankless")}
    guilty = {name: lines for name, lines in found.items() if lines}
    assert set(guilty) <= set(MODULE_STATE), guilty


def test_the_search_for_module_state_finds_it():
    guilty = ast.parse("seen = {}\ndef note(key):\n    seen[key] = 1\n")
    assert list(changes(guilty, module_names(guilty))) == ["line 3: seen is changed"]
    assert list(changes(ast.parse("x = 0\ndef f():\n    global x\n    x = 1\n"), set()))


def is_ours(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.RanklessError)


def test_every_error_of_ours_says_expected_found_and_fix():
    ours = {name for name, kind in vars(errors).items() if is_ours(kind)}
    seen = 0
    for file in python_files("rankless"):
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ours:
                keywords = {keyword.arg for keyword in node.keywords}
                seen += 1
                complete = {"expected", "found", "fix"} <= keywords or None in keywords
                assert complete, f"{short(file)}:{node.lineno}"
                assert not node.args, f"{short(file)}:{node.lineno}"
    assert seen > 10


def test_the_tree_at_the_top_of_errors_names_every_error():
    drawn = errors.__doc__ or ""
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, BaseException):
            assert name in drawn, f"{name} is not drawn"
