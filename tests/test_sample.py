"""The sampling function: the loop against a plain re-statement, the (seed, index) contract, compilation."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sample_helpers import CONFIG, KEY, LABELS, OPTIONS, PARAMS, compiled_text, in_loops, sample

import marjax
from marjax import codec, decode, diffusion_head, mar, vae
from marjax.config import VAEConfig
from marjax.layers import dense
from marjax.noise_schedule import noise_schedule
from marjax.schedule import step_counts


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def plain_conditioning(config, tree, class_emb, carry, n, stop):
    """z of tokens [n, stop) of one image from exactly its n known tokens."""
    tokens, order = carry
    positions = mar.gather_positions(tree, config, order[None])
    x = mar.embed(tree, tokens[None, :n], class_emb[None], positions.encoder[:, : config.buffer_size + n])
    x = mar.decoder_input(tree, config, mar.encode(tree, config, x, n), n, positions.decoder)
    x = mar.decode(tree, config, x)[:, config.buffer_size :]
    return mar.condition(tree, x[:, n:stop], positions.diffusion[:, n:stop])[0]


@functools.partial(jax.jit, static_argnums=(0, 2))
def plain_denoise(config, tree, steps, x, row, z, scale):
    """Noise and variance predictions, guided if there are two z."""
    head = diffusion_head.unstack(tree["diffloss"])
    time = diffusion_head.time_embedding(head, jnp.asarray(noise_schedule(steps).timestep_map)[row][None])
    eps, v = zip(
        *(jnp.split(diffusion_head.apply(head, x, time, dense(head["cond_embed"], part)), 2, -1) for part in z),
        strict=True,
    )
    return (eps[0] if len(z) == 1 else eps[1] + scale * (eps[0] - eps[1])), v[0]


def plain_sample_latents(params, rng, label, index, *, num_iter, cfg, cfg_schedule, temperature, steps, known=None):
    """`sample_latents` again, for one image: exact sizes, Python loops, no plan, no scan, no padding.

    `known`: tokens [S, D] in image order and which of them are given, for inpainting.
    """
    config, tree = params.config, params.mar
    schedule = noise_schedule(steps)
    key = jax.random.fold_in(rng, index)
    order = np.asarray(jax.random.permutation(jax.random.fold_in(key, 0), config.seq_len))
    embeddings = [tree["class_emb"][label]] + ([tree["fake_latent"][0]] if cfg != 1.0 else [])
    tokens, start = np.zeros((config.seq_len, config.token_dim), np.float32), 0
    if known is not None:
        order = np.array([p for p in order if known[1][p]] + [p for p in order if not known[1][p]])
        start = int(known[1].sum())
        tokens[:start] = np.asarray(known[0])[order[:start]]
    known, mask_len = step_counts(config.seq_len, num_iter, start)
    for step in range(num_iter):
        n, stop = int(known[step]), int(known[step + 1])
        z = [plain_conditioning(config, tree, embedding, (tokens, order), n, stop) for embedding in embeddings]
        share = (config.seq_len - mask_len[step]) / config.seq_len
        scale = cfg if cfg_schedule == "constant" else 1 + (cfg - 1) * share
        token_keys = [jax.random.fold_in(jax.random.fold_in(key, 1), g) for g in range(n, stop)]
        noise = np.stack([jax.random.normal(k, (schedule.num_steps + 1, config.token_dim)) for k in token_keys], axis=1)
        x = noise[0]
        for draw, row in enumerate(reversed(range(schedule.num_steps)), start=1):
            eps, v = (np.asarray(part) for part in plain_denoise(config, tree, steps, x, row, z, scale))
            x0 = np.float32(schedule.sqrt_recip_alphas_cumprod[row]) * x
            x0 = x0 - np.float32(schedule.sqrt_recipm1_alphas_cumprod[row]) * eps
            if config.clip_denoised:
                x0 = np.clip(x0, -1, 1)
            mean = (
                np.float32(schedule.posterior_mean_coef1[row]) * x0 + np.float32(schedule.posterior_mean_coef2[row]) * x
            )
            share = (v + 1) / 2
            log_variance = share * np.float32(schedule.log_betas[row])
            log_variance += (1 - share) * np.float32(schedule.posterior_log_variance_clipped[row])
            x = mean + (np.exp(0.5 * log_variance) * noise[draw] * np.float32(temperature) if row > 0 else 0.0)
        tokens[n:stop] = x
    image = np.zeros_like(tokens)
    image[np.asarray(order)] = tokens
    return codec.unpatchify(image[None], config.patch_size)[0]


@pytest.mark.parametrize(
    ("cfg", "cfg_schedule", "clip"), [(3.0, "linear", False), (2.0, "constant", True), (1.0, "linear", False)]
)
def test_scan_equals_plain_loop(cfg, cfg_schedule, clip):
    params = PARAMS.replace(config=dataclasses.replace(CONFIG, clip_denoised=clip))
    options = {**OPTIONS, "cfg": cfg, "cfg_schedule": cfg_schedule}
    got = marjax.sample_latents(params, KEY, [3, 8], indices=[5, 0], **options)
    assert got.shape == (2, 8, 8, 16)
    assert got.dtype == jnp.float32
    for image, (label, index) in zip(got, [(3, 5), (8, 0)], strict=True):
        expected = plain_sample_latents(
            params, KEY, label, index, num_iter=3, cfg=cfg, cfg_schedule=cfg_schedule, temperature=0.9, steps=40
        )
        np.testing.assert_allclose(image, expected, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def batch():
    return marjax.sample_latents(PARAMS, KEY, LABELS, **OPTIONS)


def test_image_does_not_depend_on_its_batch(batch):
    alone = marjax.sample_latents(PARAMS, KEY, LABELS[[5]], indices=[5], **OPTIONS)
    np.testing.assert_allclose(alone[0], batch[5], rtol=0, atol=1e-3)
    assert np.abs(batch[1] - batch[3]).max() > 0.1  # one label, two indices: two images


def test_orders_and_noise_are_bit_equal_alone_and_in_a_batch():
    words = jax.random.key_data(KEY)
    keys, alone = decode.image_keys(words, jnp.arange(8)), decode.image_keys(words, jnp.array([5]))
    orders = decode.random_order(keys, CONFIG.seq_len)
    assert (np.sort(orders, axis=1) == np.arange(CONFIG.seq_len)).all()
    assert len({tuple(row) for row in np.asarray(orders)}) == 8
    np.testing.assert_array_equal(decode.random_order(alone, CONFIG.seq_len)[0], orders[5])
    whole = np.asarray(decode.random_noise(keys, 4, 16)(10, 6)).reshape(5, 8, 6, 16)
    part = np.asarray(decode.random_noise(alone, 4, 16)(12, 3)).reshape(5, 1, 3, 16)
    np.testing.assert_array_equal(part[:, 0], whole[:, 5, 2:5])
    assert abs(whole.std() - 1) < 0.05


def test_long_lists_run_in_batches_of_one_shape(batch):
    done, before = [], sample._run._cache_size()
    split = marjax.sample_latents(PARAMS, KEY, LABELS, batch_size=3, progress=done.append, **OPTIONS)
    np.testing.assert_allclose(split, batch, rtol=0, atol=1e-3)
    assert done == [3, 6, 8]
    assert sample._run._cache_size() == before + 1


def test_second_call_does_not_recompile(batch):
    before = sample._run._cache_size()
    for change in ({"cfg": 2.5}, {"temperature": 0.5}, {"indices": np.arange(8) + 100}):
        other = marjax.sample_latents(PARAMS, jax.random.key(8), LABELS[::-1], **{**OPTIONS, **change})
        assert np.abs(other - batch).max() > 0.1
    assert sample._run._cache_size() == before


def test_works_inside_a_users_jit(batch):
    @jax.jit
    def generate(params, rng, labels, cfg):
        return marjax.sample_latents(params, rng, labels, **{**OPTIONS, "cfg": cfg})

    np.testing.assert_allclose(generate(PARAMS, KEY, LABELS, 3.0), batch, rtol=0, atol=1e-3)
    unguided = marjax.sample_latents(PARAMS, KEY, LABELS, **{**OPTIONS, "cfg": 1.0})
    np.testing.assert_allclose(generate(PARAMS, KEY, LABELS, 1.0), unguided, rtol=0, atol=1e-3)
    assert np.isnan(generate(PARAMS, KEY, np.full(8, 10), 3.0)).all()


def test_users_jit_may_close_over_arrays_and_is_unguided_at_cfg_1(monkeypatch):
    """Inside a jit, jnp turns constants into tracers: checks and choices must not depend on that."""
    guided, run = [], sample._run
    monkeypatch.setattr(sample, "_run", lambda static, *rest: (guided.append(static.guided), run(static, *rest))[1])
    labels, wrong = jnp.array([3, 4]), jnp.array([9, 10])
    jax.eval_shape(lambda key: marjax.sample_latents(PARAMS, key, labels, **{**OPTIONS, "cfg": 1.0}), KEY)
    jax.eval_shape(lambda key: marjax.sample_latents(PARAMS, key, labels, **OPTIONS), KEY)
    assert guided == [False, True]
    with pytest.raises(ValueError, match="labels holds 10; expected 0 to 9"):
        jax.eval_shape(lambda key: marjax.sample_latents(PARAMS, key, wrong, **OPTIONS), KEY)


def test_jax_in_double_precision_mode_changes_nothing(batch):
    with jax.enable_x64(True):
        latents = marjax.sample_latents(PARAMS, KEY, LABELS, **OPTIONS)
    assert latents.dtype == jnp.float32
    np.testing.assert_allclose(latents, batch, rtol=0, atol=1e-3)


QUICK = {"num_iter": 2, "num_sampling_steps": 4, "cfg": 1.0, "dtype": "float32"}


@pytest.mark.parametrize("default", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_every_kind_of_key_works_whatever_the_default_kind(impl, default):
    """Typed or raw; and the (seed, index) contract holds for each."""
    key = jax.random.key(3, impl=impl)
    with jax.default_prng_impl(default):
        both = marjax.sample_latents(PARAMS, key, [1, 2], **QUICK)
        raw = marjax.sample_latents(PARAMS, jax.random.key_data(key), [1, 2], **QUICK)
    np.testing.assert_array_equal(both, raw)
    words = jax.random.key_data(key)
    pair, alone = decode.image_keys(words, jnp.arange(2)), decode.image_keys(words, jnp.array([1]))
    np.testing.assert_array_equal(decode.random_order(pair, 64)[1], decode.random_order(alone, 64)[0])
    noise = [np.asarray(decode.random_noise(keys, 4, 16)(5, 3)) for keys in (pair, alone)]
    np.testing.assert_array_equal(noise[0].reshape(5, 2, 3, 16)[:, 1], noise[1].reshape(5, 1, 3, 16)[:, 0])


def test_given_order_is_used():
    raster = np.arange(CONFIG.seq_len)
    one = marjax.sample_latents(PARAMS, KEY, [2, 2], indices=[4, 9], order=raster, **OPTIONS)
    two = marjax.sample_latents(PARAMS, KEY, [2, 2], indices=[4, 9], order=np.stack([raster, raster]), **OPTIONS)
    random = marjax.sample_latents(PARAMS, KEY, [2, 2], indices=[4, 9], **OPTIONS)
    np.testing.assert_array_equal(one, two)
    assert np.abs(one - random).max() > 0.1


@pytest.mark.parametrize("num_iter", [1, 64])
def test_fewest_and_most_steps(num_iter):
    latents = marjax.sample_latents(PARAMS, KEY, [0], **{**OPTIONS, "num_iter": num_iter})
    assert np.isfinite(latents).all()
    assert latents.std() > 0.1


def test_unconditional_sampling():
    latents = marjax.sample_latents(PARAMS, KEY, None, batch_size=2, num_iter=8, num_sampling_steps=4)
    named = marjax.sample_latents(PARAMS, KEY, None, indices=[0, 1], num_iter=8, num_sampling_steps=4, cfg=1.0)
    np.testing.assert_array_equal(latents, named)
    tree = {**PARAMS.mar, "class_emb": jnp.tile(PARAMS.mar["fake_latent"], (10, 1))}
    conditional = marjax.sample_latents(
        PARAMS.replace(mar=tree), KEY, [3, 4], num_iter=8, num_sampling_steps=4, cfg=1.0
    )
    np.testing.assert_allclose(latents, conditional, rtol=0, atol=1e-3)


def test_bfloat16_runs_bfloat16_products(monkeypatch, batch):
    """That its rounding stays small is shown part by part elsewhere: sampling amplifies it beyond comparison."""
    text = compiled_text(monkeypatch, PARAMS, dtype="bfloat16")
    leaves = jax.tree.leaves(PARAMS.mar["decoder_blocks"])
    kernels = {f"bf16[{','.join(map(str, leaf.shape[1:]))}]" for leaf in leaves if leaf.ndim == 3}
    products = [line for line in text.splitlines() if " dot(" in line]
    assert len(products) >= 8
    assert all(kernel in text for kernel in kernels)
    latents = marjax.sample_latents(PARAMS, KEY, LABELS, **{**OPTIONS, "dtype": "bfloat16"})
    assert latents.dtype == jnp.float32
    assert np.isfinite(latents).all()
    assert np.abs(latents - batch).max() > 1e-3


def test_images_of_a_pixel_model():
    config = dataclasses.replace(
        CONFIG, img_size=8, vae_stride=1, vae_embed_dim=4, patch_size=2, buffer_size=2, encoder_depth=1, decoder_depth=1
    )
    tree = jax.jit(lambda key: mar.init(config, key))(jax.random.key(0))
    params = marjax.MARParams(mar=tree, vae=None, config=config)
    images = marjax.sample(params, KEY, [0, 1], num_iter=4, num_sampling_steps=4)
    latents = marjax.sample_latents(params, KEY, [0, 1], num_iter=4, num_sampling_steps=4)
    assert images.shape == (2, 8, 8, 4)
    np.testing.assert_allclose(images, np.clip((latents + 1) / 2, 0, 1), atol=1e-6)


def test_images_of_a_latent_model():
    config = dataclasses.replace(CONFIG, vae=VAEConfig(ch=32, ch_mult=(1, 1, 1, 1), num_res_blocks=1))
    vae_tree = jax.jit(lambda key: vae.init(config.vae, key))(jax.random.key(0))
    params = PARAMS.replace(config=config, vae=vae_tree)
    images = marjax.sample(params, KEY, [0], **OPTIONS)
    latents = marjax.sample_latents(params, KEY, [0], **OPTIONS)
    decoded = vae.decode(vae_tree, config.vae, latents / config.vae.scale)
    assert images.shape == (1, 64, 64, 3)
    np.testing.assert_allclose(images, np.clip((decoded + 1) / 2, 0, 1), atol=1e-4)
    with pytest.raises(ValueError, match="carries no autoencoder; use sample_latents"):
        marjax.sample(params.replace(vae=None), KEY, [0], **OPTIONS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_loop_calls_no_host_and_copies_no_weight_stack(dtype, monkeypatch):
    text = compiled_text(monkeypatch, PARAMS, dtype=dtype)
    assert not re.search(r"callback|outfeed|infeed|\bsend\b|\brecv\b", text)
    stacks = {
        f"{width}[{','.join(map(str, leaf.shape))}]"
        for width in ("f32", "bf16")
        for name in ("encoder_blocks", "decoder_blocks")
        for leaf in jax.tree.leaves(PARAMS.mar[name])
        if leaf.ndim == 3
    }
    looped = in_loops(text)
    assert sum("dynamic-slice(" in line for line in looped) > 10  # where stacks are used
    made = [line for line in looped if any(f"= {stack}" in line for stack in stacks)]
    passed_on = ("parameter(", "get-tuple-element(")
    assert [line for line in made if not any(kind in line for kind in passed_on)] == []
