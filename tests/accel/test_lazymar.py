"""LazyMAR against the released code: whole decodes with its own orders and noise, kept sets, the head alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden_config, golden_params
from test_sample_golden import replay_noise

import marjax
from marjax import ConditionCache, HeadCache, LazyTokens, diffusion, diffusion_head
from marjax.accel.head import HeadInput
from marjax.accel.trace import CACHING, FULL, GENERATING, REUSED
from marjax.layers import dense
from marjax.noise_schedule import noise_schedule

CACHES = {"tokens": LazyTokens(), "condition": ConditionCache()}
RUNS = {
    "lazy_full_plainhead": marjax.Accel(),
    "lazy_full_cachedhead": marjax.Accel(head=HeadCache()),
    "lazy_run_plainhead": marjax.Accel(**CACHES),
    "lazy_run_cachedhead": marjax.Accel(**CACHES, head=HeadCache()),
}


@functools.cache
def params():
    return golden_params("lazy")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "lazy_run_cachedhead" else pytest.mark.slow) for name in RUNS]
)
def test_replay_matches_the_released_code(golden, name):
    run, recorded = golden(f"{name}.npz"), golden("lazy_noise.npz")
    order = recorded["orders"][:, ::-1]  # the reference decodes from the end of its order
    latents, trace = marjax.sample_latents(
        params(),
        jax.random.key(0),
        recorded["labels"],
        num_iter=64,
        cfg=3.0,
        cfg_schedule="linear",
        temperature=1.0,
        order=order,
        noise=replay_noise(recorded, run["mask_to_pred"], order),
        dtype="float32",
        accel=RUNS[name],
        return_trace=True,
    )
    np.testing.assert_allclose(np.asarray(latents).reshape(2, 256, 16), run["final_tokens"], rtol=0, atol=2e-3)
    np.testing.assert_array_equal(trace.num_predicted, run["n_pred"])
    if "run" not in name:
        assert trace.refresh.all() and (trace.positions == FULL).all()
        return
    np.testing.assert_array_equal(trace.refresh, run["is_refresh"])
    assert trace.positions.shape == (64, 1, 2, 320)
    kept = np.asarray(trace.positions[:, 0]) != REUSED
    np.testing.assert_array_equal(kept[run["prune_steps"]], run["kept"])
    cached = ~run["is_refresh"]
    now = np.asarray(trace.positions[:, 0, :, 64:])[cached] == GENERATING
    np.testing.assert_array_equal(now, run["mask_to_pred"].astype(bool)[cached])
    before = np.asarray(trace.positions[:, 0, :, 64:])[cached] == CACHING
    np.testing.assert_array_equal(before, run["mask_to_pred"].astype(bool)[np.flatnonzero(cached) - 1])


@pytest.mark.parametrize("temperature", ["1", "0.9"])
@pytest.mark.parametrize("steps", [20, 50, 100])
def test_head_alone(golden, steps, temperature):
    arrays = golden("lazy_cached_head.npz")
    tree, schedule = params().mar, noise_schedule(str(steps))
    head = diffusion_head.unstack(tree["diffloss"])
    times = diffusion_head.time_embedding(head, jnp.asarray(schedule.timestep_map))

    def sampled(policy):
        cond = dense(head["cond_embed"], arrays["z"])

        def denoise(cache, x, row, prepared):
            step = HeadInput(head, x, times[row], cond, row, prepared, schedule.num_steps)
            cache, eps_c, eps_u, v = policy.apply(cache, step)
            return cache, eps_u + 3.0 * (eps_c - eps_u), v

        return jax.jit(
            lambda noise: diffusion.sample(
                denoise,
                noise,
                schedule,
                temperature=float(temperature),
                clip_denoised=False,
                cache=policy.init(head, 4, guided=True),
                prepare=lambda rows: policy.prepare(head, times[rows], cond, 4),
                at_once=10,
            )
        )(arrays[f"T{steps}_noise"])

    np.testing.assert_allclose(sampled(HeadCache()), arrays[f"T{steps}_temp{temperature}_out"], rtol=0, atol=2e-5)
    plain = arrays[f"T{steps}_temp{temperature}_plain_out"]
    for exact in (marjax.Accel().head, HeadCache(period=1)):
        np.testing.assert_allclose(sampled(exact), plain, rtol=0, atol=2.5e-4)


def test_kept_counts_are_the_published_ones(golden):
    run, config = golden("lazy_run_plainhead.npz"), golden_config("lazy")
    counts = LazyTokens().active_counts(config, run["n_pred"], run["n_prev"])
    lazy = run["fresh_num"] >= 0
    np.testing.assert_array_equal(counts[lazy], run["fresh_num"][lazy])
    # At another number of steps the shares are read at the same part of the decode.
    halves, wholes = (
        LazyTokens(slack=0).active_counts(config, np.ones(steps, int), np.zeros(steps, int)) for steps in (32, 64)
    )
    np.testing.assert_array_equal(halves, wholes[::2])
