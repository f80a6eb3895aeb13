"""Noise schedules, the diffusion head and the sampling loop against the reference and against plain re-statements."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden_params, jit
from hypothesis import given
from hypothesis import strategies as st

from marjax import diffusion, diffusion_head
from marjax.layers import dense
from marjax.noise_schedule import cosine_betas, kept_timesteps, noise_schedule

HEAD = "tiny_head.npz"
NUM_STEPS = 10  # of the golden sampling loops
CASES = [(temperature, cfg) for temperature in ("1", "0.9") for cfg in ("1", "2.5")]


@pytest.fixture(scope="module")
def head():
    """Parameters of the golden head, unstacked."""
    return diffusion_head.unstack(golden_params("tiny").mar["diffloss"])


# --- Schedules ---------------------------------------------------------------------------------------------------


def test_base_betas(golden):
    np.testing.assert_allclose(cosine_betas(), golden("schedule.npz")["base_betas_1000"], rtol=1e-12)


@pytest.mark.parametrize("tag", ["train", "100", "50", "20", "10"])
def test_noise_schedule_golden(tag, golden):
    arrays = golden("schedule.npz")
    schedule = noise_schedule() if tag == "train" else noise_schedule(tag)
    assert schedule.num_steps == len(arrays[f"{tag}/betas"])
    for field in dataclasses.fields(schedule):
        table = getattr(schedule, field.name)
        if field.name == "timestep_map":
            np.testing.assert_array_equal(table, arrays[f"{tag}/timestep_map"])
        else:
            assert table.dtype == np.float64
            np.testing.assert_allclose(table, arrays[f"{tag}/{field.name}"], rtol=1e-12, err_msg=field.name)
            rounded = schedule.float32()[field.name]
            assert rounded.dtype == np.float32
            np.testing.assert_array_equal(rounded, table.astype(np.float32))
    assert "timestep_map" not in schedule.float32()


@pytest.mark.parametrize(
    ("num_sampling_steps", "expected"),
    [
        (2, [0, 999]),
        ("4", [0, 333, 666, 999]),
        (" 3 ", [0, 500, 999]),  # 499.5 is rounded half to even
        ("2,3", [0, 499, 500, 750, 999]),
        ("1,1,2", [0, 334, 667, 999]),  # sections of 334, 333 and 333 steps
        ("0, 2", [500, 999]),
        ("ddim4", [0, 250, 500, 750]),
        ("ddim3", [0, 334, 668]),
        ("ddim1000", list(range(1000))),
        ("1000", list(range(1000))),
    ],
)
def test_kept_timesteps(num_sampling_steps, expected):
    assert kept_timesteps(num_sampling_steps) == expected


@pytest.mark.parametrize(
    ("num_sampling_steps", "message"),
    [
        ("", r"num_sampling_steps='': expected a count such as 100, a list \"a,b,c\" or \"ddimN\"\."),
        ("ten", "num_sampling_steps='ten': expected a count"),
        ("10,", "num_sampling_steps='10,': expected a count"),
        ("-5", "num_sampling_steps='-5': expected a count"),
        ("1e2", "num_sampling_steps='1e2': expected a count"),
        (10.5, "num_sampling_steps=10.5: expected a count"),
        (None, "num_sampling_steps=None: expected a count"),
        ("ddim", "num_sampling_steps='ddim': expected a count"),
        ("ddim2,3", "num_sampling_steps='ddim2,3': expected a count"),
        ("ddim600", "no integer stride over 1000 steps gives 600 steps"),
        ("ddim1", "no integer stride over 1000 steps gives 1 steps"),
        (0, "with at least 2 steps in all"),
        (1, "with at least 2 steps in all"),
        ("0,1", "with at least 2 steps in all"),
        (1001, "a section of 1000 steps cannot give 1001"),
        ("10,501", "a section of 500 steps cannot give 501"),
    ],
)
def test_kept_timesteps_refuses(num_sampling_steps, message):
    with pytest.raises(ValueError, match=message):
        kept_timesteps(num_sampling_steps)
    with pytest.raises(ValueError, match=message):
        noise_schedule(num_sampling_steps)


@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=16).filter(lambda counts: sum(counts) >= 2))
def test_kept_timesteps_of_sections(counts):
    """Each section of the 1000 steps gives exactly its count, its first step among them."""
    steps = kept_timesteps(",".join(map(str, counts)))
    assert steps == sorted(set(steps)) and steps[0] >= 0 and steps[-1] < 1000
    for section, count in zip(np.array_split(np.arange(1000), len(counts)), counts, strict=True):
        inside = [step for step in steps if section[0] <= step <= section[-1]]
        assert len(inside) == count and inside[0] == section[0]
        assert count == 1 or inside[-1] == section[-1]


@given(stride=st.integers(1, 499))
def test_kept_timesteps_of_ddim(stride):
    steps = kept_timesteps(f"ddim{len(range(0, 1000, stride))}")
    assert steps[0] == 0 and len(steps) == len(range(0, 1000, stride)) and steps[1] <= stride
    assert set(np.diff(steps)) == {steps[1]}


@given(num_steps=st.integers(2, 1000))
def test_respaced_schedule_keeps_the_signal(num_steps):
    """The respaced process passes through the training process's marginals at the steps it keeps."""
    schedule, signal = noise_schedule(num_steps), np.cumprod(1 - cosine_betas())
    # The last signal is 2.4e-9, so 1 - beta has lost eight digits there.
    np.testing.assert_allclose(schedule.alphas_cumprod, signal[schedule.timestep_map], rtol=1e-7)
    assert schedule.timestep_map[0] == 0 and schedule.timestep_map[-1] == 999
    assert ((schedule.betas > 0) & (schedule.betas < 1)).all() and schedule.posterior_variance[0] == 0
    for table in schedule.float32().values():
        assert np.isfinite(table).all()


