"""Where the time of a program goes, by the parts of the model, from a profile of the very program that samples.

    shares = breakdown(lambda params, key: marjax.sample_latents(params, key, labels), params, key)

Every operation of a compiled program carries the named scopes it was traced in; the profiler says how long each ran.
Operations that run at the same time on different cores count in full, so times add up to more than the wall clock.
"""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

PARTS = ("encoder", "decoder", "head", "autoencoder")  # named scopes; the encoder's lies within the decoder's
OTHER = "other"


def breakdown(program: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """Seconds of operations by part of the model, and of all others.

    Args:
        program: a function that can be jitted.
        *arguments: its arguments.

    Returns:
        Part -> seconds in one run, the second.

    Raises:
        RuntimeError: if the profile holds no operation of the program.
    """
    compiled = jax.jit(program).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(compiled(*arguments))
        (file,) = Path(directory).rglob("*.xplane.pb")
        seconds = operation_seconds(ProfileData.from_file(str(file)))
    parts = part_of_operations(compiled.as_text())
    total = dict.fromkeys((*PARTS, OTHER), 0.0)
    for name, spent in seconds.items():
        if name in parts:
            total[parts[name]] += spent
    if not any(total.values()):
        raise RuntimeError("The profile names no operation of the program.")
    return total


def operation_seconds(profile: ProfileData) -> dict[str, float]:
    """Name of an operation -> seconds in all its executions."""
    seconds: collections.Counter[str] = collections.Counter()
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name is not None:
                    seconds[name] += event.duration_ns / 1e9
    return dict(seconds)


def part_of_operations(text: str) -> dict[str, str]:
    """Name of an operation -> part, for every operation of an HLO module except loops, which hold others.

    The innermost scope that names a part decides. What carries none, such as a conversion that the compiler put in,
    goes with the computation it is in.
    """
    parts, computation = {}, []
    for line in [*text.splitlines(), "}"]:
        if found := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = .*? ([\w-]+)\(", line):
            scopes = re.search(r'op_name="([^"]*)"', line)
            known = [scope for scope in scopes[1].split("/") if scope in PARTS] if scopes else []
            computation.append((found[1], found[2], known[-1] if known else None))
        elif line.startswith("}"):
            named = collections.Counter(part for _, _, part in computation if part)
            usual = named.most_common(1)[0][0] if len(named) == 1 else OTHER
            parts |= {name: part or usual for name, kind, part in computation if kind not in ("while", "call")}
            computation = []
    return parts
