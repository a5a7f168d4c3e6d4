"""Measure which share of random faults the tests find: `python tests/support/mutants.py STEP FOLDER`.

A *mutant* is the tree with one expression changed: a comparison turned round, a condition negated, a number one larger,
a call left out. Each is tried against the tests that execute the expression, shortest first, for at most a minute.

- `choose FOLDER` draws mutants at random, the same number from each package in `PACKAGES`, to FOLDER/mutants.json.
- `probe FOLDER TREE` wraps each mutant's expression in TREE, another checkout, in a call that notes the running test.
  Then the whole suite is run in TREE once, with TREE's own environment and --junitxml=FOLDER/report.xml.
- `try FOLDER TREE [START STEP]` tries the mutants START, START + STEP, … in TREE, and adds their results to
  FOLDER/results-START.jsonl.
- `show FOLDER` prints the killed share of each package, and the mutants that survived.

The draws of one commit can be tried at a later one: `choose FOLDER OLD` finds the mutants of OLD/mutants.json again by
their function and text, wherever the file has moved, and draws others for those that are gone.
"""

import ast
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PACKAGES = ("compiler", "jobs", "collectives", "launch")
PER_PACKAGE = 15
SECONDS = 60.0
SEED = 49
PROBE = '''"""Adds `__probe__` to builtins: it notes which test executes an expression."""
import builtins
import os
import time

_seen = set()
_known = [0.0, ""]


def find_test():
    """Return the test that the nearest ancestor runs: workers of a pool outlive the test that has started them."""
    if time.monotonic() - _known[0] > 0.02:
        process, test = os.getpid(), ""
        while process > 1 and not test:
            try:
                with open(f"FOLDER/current-{process}") as file:
                    test = file.read()
            except OSError:
                with open(f"/proc/{process}/stat") as file:
                    process = int(file.read().rpartition(")")[2].split()[1])
        _known[:] = time.monotonic(), test
    return _known[1]


def __probe__(number, value):
    test = find_test()
    if test and (number, test) not in _seen:
        _seen.add((number, test))
        with open(f"FOLDER/tests-of-{number}", "a") as file:
            file.write(test + "\\n")
    return value


builtins.__probe__ = __probe__
'''
NOTE_TEST = """

def pytest_runtest_logstart(nodeid, location):
    import os

    with open(f"FOLDER/current-{os.getpid()}", "w") as file:
        file.write(nodeid)
"""
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}


@dataclass(frozen=True)
class Mutant:
    """One changed expression.

    Attributes:
        package: The package, one of `PACKAGES`.
        file: The file, relative to the checkout.
        function: The function with its classes, as in `Job.__call__`.
        text: The expression.
        changed: What takes its place.
        start: Where the expression begins: an offset in the file, in characters.
    """

    package: str
    file: str
    function: str
    text: str
    changed: str
    start: int


def list_mutants(package: str) -> list[Mutant]:
    """Return all mutants of a package, in the order of files and lines."""
    return [
        mutant
        for file in sorted((ROOT / "rankless" / package).rglob("*.py"))
        for mutant in _mutants_of_file(package, file)
    ]


def _mutants_of_file(package: str, path: Path) -> Iterator[Mutant]:
    source = path.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        # Columns of `ast` count bytes of UTF-8.
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    def text_of(node: ast.expr) -> tuple[int, str]:
        start = offset(node.lineno, node.col_offset)
        return start, source[start : offset(node.end_lineno or 0, node.end_col_offset or 0)]

    for function, node in _walk(ast.parse(source), ()):
        start, text = text_of(node)
        for changed in _changes(node, lambda part: text_of(part)[1]):
            yield Mutant(package, str(path.relative_to(ROOT)), ".".join(function), text, f"({changed})", start)


def _walk(node: ast.AST, function: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.expr]]:
    """Yield the expressions of function bodies that have mutants, without annotations, messages and decorators."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), (*function, child.name))
        elif isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign | ast.Import | ast.ImportFrom):
            continue  # texts of errors, and what no test should need
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        else:
            if function and isinstance(child, ast.If | ast.While | ast.IfExp):
                child.test.is_condition = True  # type: ignore[attr-defined]
            if function and isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                child.value.is_statement = True  # type: ignore[attr-defined]
            if function and isinstance(child, ast.expr):
                yield function, child
            yield from _walk(child, function)


def _changes(node: ast.expr, show: Callable[[ast.expr], str]) -> Iterator[str]:
    """Yield the texts that can take the place of an expression. `show` returns the text of a part of it."""
    if getattr(node, "is_condition", False):
        yield f"not ({show(node)})"
    if getattr(node, "is_statement", False):
        yield "None"
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield f"{show(node.left)} {COMPARISONS[type(node.ops[0])]} {show(node.comparators[0])}"
    if isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield word.join(f"({show(value)})" for value in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield show(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not isinstance(node.left, ast.Constant):
        yield f"({show(node.left)}) {ARITHMETIC[type(node.op)]} ({show(node.right)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield str(node.value + 1)


def choose(old: Path | None) -> list[Mutant]:
    """Draw mutants. Those of an earlier draw are taken again where they can be found."""
    wanted = [Mutant(**row) for row in json.loads((old / "mutants.json").read_text())] if old else []
    chosen = []
    for package in PACKAGES:
        found = list_mutants(package)
        random.Random(f"{SEED} {package}").shuffle(found)
        key = {(mutant.function, mutant.text, mutant.changed): mutant for mutant in reversed(found)}
        keys = [(mutant.function, mutant.text, mutant.changed) for mutant in wanted if mutant.package == package]
        again = [key[one] for one in keys if one in key]
        chosen += [*again, *(mutant for mutant in found if mutant not in again)][:PER_PACKAGE]
    return chosen


def change(tree: Path, mutant: Mutant, text: str) -> None:
    """Put a text in the place of a mutant's expression."""
    path = tree / mutant.file
    source = path.read_text()
    end = mutant.start + len(mutant.text)
    assert source[mutant.start : end] == mutant.text, f"{path} is not the file from which the mutant was drawn"
    path.write_text(source[: mutant.start] + text + source[end:])


