"""Gaussian diffusion on tokens: ancestral sampling and the training loss.

Behaves as the reference's `diffusion/` package (itself OpenAI's guided-diffusion) in the one mode MAR uses: noise
prediction, learned variance range, cosine schedule of 1000 steps (`marjax/noise_schedule.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from marjax.noise_schedule import NoiseSchedule, noise_schedule
from marjax.types import Array, PyTree


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
    denoise: Callable[[PyTree, Array, int | Array, PyTree], tuple[PyTree, Array, Array]],
    noise: Array,
    schedule: NoiseSchedule,
    *,
    temperature: float | Array,
    clip_denoised: bool,
    cache: PyTree = None,
    prepare: Callable[[Array], PyTree] | None = None,
    at_once: int = 1,
) -> Array:
    """Ancestral sampling of tokens, from the last kept step to step 0.

    Args:
        denoise: (cache, x [R, D], row of the schedule, a traced int, what was prepared for it) -> (cache, eps [R, D],
            v [R, D]).
        noise: [T + 1, R, D] standard normal: the initial x, then the draw of each step, T-1 first. The draw of step
            0 is not used (nothing is added there).
        schedule: tables of the T visited steps.
        temperature: scales the noise added at each step; not the initial noise.
        clip_denoised: as in `p_mean_variance`.
        cache: what `denoise` is given at the first step.
        prepare: rows [n] of the schedule -> what `denoise` needs at them that does not depend on x, arrays [n, ...].
        at_once: for how many steps to prepare at once; a divisor of T.

    Returns:
        [R, D] float32 samples.
    """
    num_steps = schedule.num_steps
    tables = {name: jnp.asarray(table[::-1]) for name, table in schedule.float32().items()}
    steps = (jnp.arange(num_steps - 1, -1, -1), tables, noise[1:])

    def step(carry: tuple[Array, PyTree], per_step) -> tuple[tuple[Array, PyTree], None]:
        (x, cache), ((row, table, draw), prepared) = carry, per_step
        cache, eps, v = denoise(cache, x, row, prepared)
        mean, log_variance, _ = p_mean_variance(table, x, eps, v, clip_denoised=clip_denoised)
        added = jnp.exp(0.5 * log_variance) * draw * temperature
        return (mean + jnp.where(row > 0, added, 0.0), cache), None

    def some_steps(carry: tuple[Array, PyTree], steps) -> tuple[tuple[Array, PyTree], None]:
        return lax.scan(step, carry, (steps, None if prepare is None else prepare(steps[0])))

    carry = (noise[0], cache)
    if at_once == num_steps:
        return some_steps(carry, steps)[0][0]
    parts = jax.tree.map(lambda x: x.reshape(num_steps // at_once, at_once, *x.shape[1:]), steps)
    return lax.scan(some_steps, carry, parts)[0][0]


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
