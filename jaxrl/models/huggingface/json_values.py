"""Reads typed values from an untrusted JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.checks import is_finite
from jaxrl.errors import UserError


def integer(values: Mapping[str, Any], key: str, origin: str, *, absent: int | None = None) -> int:
    """A positive whole number; `absent` stands for a key that is missing or null."""
    value = number(values, key, origin, absent=absent)
    if value != int(value):
        raise UserError(f"{origin}: {key} is {value}; it must be a whole number")
    return int(value)


def number(
    values: Mapping[str, Any], key: str, origin: str, *, absent: float | None = None
) -> float:
    """A positive number; `absent` stands for a key that is missing or null."""
    value = values.get(key)
    if value is None:
        value = absent
    if value is None:
        raise UserError(f"{origin}: {key} is missing; copy the published config.json")
    if not is_finite(value) or value <= 0:
        raise UserError(f"{origin}: {key} is {shown(value)}; it must be a positive number")
    return float(value)


def boolean(values: Mapping[str, Any], key: str, origin: str, *, absent: bool = False) -> bool:
    """A flag; `absent` stands for a key that is missing or null."""
    value = values.get(key)
    if value not in (None, True, False):
        raise UserError(f"{origin}: {key} is {shown(value)}; it must be true or false")
    return absent if value is None else bool(value)


def shown(value: Any) -> str:
    """A value for a message, cut to 80 characters: an untrusted file may hold very long values."""
    return repr(value)[:80]
