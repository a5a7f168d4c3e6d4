"""Bytes, bandwidths and durations have three significant digits, and the next unit if rounding carries."""

import random

import pytest

from rankless.records.number_formatting import format_bit_rate, format_bytes, format_seconds

KIB, MIB, GIB, TIB = (1024**power for power in range(1, 5))


@pytest.mark.parametrize(
    ("byte_count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (KIB, "1 KiB"),
        (3.5 * GIB, "3.5 GiB"),
        (99.96 * MIB, "100 MiB"),
        (1010 * MIB, "1,010 MiB"),
        (1023.9 * MIB, "1 GiB"),
        (5000 * TIB, "5,000 TiB"),
    ],
)
def test_byte_counts_use_the_unit_that_keeps_them_short(byte_count: float, text: str):
    assert format_bytes(byte_count) == text


@pytest.mark.parametrize(
    ("bytes_per_second", "text"),
    [
        (0, "0 bit/s"),
        (100, "800 bit/s"),
        (125_000, "1 Mbit/s"),
        (124_990_000, "1 Gbit/s"),
        (1.0575e9, "8.46 Gbit/s"),
        (2e15, "16,000 Tbit/s"),
    ],
)
def test_bandwidths_are_in_bits_per_second(bytes_per_second: float, text: str):
    assert format_bit_rate(bytes_per_second) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (10.2e-6, "10 µs"),
        (0.9996e-3, "1 ms"),
        (3.5e-3, "3.5 ms"),
        (0.1234, "123 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (3600, "3,600 s"),
    ],
)
def test_durations_have_at_most_three_significant_digits(seconds: float, text: str):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("format_value", [format_bytes, format_bit_rate, format_seconds])
def test_numbers_have_no_exponent_and_are_exact_to_their_last_digit(format_value):
    """For a thousand numbers of each order of magnitude, the text read back with its unit is the number."""
    chance = random.Random(6)
    scale = {format_bytes: 1, format_bit_rate: 1 / 8, format_seconds: 1}[format_value]
    units = {
        "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB,
        "bit/s": 1, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12,
        "µs": 1e-6, "ms": 1e-3, "s": 1,
    }  # fmt: skip
    for power in range(-3, 6) if format_value is format_seconds else range(2, 16):
        for _ in range(1000):
            value = 10 ** (power + chance.random())
            number, unit = format_value(value).split(" ")
            assert set(number) <= set("0123456789.,"), format_value(value)
            shown = float(number.replace(",", "")) * units[unit] * scale
            decimals = len(number.partition(".")[2])
            assert abs(shown - value) <= max(0.501 * 10**-decimals * units[unit] * scale, 0.005 * value), format_value(
                value
            )
            assert abs(shown - value) <= 0.053 * value, format_value(value)
