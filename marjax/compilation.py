"""Compilation as users feel it: kept on disk between runs, and timed apart from the work itself."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Self

import jax

COMPILE_EVENTS = "/jax/core/compile/"  # tracing, lowering, and compiling or reading from the cache
MIN_COMPILE_SECONDS = 0.1  # programs that compile faster are not worth a file


def cache_dir() -> Path:
    """Where compiled programs are kept: $MARJAX_CACHE_DIR, or else marjax in $XDG_CACHE_HOME or ~/.cache.

    Raises:
        RuntimeError: if there is no home directory to fall back on.
    """
    if chosen := os.environ.get("MARJAX_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "marjax")


def use_persistent_cache() -> None:
    """Switches jax's persistent compilation cache on, in `cache_dir`, unless the user has configured jax's own.

    Raises:
        OSError: if the directory cannot be made or written to. Programs then compile without a cache.
        RuntimeError: as `cache_dir`.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    path = cache_dir().absolute()
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):  # jax itself would complain about every single program
        jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)


class Stopwatch:
    """Context manager that times its blocks, compilation apart from work; it can be entered again.

    Attributes:
        seconds: wall-clock time of the blocks.
    """

    def __init__(self):
        self.seconds = 0.0
        self._compiling: list[tuple[float, float]] = []

    @property
    def compile_seconds(self) -> float:
        """Time spent on compilation."""
        return sum(end - start for start, end in self._compiling)

    @property
    def work_seconds(self) -> float:
        """The rest; positive, so that rates can be formed."""
        return max(self.seconds - self.compile_seconds, 1e-9)

    def __enter__(self) -> Self:
        jax.monitoring.register_event_time_span_listener(self._add)
        self._started = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds += time.monotonic() - self._started
        jax.monitoring.unregister_event_time_span_listener(self._add)

    def _add(self, event: str, start: float, end: float, **details: str | int) -> None:
        if not event.startswith(COMPILE_EVENTS):
            return
        # Reports nest (tracing may compile a constant): an outer one comes last and replaces those inside it.
        while self._compiling and self._compiling[-1][0] >= start:
            self._compiling.pop()
        self._compiling.append((start, end))