# --- The head ----------------------------------------------------------------------------------------------------


def test_head_forward(head, golden):
    arrays = golden(HEAD)

    @jit
    def forward(head, x, t, z):
        features, time = diffusion_head.timestep_features(t), diffusion_head.time_embedding(head, t)
        return features, time, diffusion_head.apply(head, x, time, dense(head["cond_embed"], z))

    features, time, out = forward(head, arrays["fwd_x"], arrays["fwd_t"], arrays["fwd_c"])
    # Angles reach 999 radians, of which float32 resolves 6e-5.
    np.testing.assert_allclose(features, arrays["fwd_tfreq"], atol=1e-4)
    np.testing.assert_allclose(time, arrays["fwd_temb"], rtol=2e-6, atol=2e-5)  # values to 38
    np.testing.assert_allclose(out, arrays["fwd_out"], atol=2e-5)
    assert out.shape == (12, 32) and out.dtype == jnp.float32


def test_unstack():
    stacked = golden_params("tiny").mar["diffloss"]
    single = diffusion_head.unstack(stacked)
    assert len(single["res_blocks"]) == 3 and {*single} == {*stacked}
    for index, block in enumerate(single["res_blocks"]):
        np.testing.assert_array_equal(block["mlp_0"]["kernel"], stacked["res_blocks"]["mlp_0"]["kernel"][index])


def guided(head, x, time, cond, cfg):
    """Guidance as the reference mixes it: x [R, D] of the conditional half; conditional and unconditional `cond`."""
    out = diffusion_head.apply(head, x, time, cond)
    (eps, eps_uncond), (v, v_uncond) = (jnp.split(part, 2) for part in jnp.split(out, 2, axis=-1))
    return eps_uncond + cfg * (eps - eps_uncond), v, v_uncond


def test_guidance(head, golden):
    """Rows of guided halves share x; each half keeps its own variance."""
    arrays = golden(HEAD)

    @jit
    def mix(head, x, t, z, cfg):
        return guided(head, x, diffusion_head.time_embedding(head, t), dense(head["cond_embed"], z), cfg)

    eps, v, v_uncond = mix(head, arrays["fwd_x"][:6], arrays["fwd_t"], arrays["fwd_c"], arrays["cfg_scale"])
    expected = np.concatenate([np.tile(eps, (2, 1)), np.concatenate([v, v_uncond])], axis=1)
    np.testing.assert_allclose(expected, arrays["cfg_out"], atol=2e-5)


@pytest.mark.parametrize("clip", [False, True])
def test_p_mean_variance(clip, head, golden):
    arrays, schedule = golden(HEAD), noise_schedule(NUM_STEPS)
    rows = arrays["pmv_t"]

    @jit
    def step(head, x, tables, t, z):
        out = diffusion_head.apply(head, x, diffusion_head.time_embedding(head, t), dense(head["cond_embed"], z))
        eps, v = jnp.split(out, 2, axis=-1)
        return diffusion.p_mean_variance(tables, x, eps, v, clip_denoised=clip)

    tables = {name: table[rows, None] for name, table in schedule.float32().items()}
    mean, log_variance, x0 = step(head, arrays["fwd_x"], tables, schedule.timestep_map[rows], arrays["fwd_c"])
    expected_mean, expected_x0 = (
        arrays[f"pmv_clip_{name}" if clip else f"pmv_{name}"] for name in ("mean", "pred_xstart")
    )
    # The last step multiplies x - eps by 2e4.
    last = rows == NUM_STEPS - 1
    np.testing.assert_allclose(mean[~last], expected_mean[~last], atol=5e-5)
    np.testing.assert_allclose(x0[~last], expected_x0[~last], atol=5e-5)
    np.testing.assert_allclose(mean[last], expected_mean[last], atol=1e-2)
    np.testing.assert_allclose(x0[last], expected_x0[last], atol=5e-2)
    np.testing.assert_allclose(log_variance, arrays["pmv_log_variance"], atol=5e-5)
    np.testing.assert_allclose(np.exp(log_variance), arrays["pmv_variance"], rtol=5e-5)
    assert (np.abs(x0) > 1).any() != clip


