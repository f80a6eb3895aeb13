"""Timing for benchmarks: compilation apart, paired and interleaved repeats, medians and spread, the machine's name.

    runs = interleaved({"none": lambda seed: ..., "marche": lambda seed: ...}, repeats=3)
    runs["marche"].seconds, ratios(runs, "none")["marche"]

A run must return arrays, which are waited for.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
from tqdm import tqdm

import marjax
from marjax.compilation import Stopwatch
from marjax.files import atomic_write


@dataclasses.dataclass
class Timing:
    """Times of one variant.

    Attributes:
        compile_seconds: tracing, lowering and compiling in its first run; 0 for a program that the process had already.
        seconds: wall-clock time of each timed run.
    """

    compile_seconds: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the timed runs, in seconds."""
        return statistics.median(self.seconds)


def interleaved(
    variants: dict[str, Callable[[int], Any]],
    repeats: int,
    *,
    warm_up: bool = True,
    after_round: Callable[[dict[str, Timing]], None] | None = None,
) -> dict[str, Timing]:
    """Runs every variant in turn, `repeats` times over, so that drifts of the machine hit all alike.

    Args:
        variants: name -> function of a seed that returns arrays.
        repeats: timed runs of each.
        warm_up: run each once before. False leaves only compilation out of the first timed run, for long runs.
        after_round: called with the times so far whenever every variant has run as often as the others.

    Returns:
        Name -> its times; run i of every variant had seed i + 1.

    Raises:
        RuntimeError: if a timed run after the first compiled something.
    """
    timings = {name: Timing() for name in variants}
    rounds = range(0 if warm_up else 1, repeats + 1)
    with tqdm(total=len(rounds) * len(variants), disable=None) as bar:
        for seed in rounds:
            for name, run in variants.items():
                bar.set_description_str(name)
                watch = Stopwatch()
                with watch:
                    jax.block_until_ready(run(seed))
                bar.update()
                if seed == rounds[0]:
                    timings[name].compile_seconds = watch.compile_seconds
                elif watch.compile_seconds > 0.01 * watch.seconds:
                    raise RuntimeError(f"{name}: run {seed} spent {watch.compile_seconds:.2f} s on compilation.")
                if seed > 0:
                    timings[name].seconds.append(watch.work_seconds if seed == rounds[0] else watch.seconds)
            if after_round is not None and seed > 0:
                after_round(timings)
    return timings


def ratios(timings: dict[str, Timing], base: str) -> dict[str, list[float]]:
    """Name -> its time as a share of the base's, pair by pair."""
    return {
        name: [own / other for own, other in zip(timing.seconds, timings[base].seconds, strict=True)]
        for name, timing in timings.items()
    }


def write_text(path: Path, text: str) -> None:
    """Replaces a file."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file; makes its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def spread(values: list[float], digits: int = 2) -> str:
    """Median and extremes, for people."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def machine() -> dict[str, Any]:
    """What a measurement has to name."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    return {
        "device": device.device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "machine": _processor(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "marjax": marjax.__version__,
        # Of the whole process so far, not of one variant.
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_device_bytes": stats.get("peak_bytes_in_use"),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
