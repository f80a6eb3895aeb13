"""marjax's half of `bench_vs_torch.py`, in a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file
from timing import machine

import marjax
from marjax import convert
from marjax.compilation import Stopwatch
from marjax.config import MARConfig


class Side:
    """The model with the weights of a PyTorch state dict, on the CPU.

    Args:
        config: the model.
        weights: the state dict, as safetensors.
    """

    def __init__(self, config: MARConfig, weights: Path):
        jax.config.update("jax_platforms", "cpu")
        self._params = convert.from_state_dict(load_file(weights), config)

    def replay(self, labels: np.ndarray, options: dict, order: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Float32 latents of given noise.

        Args:
            labels: [B] classes.
            options: of `marjax.sample_latents`.
            order: [B, S] image positions in the order of generation.
            noise: [B, S, T + 1, D] in that order.
        """
        return np.asarray(self._sample(labels, options, 0, dtype="float32", order=order, noise=noise))

    def run(self, labels: np.ndarray, options: dict, dtype: str, seed: int) -> tuple[float, float]:
        """Seconds that a batch takes, and how many of them are compilation."""
        watch = Stopwatch()
        with watch:
            jax.block_until_ready(self._sample(labels, options, seed, dtype=dtype))
        return watch.seconds, watch.compile_seconds

    def versions(self) -> dict[str, Any]:
        """What a measurement has to name."""
        return machine()

    def _sample(self, labels: np.ndarray, options: dict, seed: int, **more) -> jax.Array:
        return marjax.sample_latents(self._params, jax.random.key(seed), labels, **options, **more)
