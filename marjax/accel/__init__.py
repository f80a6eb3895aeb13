"""Accelerations by name, with options: "marche:budget=32,refresh_every=4"."""

from __future__ import annotations

from marjax.accel.base import Accel, ConditionCache, ExactTokens, Refresh
from marjax.accel.head import ExactHead, HeadCache
from marjax.accel.lazymar import LazyTokens
from marjax.accel.marche import ActiveTokens
from marjax.accel.options import with_options

NAMES = {
    "none": Accel(),
    "lazymar": Accel(tokens=LazyTokens(), condition=ConditionCache(), head=HeadCache()),
    "marche": Accel(tokens=ActiveTokens()),
}

__all__ = [
    "NAMES",
    "Accel",
    "ActiveTokens",
    "ConditionCache",
    "ExactHead",
    "ExactTokens",
    "HeadCache",
    "LazyTokens",
    "Refresh",
    "resolve",
]


def resolve(accel: str | Accel) -> Accel:
    """The acceleration of that name, with its options (`marjax/accel/options.py`), or `accel` itself.

    Raises:
        ValueError: if the name or an option is unknown, a value unusable, or an option without meaning.
        TypeError: if `accel` is neither a name nor an `Accel`.
    """
    if isinstance(accel, Accel):
        return accel
    if not isinstance(accel, str):
        raise TypeError(f"accel={accel!r} must be a name or a marjax.Accel, not {type(accel).__name__}.")
    name, colon, options = accel.partition(":")
    if name not in NAMES:
        raise ValueError(f"Unknown accel {name!r}; expected one of {', '.join(NAMES)}.")
    if not colon:
        return NAMES[name]
    try:
        return with_options(NAMES[name], options)
    except ValueError as error:
        raise ValueError(f"accel={accel!r}: {error}") from error
