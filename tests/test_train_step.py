"""The training step: accumulation and rematerialisation change nothing but memory; latents are drawn anew each step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TINY_VAE
from jax.sharding import Mesh

from marjax import codec, mar, objective
from marjax.config import MARConfig
from marjax.objective import Objective
from marjax.train_step import TrainConfig, TrainState, make_step

PIXELS = MARConfig(
    **{"img_size": 8, "vae_stride": 1, "patch_size": 2, "vae_embed_dim": 1, "class_num": 3, "buffer_size": 2},
    **{"encoder_embed_dim": 32, "encoder_depth": 1, "encoder_num_heads": 2, "diffloss_d": 1, "diffloss_w": 32},
    **{"decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2},
)
LATENTS = dataclasses.replace(PIXELS, vae_stride=2, vae_embed_dim=4, vae=TINY_VAE)
STILL = Objective(
    attn_dropout=0.0,
    proj_dropout=0.0,
    diffusion_batch_mul=2,
    label_drop_prob=0.5,
    mask_ratio_min=0.3,
    mask_ratio_std=9.0,
)
RECIPE = TrainConfig(batch_size=8, seed=3, ema_rate=0.5, dtype="float32", objective=STILL)


def random_params(config):
    shapes, rng = jax.eval_shape(functools.partial(mar.init, config), jax.random.key(0)), np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32), shapes)


def one_step(config, recipe, batch, labels, at=0):
    """The gradients, as the change of parameters under plain descent, and the metrics."""
    tx = optax.sgd(1.0)
    step = make_step(config, recipe, tx, lambda step: 1.0, Mesh(np.array(jax.devices()[:1]), ("batch",)))
    params = random_params(config)
    before = jax.tree.map(np.array, params)
    state = TrainState(step=jnp.int32(at), params=params, ema=jax.tree.map(jnp.copy, params), opt_state=tx.init(params))
    state, metrics = step(state, batch, labels)
    return jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params), jax.device_get(metrics)


@functools.cache
def pixels():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (8, 8, 8, 1), dtype=np.uint8), np.arange(8, dtype=np.int32) % 3


@functools.cache
def whole(objective=STILL):
    return one_step(PIXELS, dataclasses.replace(RECIPE, objective=objective), *pixels())


def assert_same(got, expected):
    (grads, metrics), (expected_grads, expected_metrics) = got, expected
    assert metrics.keys() == expected_metrics.keys() == {"loss", "mse", "vb", "grad_norm", "lr"}
    for name, value in metrics.items():
        assert value == pytest.approx(expected_metrics[name], rel=1e-5), name
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(expected_grads), strict=True):
        assert np.any(other), path
        # Gradients are differences of parameters here, so they carry the rounding of these.
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-4 * np.abs(other).max() + 2e-7, err_msg=str(path))


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_parts_are_the_whole_step(parts):
    """One part is the whole step, which `tests/test_objective.py` compares with the reference."""
    recipe = dataclasses.replace(RECIPE, accum_iter=parts)
    assert_same(one_step(PIXELS, recipe, *pixels()), whole())


@pytest.mark.parametrize("parts", [1, 4])
def test_one_part_at_a_time(parts, monkeypatch):
    """The loss sees parts of the batch, one mask ratio for all of them, and dropout masks of its own in each."""
    seen = []

    def loss(params, config, target, tokens, labels, draws, *, key):
        seen.append((tokens.shape, labels.shape, jax.tree.map(jnp.shape, draws)))
        drawn = jax.random.uniform(key)
        value = params["fake_latent"][0, 0] * (draws.num_known + drawn)
        return value, {"mse": jnp.float32(draws.num_known), "vb": drawn}

    monkeypatch.setattr(objective, "loss", loss)
    recipe = dataclasses.replace(RECIPE, accum_iter=parts, objective=Objective(diffusion_batch_mul=2))
    grads, metrics = one_step(PIXELS, recipe, *pixels())
    size = 8 // parts
    draws = objective.draw(recipe.objective, PIXELS, jax.random.split(step_key(0))[0], 8)
    for tokens, labels, shapes in seen:
        assert tokens == (size, 16, 4) and labels == (size,)
        assert (shapes.order, shapes.drop_label) == ((size, 16), (size,))
        assert (shapes.t, shapes.noise, shapes.num_known) == ((2, size, 16), (2, size, 16, 4), ())
    assert metrics["mse"] == draws.num_known
    key = jax.random.fold_in(jax.random.split(step_key(0))[1], 0)
    keys = [key] if parts == 1 else jax.random.split(key, parts)
    assert metrics["vb"] == pytest.approx(np.mean([jax.random.uniform(key) for key in keys]))
    assert grads["fake_latent"][0, 0] == pytest.approx(metrics["mse"] + metrics["vb"], rel=1e-5)


def step_key(step):
    return jax.random.fold_in(jax.random.key(RECIPE.seed), step)


def test_rematerialisation_with_dropout():
    """The recomputed blocks drop what they dropped the first time."""
    target = dataclasses.replace(STILL, attn_dropout=0.3, proj_dropout=0.3)
    expected = whole(target)
    assert abs(expected[1]["loss"] - whole()[1]["loss"]) > 1e-4
    assert_same(whole(dataclasses.replace(target, remat=True)), expected)


def test_latents_are_drawn_by_the_step(monkeypatch):
    """Tokens are a draw from the moments, scaled; the noise follows from seed and step."""

    def loss(params, config, target, tokens, labels, draws, *, key):
        value = params["fake_latent"][0, 0] * jnp.sum(tokens)
        return value, {"mse": jnp.sum(tokens * jnp.arange(tokens.size).reshape(tokens.shape)), "vb": jnp.sum(tokens)}

    monkeypatch.setattr(objective, "loss", loss)
    moments = np.random.default_rng(0).normal(size=(8, 4, 4, 8)).astype(np.float16)
    sums = []
    for at in (0, 0, 7):
        _, metrics = one_step(LATENTS, RECIPE, moments, pixels()[1], at)
        noise = np.asarray(jax.random.normal(jax.random.fold_in(step_key(at), 2), (8, 4, 4, 4)))
        mean, logvar = np.split(moments.astype(np.float32), 2, axis=-1)
        tokens = np.asarray(codec.patchify((mean + np.exp(0.5 * logvar) * noise) * TINY_VAE.scale, 2))
        assert metrics["vb"] == pytest.approx(tokens.sum(), rel=1e-4, abs=1e-3)
        assert metrics["mse"] == pytest.approx((tokens.ravel() * np.arange(tokens.size)).sum(), rel=1e-4, abs=0.1)
        sums.append(float(metrics["vb"]))
    assert sums[0] == sums[1] != sums[2]


def test_a_latent_step_has_the_types_of_its_state():
    tx = optax.adamw(1e-3)
    step = make_step(LATENTS, RECIPE, tx, lambda step: 1.0, Mesh(np.array(jax.devices()[:1]), ("batch",)))

    def state():
        params = mar.init(LATENTS, jax.random.key(0))
        return TrainState(step=jnp.int32(0), params=params, ema=params, opt_state=tx.init(params))

    before = jax.eval_shape(state)
    moments, labels = jax.ShapeDtypeStruct((8, 4, 4, 8), jnp.float16), jax.ShapeDtypeStruct((8,), jnp.int32)
    after, _ = jax.eval_shape(step, before, moments, labels)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), before
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"accum_iter": 0}, "accum_iter=0 must be an integer of at least 1"),
        ({"batch_size": 6, "accum_iter": 4}, "batch_size=6 must be a multiple of accum_iter=4"),
    ],
)
def test_bad_recipes(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)
