"""Settings of tables and optimizers as JSON. Equal settings have equal JSON."""

import dataclasses
import functools
import math
from typing import Any

import msgspec

from rankless.errors import TableError
from rankless.extensions.servers.service.wire.messages import MessageRefusedError, decode_json
from rankless.extensions.servers.tables.optimizers import (
    AdagradSettings,
    AdamSettings,
    FtrlSettings,
    OptimizerSettings,
    SgdSettings,
    SparseAdamSettings,
)
from rankless.extensions.servers.tables.settings import (
    Admission,
    ByCount,
    ByHash,
    Constant,
    Initial,
    Normal,
    TableSettings,
    Uniform,
)

_KEPT_SETTINGS = 256
"""Most parameters of a step have the settings of others."""
_MOST_DIM = 1 << 20
_MOST_INTEGER = 1 << 62
_INITIALS: dict[str, type[Initial]] = {kind.__name__: kind for kind in (Constant, Uniform, Normal)}
_ADMISSIONS: dict[str, type[Admission]] = {kind.__name__: kind for kind in (ByCount, ByHash)}
_OPTIMIZERS: dict[str, type[OptimizerSettings]] = {
    kind.__name__: kind for kind in (SgdSettings, AdagradSettings, SparseAdamSettings, AdamSettings, FtrlSettings)
}


class _TableFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dim: int
    dtype: str
    seed: int
    initial: tuple[str, dict[str, float]]
    admission: tuple[str, dict[str, float]] | None
    expire_after_steps: int | None
    max_rows: int | None


def encode_table_settings(settings: TableSettings) -> bytes:
    """Return settings as JSON. Raises TableError for numbers that are not finite."""
    fields = _TableFields(
        dim=int(settings.dim),
        dtype=settings.dtype,
        seed=int(settings.seed),
        initial=(type(settings.initial).__name__, _numbers_of(settings.initial)),
        admission=None
        if settings.admission is None
        else (type(settings.admission).__name__, _numbers_of(settings.admission)),
        expire_after_steps=None if settings.expire_after_steps is None else int(settings.expire_after_steps),
        max_rows=None if settings.max_rows is None else int(settings.max_rows),
    )
    return msgspec.json.encode(fields)


def decode_table_settings(text: bytes) -> TableSettings:
    """Return the settings of JSON. Raises TableError if they are none, or out of range."""
    try:
        fields = decode_json(text, _TableFields)
        initial = _INITIALS[fields.initial[0]](**fields.initial[1])
        admission = None
        if fields.admission is not None:
            name, numbers = fields.admission
            admission = ByCount(occurrences=int(numbers["occurrences"])) if name == "ByCount" else ByHash(**numbers)
    except (MessageRefusedError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise _not_understood("settings of a table", error) from None
    limits = (
        fields.dim <= _MOST_DIM,
        *(not n or n <= _MOST_INTEGER for n in (fields.expire_after_steps, fields.max_rows)),
    )
    if not all(limits):
        raise _not_understood("a dim up to 2**20 and other numbers up to 2**62", fields)
    return TableSettings(
        dim=fields.dim,
        dtype=fields.dtype,  # type: ignore[arg-type]  # the settings check it
        seed=fields.seed,
        initial=initial,
        admission=admission,
        expire_after_steps=fields.expire_after_steps,
        max_rows=fields.max_rows,
    )


def encode_optimizer(settings: OptimizerSettings) -> bytes:
    """Return settings as JSON. Raises TableError for numbers that are not finite."""
    return msgspec.json.encode((type(settings).__name__, _numbers_of(settings)))


@functools.lru_cache(_KEPT_SETTINGS)
def decode_optimizer(text: bytes) -> OptimizerSettings:
    """Return the settings of JSON. Raises TableError if they are none, or would fail in a step."""
    try:
        name, numbers = decode_json(text, tuple[str, dict[str, bool | float | list[float]]])
        settings = msgspec.convert(numbers, type=_OPTIMIZERS[name])
    except (MessageRefusedError, msgspec.ValidationError, KeyError) as error:
        raise _not_understood("settings of an optimizer", error) from None
    if isinstance(settings, SparseAdamSettings | AdamSettings) and not all(0 <= beta < 1 for beta in settings.betas):
        raise _not_understood("betas from 0 to less than 1", settings.betas)
    if isinstance(settings, AdagradSettings) and settings.lr_decay < 0:
        raise _not_understood("lr_decay of at least 0", settings.lr_decay)
    if isinstance(settings, FtrlSettings):
        rest = (-settings.lr_power, settings.initial_accumulator_value, settings.l1, settings.l2, settings.beta)
        if settings.lr <= 0 or min(rest) < 0:
            raise _not_understood("lr of more than 0, lr_power of at most 0 and other numbers of at least 0", settings)
    return settings


def _numbers_of(settings: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def _plain(value: Any) -> Any:
    """Return a number or numbers as the types that JSON has, so that 1, 1.0 and NumPy's 1.0 are equal."""
    if isinstance(value, bool):
        return value
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    number = float(value)
    if not math.isfinite(number):
        raise _not_understood("finite numbers as settings", value)
    return number


def _not_understood(expected: str, found: object) -> TableError:
    return TableError(expected=expected, found=str(found), fix="change the settings of the table or its optimizer")