def probe(folder: Path, tree: Path, mutants: list[Mutant]) -> None:
    """Wrap the expressions of all mutants in a tree, from the last to the first of each file."""
    packages = next((tree / ".venv/lib").glob("python*/site-packages"))
    (packages / "mutant_probe.py").write_text(PROBE.replace("FOLDER", str(folder)))
    (packages / "mutant_probe.pth").write_text("import mutant_probe\n")
    with open(tree / "tests/conftest.py", "a") as conftest:
        conftest.write(NOTE_TEST.replace("FOLDER", str(folder)))
    numbered = sorted(enumerate(mutants), key=lambda pair: (pair[1].file, -pair[1].start, len(pair[1].text)))
    for number, mutant in numbered:
        change(tree, mutant, f"__probe__({number}, {mutant.text})")


def read_durations(folder: Path) -> dict[str, float]:
    """Return the seconds of each test in the report of the run with probes."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(folder / "report.xml").getroot().iter("testcase"):
        file = str(case.get("classname")).replace(".", "/") + ".py"
        found[f"{file}::{case.get('name')}"] = float(case.get("time") or 0)
    return found


def try_mutant(folder: Path, tree: Path, number: int, mutant: Mutant, durations: dict[str, float]) -> dict[str, object]:
    """Run the tests of a mutant, the shortest first, until one fails or the minute is over."""
    noted = folder / f"tests-of-{number}"
    tests = sorted(
        set(noted.read_text().splitlines()) if noted.exists() else [], key=lambda test: durations.get(test, 5.0)
    )
    change(tree, mutant, mutant.changed)
    command: list[object] = [
        tree / ".venv/bin/python",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        "--timeout=50",
    ]
    start = time.monotonic()
    try:
        for first in range(0, len(tests), 20):
            left = SECONDS - (time.monotonic() - start)
            if left <= 1:
                break
            done = subprocess.run(
                ["timeout", "--kill-after=5", str(left), *map(str, command), *tests[first : first + 20]],
                cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
            if done.returncode == 1:  # neither the end of the minute, nor a test that is gone
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return {"killed": True, "tests": len(tests), "by": failed[:1] or done.stdout[-300:]}
    finally:
        subprocess.run(["git", "checkout", "-q", "--", mutant.file], cwd=tree, check=True)
    return {"killed": False, "tests": len(tests)}


def show(folder: Path, mutants: list[Mutant]) -> None:
    """Print the killed share of each package, then the survivors."""
    rows = {
        row["number"]: row
        for file in folder.glob("results-*.jsonl")
        for row in map(json.loads, file.read_text().splitlines())
    }
    killed = defaultdict(list)
    for number, row in sorted(rows.items()):
        killed[mutants[number].package].append(row["killed"])
    for package, results in killed.items():
        print(f"{package}: {sum(results)} of {len(results)} killed")
    print(f"all: {sum(map(sum, killed.values()))} of {len(rows)} killed")
    for number, row in sorted(rows.items()):
        if not row["killed"]:
            mutant = mutants[number]
            change = f"{mutant.text!r} -> {mutant.changed!r}"
            print(f"{number}: {mutant.file} {mutant.function}: {change}; {row['tests']} tests")


def main() -> None:
    """Make one step."""
    step, folder = sys.argv[1], Path(sys.argv[2]).absolute()
    folder.mkdir(exist_ok=True, parents=True)
    if step == "choose":
        chosen = choose(Path(sys.argv[3]) if len(sys.argv) > 3 else None)
        (folder / "mutants.json").write_text(json.dumps([asdict(mutant) for mutant in chosen], indent=1))
        return
    mutants = [Mutant(**row) for row in json.loads((folder / "mutants.json").read_text())]
    if step == "probe":
        probe(folder, Path(sys.argv[3]).absolute(), mutants)
    elif step == "try":
        tree, durations = Path(sys.argv[3]).absolute(), read_durations(folder)
        first, stride = (int(text) for text in sys.argv[4:6]) if len(sys.argv) > 4 else (0, 1)
        os.environ["OMP_WAIT_POLICY"] = "passive"
        for number in range(first, len(mutants), stride):
            row = {"number": number, **try_mutant(folder, tree, number, mutants[number], durations)}
            with (folder / f"results-{first}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    else:
        show(folder, mutants)


if __name__ == "__main__":
    main()
