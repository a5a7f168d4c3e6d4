"""Write docs/scoreboard.md from the rows of the operator tests, at the end of `make soak`."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
KINDS = ("split", "gathered", "refused", "wrong", "crashed")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scoreboard.md"
RULES = (
    *("rules", "rule_table.py", "selected_rows", "sequence_parallel", "expert_parallel.py"),
    *("ir", "sharding", "lowering", "capture/decompositions.py"),
)
"""Files and folders of rankless/compiler that decide how an operator is split."""

HEAD = """# Operators

PyTorch's operator database has generators of arguments for its operators. This page counts what Rankless does with
each: a job calls the operator, its arguments are divided along every dim between 2 and 3 ranks, evenly and unevenly,
and results and gradients are compared with eager PyTorch's on whole tensors. Arguments lie in memory contiguously,
transposed, and as channels_last. Where eager PyTorch has them, second derivatives and forward mode are compared too.

- **split**: every rank computes on its piece.
- **gathered**: the operator, or its backward, needs a divided value whole. It is right, and slower.
- **refused**: `CaptureError` names the line.
- **wrong**, **crashed**: faults of Rankless.

Integers and booleans are equal. Other numbers agree to 1e-12 of the largest entry in float64 (1e-11 for second
derivatives, whose terms cancel), and to the rounding of their own type otherwise. The tests are
[tests/compiler/test_operator_database.py](../tests/compiler/test_operator_database.py).
"""


def page(rows: Sequence[Row], tested: str) -> str:
    """Render the page."""
    counts = Counter[tuple[str, str, str, str, str, str]]()
    for row in rows:
        for *key, count in row["counts"]:
            counts[row["variant"], *key] += count  # type: ignore[index]
    total = sum(counts.values())
    divisible, missed = sum(row["divisible"] for row in rows), sum(sum(row["not_split"].values()) for row in rows)
    equal = sum(row["equal_bits"] for row in rows)
    lines = [
        HEAD,
        f"Run of {datetime.now(UTC):%Y-%m-%d} at commit {tested}: {len(rows)} variants of operators, {total} cases.",
        f"{equal} cases are equal to the last bit. Of {divisible} cases that can be split, decided by brute force, "
        f"{divisible - missed} are ({100 * (divisible - missed) / max(1, divisible):.1f} %).",
        f"Digest of the files that decide it: {digest_rules()}.",
        "",
        *table("mode", counts, lambda key: key[3]),
        *table("dtype", counts, lambda key: key[1]),
        *table("layout", counts, lambda key: key[2]),
        "## Refused",
        "",
        *list_reasons(counts, "refused"),
        "## Gathered, though it can be split",
        "",
        *list_missed(rows),
        "## Wrong or crashed",
        "",
        *([f"- `{failure}`" for row in rows for failure in row["failures"]] or ["None."]),
    ]
    return "\n".join([*lines, ""])


def table(name: str, counts: Mapping[Any, int], label: Callable[[Any], str]) -> list[str]:
    """Return a table of the kinds of outcomes by a part of the key."""
    cells = Counter[tuple[str, str]]()
    for key, count in counts.items():
        cells[label(key), key[4]] += count
    lines = [f"| {name} | " + " | ".join(KINDS) + " |", "|---" * (len(KINDS) + 1) + "|"]
    for value in [*dict.fromkeys(value for value, _ in sorted(cells))]:
        lines.append(f"| {value} | " + " | ".join(str(cells[value, kind]) for kind in KINDS) + " |")
    totals = [sum(count for (_, found), count in cells.items() if found == kind) for kind in KINDS]
    return [*lines, "| all | " + " | ".join(map(str, totals)) + " |", ""]


def list_reasons(counts: Mapping[Any, int], kind: str) -> list[str]:
    """Return a line for each reason, with the variants that it concerns."""
    variants: dict[str, Counter[str]] = {}
    for (variant, _, _, _, found, reason), count in counts.items():
        if found == kind:
            variants.setdefault(reason, Counter())[variant] += count
    ordered = sorted(variants.items(), key=lambda item: -sum(item[1].values()))
    return [
        f"- `{reason}`: {', '.join(f'`{name}`' for name in sorted(names))} ({sum(names.values())} cases)"
        for reason, names in ordered
    ] + [""]


def list_missed(rows: Sequence[Row]) -> list[str]:
    """Return a line for each variant that is gathered in a case that can be split."""
    missed = [(row["variant"], row["not_split"]) for row in rows if row["not_split"]]
    return [
        f"- `{variant}`: {', '.join(f'{reason} ({count})' for reason, count in reasons.items())}"
        for variant, reasons in missed
    ] + [""]


def digest_rules() -> str:
    """Return a digest of the text of all files in `RULES`."""
    digest = hashlib.sha256()
    for path in (ROOT / "rankless" / "compiler" / name for name in RULES):
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def write_page(rows_file: Path, tested: str) -> None:
    """Write docs/scoreboard.md. If a variant ran several times, its last row counts."""
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    latest = {row["variant"]: row for row in rows}
    PAGE.write_text(page([latest[name] for name in sorted(latest)], tested))
