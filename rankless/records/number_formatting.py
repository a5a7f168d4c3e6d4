"""Formats numbers with units: short, and never with an exponent."""

from collections.abc import Sequence

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL_BYTES = ("B", "kB", "MB", "GB", "TB")
_BITS_PER_SECOND = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")


def format_bytes(byte_count: float) -> str:
    """Format a number of bytes, like "3.5 GiB"."""
    return _format_scaled(byte_count, _BYTES, 1024)


def format_decimal_bytes(size: int) -> str:
    """Format a number of bytes in its shortest unit, as "1.2 MB"."""
    number, unit = float(size), 0
    while number >= 999.5 and unit < len(_DECIMAL_BYTES) - 1:
        number, unit = number / 1000, unit + 1
    digits = 0 if unit == 0 or number >= 99.5 else 1
    return f"{number:.{digits}f} {_DECIMAL_BYTES[unit]}"


def format_bit_rate(bytes_per_second: float) -> str:
    """Format a bandwidth, like "9.41 Gbit/s"."""
    return _format_scaled(bytes_per_second * 8, _BITS_PER_SECOND, 1000)


def format_seconds(seconds: float) -> str:
    """Format a duration, like "340 µs", "3.5 ms", "2.5 s" or "3,600 s"."""
    if seconds >= 9.95:
        return f"{seconds:,.0f} s"
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    return f"{_format_number(seconds * 1e3)} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.0f} µs"


def _format_scaled(number: float, units: Sequence[str], step: int) -> str:
    # Rounding may carry to the next unit: 1023.9 MiB are 1 GiB, not 1,024 MiB.
    unit = 0
    while number >= step - 0.5 and unit < len(units) - 1:
        number, unit = number / step, unit + 1
    return f"{_format_number(number)} {units[unit]}"


def _format_number(number: float) -> str:
    return f"{number:.3g}" if number < 99.95 else f"{number:,.0f}"


def format_sample_rate(samples_per_second: float) -> str:
    """Format a rate of samples, like "8,140 samples/s" or "2.5 samples/s"."""
    digits = ",.0f" if samples_per_second >= 10 else ".2g"
    return f"{samples_per_second:{digits}} samples/s"


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun, in the plural where it needs it, like "1 worker", "1,000 steps" or "2 batches"."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"


def find_runs(numbers: Sequence[int]) -> list[list[int]]:
    """Return sorted numbers in runs of consecutive ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def format_ranges(numbers: Sequence[int]) -> list[str]:
    """Format each run of sorted numbers, like "0-3" and "8"."""
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in find_runs(numbers)]


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as "ranks 0, 2", and long runs as "ranks 0-6, 9"."""
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in find_runs(ranks)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