# --- The sampling loop -------------------------------------------------------------------------------------------


def denoiser(head, z, cfg):
    """`denoise` of the golden runs: rows of z are conditional, then, with guidance, as many unconditional ones."""
    times = diffusion_head.time_embedding(head, jnp.asarray(noise_schedule(NUM_STEPS).timestep_map))
    cond = dense(head["cond_embed"], z)

    def denoise(cache, x, row, _):
        if x.shape[0] < z.shape[0]:
            return cache, *guided(head, x, times[row], cond, cfg)[:2]
        return cache, *jnp.split(diffusion_head.apply(head, x, times[row], cond), 2, axis=-1)

    return denoise


@jit
def sample(head, z, noise, temperature, cfg):
    schedule = noise_schedule(NUM_STEPS)
    return diffusion.sample(denoiser(head, z, cfg), noise, schedule, temperature=temperature, clip_denoised=False)


@jit
def one_step(head, z, x, row, draw, temperature, cfg):
    """One step of the re-stated loop."""
    tables = {name: jnp.asarray(table)[row] for name, table in noise_schedule(NUM_STEPS).float32().items()}
    mean, log_variance, x0 = diffusion.p_mean_variance(
        tables, x, *denoiser(head, z, cfg)(None, x, row, None)[1:], clip_denoised=False
    )
    return jnp.where(row == 0, mean, mean + jnp.exp(log_variance / 2) * draw * temperature), x0


@pytest.mark.parametrize(("temperature", "cfg"), CASES)
def test_sample(temperature, cfg, head, golden):
    """`sample` and a plain loop agree with each other and with the reference, step by step."""
    arrays = {name: golden(HEAD)[f"samp_T{temperature}_cfg{cfg}_{name}"] for name in ("noise", "traj", "xstart", "out")}
    kept = slice(0, 12 if cfg == "1" else 6)  # the reference's unconditional half is never used
    noise, z = arrays["noise"][:, kept], golden(HEAD)["fwd_c"]

    x = noise[0]
    for index, row in enumerate(range(NUM_STEPS - 1, -1, -1)):
        x, x0 = one_step(head, z, x, row, noise[index + 1], float(temperature), float(cfg))
        np.testing.assert_allclose(x, arrays["traj"][index, kept], atol=3e-2)
        np.testing.assert_allclose(x0, arrays["xstart"][index, kept], atol=5e-2 if index == 0 else 3e-2)

    out = sample(head, z, noise, float(temperature), float(cfg))
    np.testing.assert_allclose(out, x, atol=1e-3)
    np.testing.assert_allclose(out, arrays["out"][kept], atol=1e-3)


def test_sample_ignores_the_last_draw(head, golden):
    noise, z = golden(HEAD)["samp_T1_cfg1_noise"], golden(HEAD)["fwd_c"]
    out = sample(head, z, noise, 1.0, 1.0)
    changed = noise.copy()
    changed[-1] = 1e6
    np.testing.assert_array_equal(sample(head, z, changed, 1.0, 1.0), out)
    changed[-2] += 1.0
    assert np.abs(sample(head, z, changed, 1.0, 1.0) - out).max() > 1e-3


def test_sample_recovers_a_gaussian():
    """With the exact score of N(mean, std^2) and the posterior's variance, samples have that mean and spread."""
    mean, std, schedule = 0.5, 0.3, noise_schedule(200)
    signal = jnp.asarray(schedule.alphas_cumprod, jnp.float32)

    @jit
    def run(noise):
        def denoise(cache, x, row, _):
            a = signal[row]
            eps = jnp.sqrt(1 - a) * (x - jnp.sqrt(a) * mean) / (a * std**2 + 1 - a)
            return cache, eps, jnp.zeros_like(x)

        return diffusion.sample(denoise, noise, schedule, temperature=1.0, clip_denoised=False)

    noise = np.random.default_rng(0).normal(size=(201, 4000, 1)).astype(np.float32)
    samples = np.asarray(run(noise))
    assert abs(samples.mean() - mean) < 0.02 and abs(samples.std() - std) < 0.02


