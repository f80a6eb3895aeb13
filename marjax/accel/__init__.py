"""Accelerations by name, with options: "marche:budget=32,refresh_every=4"."""

from __future__ import annotations

import dataclasses
from typing import Any

from marjax.accel.base import Accel, ConditionCache, ExactTokens, Refresh
from marjax.accel.head import ExactHead, HeadCache
from marjax.accel.lazymar import LazyTokens
from marjax.accel.marche import ActiveTokens

NAMES = {
    "none": Accel(),
    "lazymar": Accel(tokens=LazyTokens(), condition=ConditionCache(), head=HeadCache()),
    "marche": Accel(tokens=ActiveTokens()),
}
# Parts that can be switched: what is put in place when it is on, and when it is off.
_PARTS: dict[str, tuple[Any, Any]] = {
    "condition": (ConditionCache(), None),
    "head": (HeadCache(), ExactHead()),
}
_SWITCH = {"on": True, "off": False, "true": True, "false": False}


def resolve(accel: str | Accel) -> Accel:
    """The acceleration of that name, or `accel` itself.

    Raises:
        ValueError: if the name or an option is unknown, or a value unusable.
        TypeError: if `accel` is neither a name nor an `Accel`.
    """
    if isinstance(accel, Accel):
        return accel
    if not isinstance(accel, str):
        raise TypeError(f"accel={accel!r} must be a name or a marjax.Accel, not {type(accel).__name__}.")
    name, _, options = accel.partition(":")
    if name not in NAMES:
        raise ValueError(f"Unknown accel {name!r}; expected one of {', '.join(NAMES)}.")
    result = NAMES[name]
    for option in filter(None, options.split(",")):
        result = _with_option(result, accel, *option.partition("=")[::2])
    return result


def _with_option(accel: Accel, text: str, name: str, value: str) -> Accel:
    tokens = accel.tokens
    if name in _PARTS or name == "tokens":
        if value not in _SWITCH:
            raise ValueError(f"accel={text!r}: {name}={value!r} must be on or off.")
        if name == "tokens":
            if _SWITCH[value]:
                return accel
            return dataclasses.replace(accel, tokens=ExactTokens())
        on, off = _PARTS[name]
        if name == "condition" and tokens.refresh is not None:
            on = ConditionCache(refresh=tokens.refresh)
        return dataclasses.replace(accel, **{name: on if _SWITCH[value] else off})
    if name in ("refresh_every", "warmup"):
        return _with_refresh(accel, text, name, value)
    fields = {field.name for field in dataclasses.fields(tokens)} - {"refresh", "shares"}
    if name not in fields:
        known = ", ".join(sorted(fields | {"refresh_every", "warmup", "tokens", *_PARTS}))
        raise ValueError(f"accel={text!r}: unknown option {name!r}; expected one of {known}.")
    return dataclasses.replace(accel, tokens=dataclasses.replace(tokens, **{name: _value(text, name, value, tokens)}))


def _with_refresh(accel: Accel, text: str, name: str, value: str) -> Accel:
    field = "period" if name == "refresh_every" else "warmup"
    number = None if (field, value) == ("period", "never") else _integer(text, name, value)

    def changed(refresh: Refresh) -> Refresh:
        return dataclasses.replace(refresh, **{field: number})

    if accel.tokens.refresh is not None:
        accel = dataclasses.replace(
            accel, tokens=dataclasses.replace(accel.tokens, refresh=changed(accel.tokens.refresh))
        )
    if accel.condition is not None:
        accel = dataclasses.replace(accel, condition=ConditionCache(refresh=changed(accel.condition.refresh)))
    return accel


def _value(text: str, name: str, value: str, tokens: Any) -> Any:
    default = getattr(tokens, name)
    if isinstance(default, bool):
        if value not in _SWITCH:
            raise ValueError(f"accel={text!r}: {name}={value!r} must be on or off.")
        return _SWITCH[value]
    return value if isinstance(default, str) else _integer(text, name, value)


def _integer(text: str, name: str, value: str) -> int:
    if not value.isdecimal():
        raise ValueError(f"accel={text!r}: {name}={value!r} must be a non-negative integer.")
    return int(value)
