"""How bytes, speeds and seconds are written: three digits of use, the next unit where rounding carries, no exponent."""

import random

import pytest

from rankless.records.quantities import format_bit_rate, format_bytes, format_seconds

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
def test_sizes_are_written_in_the_unit_that_keeps_them_short(byte_count: float, text: str):
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
def test_speeds_are_written_in_bits(bytes_per_second: float, text: str):
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
def test_seconds_are_written_with_the_digits_that_are_of_use(seconds: float, text: str):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("write", [format_bytes, format_bit_rate, format_seconds])
def test_no_number_has_an_exponent_and_none_is_further_off_than_its_last_digit_says(write):
    """A thousand of each order of magnitude; what is shown, read back with its unit, is the number."""
    chance = random.Random(6)
    scale = {format_bytes: 1, format_bit_rate: 1 / 8, format_seconds: 1}[write]
    units = {
        "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB,
        "bit/s": 1, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12,
        "µs": 1e-6, "ms": 1e-3, "s": 1,
    }  # fmt: skip
    for power in range(-3, 6) if write is format_seconds else range(2, 16):
        for _ in range(1000):
            value = 10 ** (power + chance.random())
            number, unit = write(value).split(" ")
            assert set(number) <= set("0123456789.,"), write(value)
            shown = float(number.replace(",", "")) * units[unit] * scale
            decimals = len(number.partition(".")[2])
            assert abs(shown - value) <= max(0.501 * 10**-decimals * units[unit] * scale, 0.005 * value), write(value)
            assert abs(shown - value) <= 0.053 * value, write(value)
