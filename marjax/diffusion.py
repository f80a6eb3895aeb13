"""Gaussian diffusion on tokens: noise schedule, respacing, ancestral sampling, training loss.

Behaves as the reference's `diffusion/` package (itself OpenAI's guided-diffusion) in the one mode MAR uses: noise
prediction, learned variance range, cosine schedule of 1000 steps. Tables are numpy float64 at trace time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from marjax.types import Array

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


def p_mean_variance(
    tables: dict[str, Array], x: Array, eps: Array, v: Array, *, clip_denoised: bool
) -> tuple[Array, Array, Array]:
    """One reverse step's Gaussian (reference `p_mean_variance`).

    Args:
        tables: `NoiseSchedule.float32` rows at the step, each broadcastable to [R, D].
        x: [R, D] noisy tokens.
        eps: [R, D] predicted noise.
        v: [R, D] variance interpolation; -1 gives the posterior variance, 1 gives beta.
        clip_denoised: clip the predicted x0 to [-1, 1].

    Returns:
        mean, log variance, predicted x0; each [R, D] float32.
    """
    x0 = tables["sqrt_recip_alphas_cumprod"] * x - tables["sqrt_recipm1_alphas_cumprod"] * eps
    if clip_denoised:
        x0 = jnp.clip(x0, -1.0, 1.0)
    mean = tables["posterior_mean_coef1"] * x0 + tables["posterior_mean_coef2"] * x
    fraction = (v + 1) / 2
    log_variance = fraction * tables["log_betas"] + (1 - fraction) * tables["posterior_log_variance_clipped"]
    return mean, log_variance, x0


def sample(
    denoise: Callable[[Array, int | Array], tuple[Array, Array]],
    noise: Array,
    schedule: NoiseSchedule,
    *,
    temperature: float | Array,
    clip_denoised: bool,
) -> Array:
    """Ancestral sampling of tokens, one `lax.scan` from the last kept step to step 0.

    Args:
        denoise: (x [R, D], row of the schedule, a traced int) -> (eps [R, D], v [R, D]).
        noise: [T + 1, R, D] standard normal: the initial x, then the draw of each step, T-1 first. The draw of step
            0 is not used (nothing is added there).
        schedule: tables of the T visited steps.
        temperature: scales the noise added at each step; not the initial noise.
        clip_denoised: as in `p_mean_variance`.

    Returns:
        [R, D] float32 samples.
    """
    num_steps = schedule.num_steps
    tables = {name: jnp.asarray(table[::-1]) for name, table in schedule.float32().items()}
    rows = jnp.arange(num_steps - 1, -1, -1)

    def step(x: Array, per_step) -> tuple[Array, None]:
        row, table, draw = per_step
        eps, v = denoise(x, row)
        mean, log_variance, _ = p_mean_variance(table, x, eps, v, clip_denoised=clip_denoised)
        added = jnp.exp(0.5 * log_variance) * draw * temperature
        return mean + jnp.where(row > 0, added, 0.0), None

    return lax.scan(step, noise[0], (rows, tables, noise[1:]))[0]


def add_noise(x0: Array, t: Array, noise: Array) -> Array:
    """[R, D] clean tokens, [R] training timesteps, [R, D] noise -> [R, D] noisy tokens (reference `q_sample`)."""
    tables = _training_tables(t)
    return tables["sqrt_alphas_cumprod"] * x0 + tables["sqrt_one_minus_alphas_cumprod"] * noise


def _training_tables(t: Array) -> dict[str, Array]:
    """Rows [R, 1] of the training process's tables at timesteps [R]."""
    return {name: jnp.asarray(table)[t, None] for name, table in noise_schedule().float32().items()}


def training_losses(output: Array, x0: Array, xt: Array, t: Array, noise: Array) -> tuple[Array, Array]:
    """Per-token training losses (reference `training_losses`, type MSE with a learned variance range).

    Args:
        output: [R, 2 D] head output at (xt, t).
        x0: [R, D] clean tokens.
        xt: [R, D] noisy tokens.
        t: [R] training timesteps in 0..999.
        noise: [R, D] the noise in xt.

    Returns:
        mse [R], the squared error of the noise, and vb [R], the variational bound of the variance in bits per
        dimension with the noise prediction frozen. Their sum is the loss.
    """
    eps, v = jnp.split(output, 2, axis=-1)
    mse = jnp.mean(jnp.square(noise - eps), axis=-1)

    tables = _training_tables(t)
    true_mean = tables["posterior_mean_coef1"] * x0 + tables["posterior_mean_coef2"] * xt
    true_log_variance = tables["posterior_log_variance_clipped"]
    mean, log_variance, _ = p_mean_variance(tables, xt, lax.stop_gradient(eps), v, clip_denoised=False)
    kl = 0.5 * (
        -1.0
        + log_variance
        - true_log_variance
        + jnp.exp(true_log_variance - log_variance)
        + jnp.square(true_mean - mean) * jnp.exp(-log_variance)
    )
    nll = -_discretized_log_likelihood(x0, mean, 0.5 * log_variance)
    vb = jnp.mean(jnp.where(t[:, None] == 0, nll, kl), axis=-1) / math.log(2.0)
    return mse, vb


def _discretized_log_likelihood(x: Array, mean: Array, log_scale: Array) -> Array:
    """Log likelihood of 8-bit values scaled to [-1, 1] under a Gaussian, in nats (used at t = 0 only)."""
    centred, inverse = x - mean, jnp.exp(-log_scale)

    def cdf(u: Array) -> Array:
        return 0.5 * (1.0 + jnp.tanh(math.sqrt(2.0 / math.pi) * (u + 0.044715 * u**3)))

    above = cdf(inverse * (centred + 1.0 / 255.0))
    below = cdf(inverse * (centred - 1.0 / 255.0))
    floor = 1e-12
    return jnp.where(
        x < -0.999,
        jnp.log(jnp.maximum(above, floor)),
        jnp.where(
            x > 0.999,
            jnp.log(jnp.maximum(1.0 - below, floor)),
            jnp.log(jnp.maximum(above - below, floor)),
        ),
    )