@pytest.mark.parametrize("at_once", [1, 2, 5, 10])
def test_what_is_prepared_belongs_to_its_step(at_once):
    """However many steps are prepared at once, each is given its own row, and the carried value goes on."""
    assert NUM_STEPS == 10

    def denoise(seen, x, row, prepared):
        return seen.at[row].set(prepared), x * 0, x * 0

    def count(noise):
        def with_result(cache, x, row, prepared):
            cache, eps, v = denoise(cache, x, row, prepared)
            return cache, eps + jnp.sum(cache), v  # so that the result depends on everything seen

        return diffusion.sample(
            with_result,
            noise,
            noise_schedule(NUM_STEPS),
            temperature=1.0,
            clip_denoised=False,
            cache=jnp.zeros(NUM_STEPS),
            prepare=lambda rows: jnp.square(rows.astype(jnp.float32)),
            at_once=at_once,
        )

    noise = np.random.default_rng(1).normal(size=(NUM_STEPS + 1, 5, 3)).astype(np.float32)
    x, seen, schedule = noise[0], np.zeros(NUM_STEPS, np.float32), noise_schedule(NUM_STEPS)
    for index, row in enumerate(range(NUM_STEPS - 1, -1, -1)):
        seen[row] = row**2
        tables = {name: table[row] for name, table in schedule.float32().items()}
        mean, log_variance, _ = diffusion.p_mean_variance(tables, x, 0 * x + seen.sum(), 0 * x, clip_denoised=False)
        x = mean + (row > 0) * np.exp(log_variance / 2) * noise[index + 1]
    np.testing.assert_allclose(jit(count)(noise), x, rtol=1e-4)


def test_clipped_sample_stays_in_range():
    """With clipping the last predicted x0, which step 0 returns, lies in [-1, 1] whatever the head says."""
    noise = np.random.default_rng(1).normal(size=(NUM_STEPS + 1, 5, 3)).astype(np.float32)
    run = functools.partial(
        diffusion.sample,
        lambda cache, x, row, _: (cache, x - 3, x * 0),
        schedule=noise_schedule(NUM_STEPS),
        temperature=1.0,
    )
    free, clipped = jit(lambda noise: [run(noise=noise, clip_denoised=clip) for clip in (False, True)])(noise)
    assert np.abs(free).max() > 2 and np.abs(clipped).max() <= 1 + 1e-5


# --- The training loss -------------------------------------------------------------------------------------------


def test_training_losses(head, golden):
    arrays = golden(HEAD)
    x0, t, noise = (arrays[f"loss_{name}"] for name in ("x0", "t", "noise"))

    @jit
    def losses(head, x0, t, noise, z):
        xt = diffusion.add_noise(x0, t, noise)
        out = diffusion_head.apply(head, xt, diffusion_head.time_embedding(head, t), dense(head["cond_embed"], z))
        return xt, *diffusion.training_losses(out, x0, xt, t, noise)

    xt, mse, vb = losses(head, x0, t, noise, arrays["fwd_c"])
    np.testing.assert_allclose(xt, arrays["loss_xt"], atol=1e-6)
    np.testing.assert_allclose(mse, arrays["loss_mse"], atol=1e-5)
    np.testing.assert_allclose(vb, arrays["loss_vb"], atol=5e-5)
    np.testing.assert_allclose(mse + vb, arrays["loss_total"], atol=5e-5)
    assert (t == 0).any() and (t > 0).any()


def test_variational_bound_freezes_the_noise_prediction():
    """The bound trains the variance only; the squared error trains the noise only."""
    rng = np.random.default_rng(2)
    x0, noise = rng.uniform(-1, 1, size=(2, 6, 4)).astype(np.float32)
    x0[0], x0[1] = -1.0, 1.0  # the open ends of the discretised likelihood
    t = np.array([0, 0, 0, 3, 500, 999])
    output = 0.1 * rng.normal(size=(6, 8)).astype(np.float32)

    @jit
    def grads(output):
        xt = diffusion.add_noise(x0, t, noise)
        parts = [lambda out, i=i: diffusion.training_losses(out, x0, xt, t, noise)[i].sum() for i in range(2)]
        return [jax.grad(part)(output) for part in parts]

    mse, vb = (np.asarray(grad) for grad in grads(output))
    np.testing.assert_allclose(mse[:, :4], 2 * (output[:, :4] - noise) / 4, rtol=1e-5)
    assert not mse[:, 4:].any() and not vb[:, :4].any()
    assert np.isfinite(vb).all() and np.abs(vb[:, 4:]).max(axis=1).min() > 0
