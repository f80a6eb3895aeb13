"""Options of an acceleration as text: "budget=32,refresh_every=4,condition=on,head_period=5".

    tokens, condition, head   on or off: the three parts
    refresh_every, warmup     when token and condition cache refresh; refresh_every=never: not after the warm-up
    head_...                  fields of `HeadCache`
    anything else             fields of the token policy

Several numbers are joined by "+", pairs by ":", as in head_skipped=1+2 and shares=0:1+20:0.6. The order is free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from marjax.accel.base import PUBLISHED_REFRESH, Accel, ConditionCache, ExactTokens, Refresh
from marjax.accel.head import ExactHead, HeadCache

PARTS = ("tokens", "condition", "head")
REFRESH = {"refresh_every": "period", "warmup": "warmup"}
HEAD_PREFIX = "head_"
_SWITCH = {"on": True, "off": False}


def with_options(accel: Accel, text: str) -> Accel:
    """The acceleration with options.

    Raises:
        ValueError: if an option is unknown, given twice or without meaning, or a value unusable.
    """
    options: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not name or not equals:
            raise ValueError(f"{part!r} is no option; expected NAME=VALUE.")
        if name in options:
            raise ValueError(f"{name} is given twice.")
        options[name] = value
    # The parts first: the other options are theirs.
    parts = {name: _switch(name, options.pop(name)) for name in PARTS if name in options}
    accel = _with_parts(accel, parts)
    for name, value in options.items():
        accel = _with_option(accel, name, value)
    return accel


def _with_parts(accel: Accel, parts: dict[str, bool]) -> Accel:
    if parts.get("tokens") and isinstance(accel.tokens, ExactTokens):
        raise ValueError("tokens=on: there is no token cache of that name to switch on; choose lazymar or marche.")
    if not parts.get("tokens", True):
        accel = dataclasses.replace(accel, tokens=ExactTokens())
    if "condition" in parts:
        accel = dataclasses.replace(accel, condition=ConditionCache() if parts["condition"] else None)
    if "head" in parts:
        accel = dataclasses.replace(accel, head=HeadCache() if parts["head"] else ExactHead())
    return accel


def _with_option(accel: Accel, name: str, value: str) -> Accel:
    if name in REFRESH:
        return _with_refresh(accel, name, value)
    field = name.removeprefix(HEAD_PREFIX)
    if name != field and field in _types(HeadCache()):
        if not isinstance(accel.head, HeadCache):
            raise ValueError(f"{name} needs head=on.")
        return dataclasses.replace(accel, head=_with_field(accel.head, name, field, value))
    if name not in _types(accel.tokens):
        raise ValueError(f"unknown option {name!r}; expected one of {', '.join(sorted(_known(accel)))}.")
    return dataclasses.replace(accel, tokens=_with_field(accel.tokens, name, name, value))


def _known(accel: Accel) -> set[str]:
    return {*PARTS, *REFRESH, *_types(accel.tokens), *(HEAD_PREFIX + field for field in _types(HeadCache()))}


def _with_refresh(accel: Accel, name: str, value: str) -> Accel:
    number = None if (name, value) == ("refresh_every", "never") else _integer(name, value)
    if (name, number) == ("refresh_every", 0):
        raise ValueError('refresh_every=0 must be a positive integer or "never".')

    def changed(refresh: Refresh) -> Refresh:
        return dataclasses.replace(refresh, **{REFRESH[name]: number})

    if accel.tokens.refresh is not None:
        tokens = dataclasses.replace(accel.tokens, refresh=changed(accel.tokens.refresh))
        return dataclasses.replace(accel, tokens=tokens)
    if accel.condition is None:
        raise ValueError(f"{name} has no meaning without a token or condition cache.")
    refresh = changed(accel.condition.refresh or PUBLISHED_REFRESH)
    return dataclasses.replace(accel, condition=ConditionCache(refresh=refresh))


def _types(policy: Any) -> dict[str, str]:
    """Annotations of the fields that are options of their own."""
    return {field.name: field.type for field in dataclasses.fields(policy) if field.name != "refresh"}


def _with_field(policy: Any, name: str, field: str, value: str) -> Any:
    value = _PARSERS[_types(policy)[field]](name, value)
    try:
        return dataclasses.replace(policy, **{field: value})
    except ValueError as error:
        raise error if name == field else ValueError(f"{name}: {error}") from None


def _switch(name: str, value: str) -> bool:
    if value not in _SWITCH:
        raise ValueError(f"{name}={value!r} must be on or off.")
    return _SWITCH[value]


def _integer(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()):
        raise ValueError(f"{name}={value!r} must be a non-negative integer.")
    return int(value)


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name}={value!r} must be a number.") from None


def _integers(name: str, value: str) -> tuple[int, ...]:
    return tuple(_integer(name, part) for part in value.split("+")) if value != "none" else ()


def _pairs(name: str, value: str) -> tuple[tuple[int, float], ...]:
    pairs = [part.partition(":") for part in value.split("+")]
    if not all(colon for _, colon, _ in pairs):
        raise ValueError(f"{name}={value!r} must be pairs STEP:SHARE, joined by +.")
    return tuple((_integer(name, first), _number(name, second)) for first, _, second in pairs)


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "int": _integer,
    "int | None": _integer,
    "float": _number,
    "str": lambda name, value: value,
    "bool": _switch,
    "tuple[int, ...] | None": _integers,
    "tuple[tuple[int, float], ...]": _pairs,
}
