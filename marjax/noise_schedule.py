"""Noise schedules of the diffusion: the cosine schedule of 1000 steps, and the steps of it that sampling visits.

As in the reference's `diffusion/` package (itself OpenAI's guided-diffusion). Everything here is numpy float64.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

TRAIN_STEPS = 1000
MAX_BETA = 0.999


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseSchedule:
    """Float64 tables of one diffusion process, each of shape [T].

    Attributes:
        timestep_map: original timestep (0..999) of each kept step.
        betas: noise added at each step.
        alphas_cumprod: signal variance left after each step.
        The others are the usual functions of these two, named as in the reference.
    """

    timestep_map: np.ndarray
    betas: np.ndarray
    alphas_cumprod: np.ndarray
    sqrt_alphas_cumprod: np.ndarray
    sqrt_one_minus_alphas_cumprod: np.ndarray
    sqrt_recip_alphas_cumprod: np.ndarray
    sqrt_recipm1_alphas_cumprod: np.ndarray
    posterior_variance: np.ndarray
    posterior_log_variance_clipped: np.ndarray
    posterior_mean_coef1: np.ndarray
    posterior_mean_coef2: np.ndarray
    log_betas: np.ndarray

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.betas)

    def float32(self) -> dict[str, np.ndarray]:
        """Every float table in float32: computed in float64, cast once."""
        tables = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: table.astype(np.float32) for name, table in tables.items() if name != "timestep_map"}


def cosine_betas() -> np.ndarray:
    """[1000] float64 betas of the cosine schedule, each at most 0.999."""

    def signal(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    pairs = ((i / TRAIN_STEPS, (i + 1) / TRAIN_STEPS) for i in range(TRAIN_STEPS))
    return np.array([min(1 - signal(end) / signal(start), MAX_BETA) for start, end in pairs])


def kept_timesteps(num_sampling_steps: int | str) -> list[int]:
    """Which of the 1000 training timesteps sampling visits, ascending (reference `space_timesteps`).

    Args:
        num_sampling_steps: "100" or 100 (evenly spaced, both ends kept); "a,b,c" (counts for equal sections of the
            1000 steps); or "ddimN" (the integer stride that gives exactly N steps).

    Raises:
        ValueError: on any other text, on fewer than 2 steps, or on more steps than there are.
    """
    text = str(num_sampling_steps).strip()
    advice = f'num_sampling_steps={num_sampling_steps!r}: expected a count such as 100, a list "a,b,c" or "ddimN"'
    if text.startswith("ddim"):
        count = _parse_count(text[len("ddim") :], advice)
        for stride in range(1, TRAIN_STEPS):
            steps = list(range(0, TRAIN_STEPS, stride))
            if len(steps) == count:
                return _at_least_two(steps, advice)
        raise ValueError(f"{advice}; no integer stride over {TRAIN_STEPS} steps gives {count} steps.")
    counts = [_parse_count(part, advice) for part in text.split(",")]
    size, extra = divmod(TRAIN_STEPS, len(counts))
    start, steps = 0, []
    for section, count in enumerate(counts):
        length = size + (section < extra)
        if length < count:
            raise ValueError(f"{advice}; a section of {length} steps cannot give {count}.")
        stride = 1.0 if count <= 1 else (length - 1) / (count - 1)
        position = 0.0
        for _ in range(count):
            # The reference accumulates the stride in floating point and rounds half to even.
            steps.append(start + round(position))
            position += stride
        start += length
    return _at_least_two(sorted(set(steps)), advice)


def _parse_count(text: str, advice: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{advice}.")
    return int(text)


def _at_least_two(steps: list[int], advice: str) -> list[int]:
    if len(steps) < 2:
        raise ValueError(f"{advice} with at least 2 steps in all.")
    return steps


@functools.lru_cache(maxsize=32)
def noise_schedule(num_sampling_steps: int | str = TRAIN_STEPS) -> NoiseSchedule:
    """Tables of the process that visits `kept_timesteps`; 1000 is the training process.

    Betas are recomputed from ratios of the kept cumulative products, also for all 1000 steps (as the reference does).
    """
    steps = np.array(kept_timesteps(num_sampling_steps))
    kept = np.cumprod(1 - cosine_betas())[steps]
    betas = np.array([1 - now / before for now, before in zip(kept, np.append(1.0, kept[:-1]), strict=True)])
    alphas_cumprod = np.cumprod(1 - betas)
    previous = np.append(1.0, alphas_cumprod[:-1])
    posterior_variance = betas * (1 - previous) / (1 - alphas_cumprod)
    return NoiseSchedule(
        timestep_map=steps,
        betas=betas,
        alphas_cumprod=alphas_cumprod,
        sqrt_alphas_cumprod=np.sqrt(alphas_cumprod),
        sqrt_one_minus_alphas_cumprod=np.sqrt(1 - alphas_cumprod),
        sqrt_recip_alphas_cumprod=np.sqrt(1 / alphas_cumprod),
        sqrt_recipm1_alphas_cumprod=np.sqrt(1 / alphas_cumprod - 1),
        posterior_variance=posterior_variance,
        # The posterior variance is 0 at the first step; its logarithm is taken from the second.
        posterior_log_variance_clipped=np.log(np.append(posterior_variance[1], posterior_variance[1:])),
        posterior_mean_coef1=betas * np.sqrt(previous) / (1 - alphas_cumprod),
        posterior_mean_coef2=(1 - previous) * np.sqrt(1 - betas) / (1 - alphas_cumprod),
        log_betas=np.log(betas),
    )
