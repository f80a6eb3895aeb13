"""Checks of the numbers and words in a policy: each puts the field into its one form, or raises a ValueError."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

LIMIT = 2**31  # what int32 rows of a plan can hold


def integer(policy: Any, name: str, *, at_least: int, optional: bool = False) -> None:
    """An integer of at least so much; of numpy's too, or None if it is optional."""
    value = getattr(policy, name)
    if value is None and optional:
        return
    if not _is_integer(value) or not at_least <= value < LIMIT:
        kind = f"{'None or ' if optional else ''}an integer from {at_least} to 2**31 - 1"
        raise ValueError(f"{name}={value!r} must be {kind}.")
    _replace(policy, name, int(value))


def share(policy: Any, name: str) -> None:
    """A number in [0, 1]."""
    _replace(policy, name, _share(name, getattr(policy, name)))


def switch(policy: Any, name: str) -> None:
    """True or False."""
    value = getattr(policy, name)
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r} must be True or False.")
    _replace(policy, name, bool(value))


def choice(policy: Any, name: str, choices: tuple[str, ...]) -> None:
    """One of some words."""
    value = getattr(policy, name)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}.")


def integers(policy: Any, name: str) -> None:
    """A sequence of integers of at least 0, or None."""
    value = getattr(policy, name)
    if value is None:
        return
    items = _items(value)
    if items is None or not all(_is_integer(item) and 0 <= item < LIMIT for item in items):
        raise ValueError(f"{name}={value!r} must be None or a sequence of integers from 0 on.")
    _replace(policy, name, tuple(map(int, items)))


def steps(policy: Any, name: str, last: int) -> None:
    """Pairs of a step, ascending from 0 and at most `last`, and a number in [0, 1]."""
    value = getattr(policy, name)
    pairs = [_items(item) for item in _items(value) or ()]
    if not pairs or any(pair is None or len(pair) != 2 or not _is_integer(pair[0]) for pair in pairs):
        raise ValueError(f"{name}={value!r} must be pairs of a step and a share.")
    starts = [int(first) for first, _ in pairs]
    if starts[0] != 0 or starts[-1] > last or starts != sorted(set(starts)):
        raise ValueError(f"{name}={value!r}: the steps must begin at 0 and ascend to at most {last}.")
    _replace(policy, name, tuple((first, _share(name, pair[1])) for first, pair in zip(starts, pairs, strict=True)))


def instance(policy: Any, name: str, kind: type, *, optional: bool = False) -> None:
    """An instance of a class or protocol, or None if it is optional.

    Raises:
        TypeError: if it is something else.
    """
    value = getattr(policy, name)
    if (value is None and optional) or (isinstance(value, kind) and not isinstance(value, type)):
        return
    raise TypeError(f"{name}={value!r} must be {'None or ' if optional else ''}an instance of a {kind.__name__}.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _items(value: Any) -> list | None:
    return list(value) if isinstance(value, list | tuple | np.ndarray) and np.ndim(value) != 0 else None


def _share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}={value!r}: a number in [0, 1] is expected.")
    return float(value)


def _replace(policy: Any, name: str, value: Any) -> None:
    object.__setattr__(policy, name, value)  # frozen to everybody else
