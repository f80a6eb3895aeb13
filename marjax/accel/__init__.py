"""Accelerations by name."""

from __future__ import annotations

from marjax.accel.base import Accel

NAMES = {"none": Accel()}


def resolve(accel: str | Accel) -> Accel:
    """The acceleration of that name, or `accel` itself.

    Raises:
        ValueError: if the name is unknown.
        TypeError: if `accel` is neither a name nor an `Accel`.
    """
    if isinstance(accel, Accel):
        return accel
    if not isinstance(accel, str):
        raise TypeError(f"accel={accel!r} must be a name or a marjax.Accel, not {type(accel).__name__}.")
    if accel not in NAMES:
        raise ValueError(f"Unknown accel {accel!r}; expected one of {', '.join(NAMES)}.")
    return NAMES[accel]
