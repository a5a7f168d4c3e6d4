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


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as "ranks 0, 2", and long runs as "ranks 0-6, 9"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
