"""Count the outcomes of an operator's cases, as rows for docs/scoreboard.md."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from operator_brute_force import can_be_split
from operator_database import DatabaseCase
from operator_outcomes import Division, Result, classify

Row = dict[str, Any]

MAX_FAILURES = 20
"""Of a variant, so that a report stays readable."""


class VariantScore:
    """The outcomes of all cases of one variant of the database."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.counts: Counter[tuple[str, str, str, str, str]] = Counter()
        self.equal_bits = 0
        self.divisible = 0
        """Cases in float64 that brute force can split."""
        self.not_split: Counter[str] = Counter()
        """Of these, those that Rankless does not split, by what it needs whole."""
        self.failures: list[str] = []

    def add(self, case: DatabaseCase, division: Division | None, result: Result) -> None:
        """Count one outcome."""
        dtype = str(case.dtype).removeprefix("torch.")
        reason = result.reason if result.kind in ("refused", "gathered") else ""
        self.counts[dtype, case.layout, case.mode, result.kind, reason] += 1
        self.equal_bits += result.is_exact and result.kind in ("split", "gathered")
        if result.kind in ("wrong", "crashed") and len(self.failures) < MAX_FAILURES:
            self.failures.append(f"{result.kind}: {case}; {division}: {result.reason}")

    def add_divisible(self, result: Result) -> None:
        """Count one outcome of a case that brute force can split."""
        self.divisible += 1
        if result.kind != "split":
            self.not_split[result.reason or result.kind] += 1

    def row(self) -> Row:
        """Return the counts as JSON."""
        return {
            "variant": self.variant,
            "counts": [[*key, count] for key, count in sorted(self.counts.items())],
            "equal_bits": self.equal_bits,
            "divisible": self.divisible,
            "not_split": dict(sorted(self.not_split.items())),
            "failures": self.failures,
        }


def score(variant: str, cases: Iterable[DatabaseCase]) -> VariantScore:
    """Run cases of a variant and count their outcomes."""
    result = VariantScore(variant)
    for case in cases:
        decided: dict[str, bool] = {}
        for division, outcome in classify(case):
            result.add(case, division, outcome)
            if division is None or not (case.is_thorough and case.mode in ("forward", "backward")):
                continue
            name = str(division.split)
            if name not in decided:
                with torch.random.fork_rng(devices=[]):
                    decided[name] = can_be_split(case, division.split)
            if decided[name]:
                result.add_divisible(outcome)
    return result
