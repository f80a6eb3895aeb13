"""What the caches cost and save, by arithmetic: memory as the docstrings say, FLOPs as the plan counts them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import marjax
from marjax import ActiveTokens, LazyTokens
from marjax.accel import resolve
from marjax.accel.plan import StepCost, flops_per_image, plan_for


def cache_bytes(policy, config, room, dtype) -> int:
    """Of one row."""
    init = functools.partial(policy.init, config, 1, room, jnp.dtype(dtype))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(init)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["fashion_mnist", "mar_base", "mar_large"])
def test_memory_is_what_the_docstrings_say(preset, dtype):
    config, size, room = marjax.get_preset(preset), jnp.dtype(dtype).itemsize, 7
    total = config.buffer_size + config.seq_len
    encoder = 2 * config.encoder_depth * (total + room) * config.encoder_embed_dim * size
    encoder += (total + room) * config.decoder_embed_dim * 4
    layer = 2 * total * config.decoder_embed_dim * size
    lazy = cache_bytes(LazyTokens(), config, room, dtype)
    assert lazy == encoder + (config.decoder_depth - 4) * layer + layer // 2
    assert cache_bytes(ActiveTokens(), config, room, dtype) == encoder + (config.decoder_depth - 2) * layer
    full = ActiveTokens(encoder="full", decision_layer=1)
    assert cache_bytes(full, config, room, dtype) == (config.decoder_depth - 1) * layer


def test_memory_of_mar_base():
    """The numbers in the docstrings."""
    config, sizes = marjax.get_preset("mar_base"), {}
    for name in ("lazymar", "marche"):
        plan = plan_for(config, 64, 100, accel=resolve(name))
        room = max(segment.previous for segment in plan.segments)
        sizes[name] = round(cache_bytes(resolve(name).tokens, config, room, "bfloat16") / 1e6)
    assert f"{sizes['lazymar']} MB" in LazyTokens.__doc__ and f"{sizes['marche']} MB" in ActiveTokens.__doc__


def flops(accel, preset="mar_base", guided=True):
    config = marjax.get_preset(preset)
    plan = plan_for(config, 64, 100, accel=resolve(accel), guided=guided)
    return flops_per_image(plan, StepCost(config, resolve(accel), 100, guided))


def test_flops_of_the_exact_model():
    """MAR-B: 14.6e12 without padding, as the reference does it; our last layer runs for the predicted tokens alone."""
    exact, layer = flops("none"), 320 * 12 * 768**2 + 2 * 320**2 * 768
    last = 320 * 3 * 768**2 + 7 * (9 * 768**2 + 2 * 320 * 768)  # of at most 7 tokens
    saved = 64 * 2 * 2 * (layer - last)
    assert 14.6e12 < exact + saved < 1.1 * 14.6e12
    assert flops("none", guided=False) == exact / 2
    decoder = 64 * 2 * 2 * (11 * layer + last)
    head = 256 * 100 * 2 * 2 * (6 * 5 + 2) * 1024**2
    assert 0.2 < (exact - decoder - head) / exact < 0.35  # the encoder


@pytest.mark.parametrize(
    ("accel", "share"),
    [
        ("lazymar", 0.36),
        ("marche", 0.62),
        ("marche:encoder=full", 1 / 1.27),
        ("marche:encoder_buffers=recomputed", 1 / 1.48),
        ("marche:condition=on,head=on", 1 / 2.6),
    ],
)
def test_flops_that_the_caches_save(accel, share):
    assert flops(accel) / flops("none") == pytest.approx(share, rel=0.03)
