"""The optimizer: decay groups by the reference's rule, schedules, AdamW against numpy, and what Muon touches."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
import optax
import pytest
from helpers import golden_params, golden_state, jit

from marjax import convert
from marjax.optimizer import OptimizerConfig, decay_mask, learning_rate, make_optimizer
from marjax.types import MARParams

BATCH = 512


def make_tree(seed, scale):
    """A small tree with every kind of leaf, drawn at random."""
    shapes = {
        "class_emb": (5, 6),
        "mask_token": (1, 6),
        "z_proj": {"kernel": (4, 6), "bias": (6,)},
        "encoder_norm": {"scale": (6,)},
        "encoder_blocks": {"fc1": {"kernel": (2, 6, 8), "bias": (2, 8)}, "norm1": {"scale": (2, 6)}},
        "diffloss": {"res_blocks": {"mlp_0": {"kernel": (2, 5, 5)}}, "cond_embed": {"kernel": (6, 5)}},
    }
    rng = np.random.default_rng(seed)
    draw = functools.partial(jax.tree.map, is_leaf=lambda node: isinstance(node, tuple))
    return draw(lambda shape: (scale * rng.normal(size=shape)).astype(np.float32), shapes)


def run(config, schedule, grads, params):
    """The parameters after each of several updates."""
    tx = make_optimizer(config, schedule)
    step = jit(tx.update)
    state, history = tx.init(params), []
    for grad in grads:
        updates, state = step(grad, state, params)
        params = optax.apply_updates(params, updates)
        history.append(jax.device_get(params))
    return history


# --- Decay groups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "tiny_p2"])
def test_decay_mask_is_the_rule_of_the_reference(name):
    """No decay for 1-D tensors, names ending in .bias, and names with diffloss: per key of the reference."""
    params = golden_params(name)
    mask = jax.tree.map(lambda decays, leaf: np.full(leaf.shape, decays), decay_mask(params.mar), params.mar)
    by_key = convert.to_state_dict(MARParams(mar=mask, vae=None, config=params.config))
    decayed = {key for key, flags in by_key.items() if flags.all()}
    assert all(flags.all() == flags.any() for flags in by_key.values())
    expected = {
        key
        for key, array in golden_state(name).items()
        if not (array.ndim == 1 or key.endswith(".bias") or "diffloss" in key)
    }
    assert decayed == expected
    assert {"fake_latent", "mask_token", "class_emb.weight", "encoder_pos_embed_learned"} <= decayed


# --- Schedules ---------------------------------------------------------------------------------------------------


def test_constant_learning_rate():
    schedule = learning_rate(OptimizerConfig(blr=1e-4), BATCH, warmup_steps=10, total_steps=100)
    np.testing.assert_allclose([schedule(step) for step in (0, 1, 5, 10, 50, 100, 1000)], [0, 2e-5, 1e-4, *[2e-4] * 4])


def test_cosine_learning_rate():
    config = OptimizerConfig(lr=1e-3, min_lr=1e-5, lr_schedule="cosine")
    schedule = jit(learning_rate(config, BATCH, warmup_steps=20, total_steps=100))
    for step in (0, 7, 20, 40, 60, 99, 100, 1000):
        progress = min(step - 20, 80) / 80
        after = 1e-5 + (1e-3 - 1e-5) * 0.5 * (1 + math.cos(math.pi * progress))
        np.testing.assert_allclose(schedule(step), 1e-3 * step / 20 if step < 20 else after, rtol=1e-5)


@pytest.mark.parametrize("lr_schedule", ["constant", "cosine"])
def test_without_warm_up_the_first_step_counts(lr_schedule):
    schedule = learning_rate(OptimizerConfig(lr=1e-3, lr_schedule=lr_schedule), BATCH, warmup_steps=0, total_steps=10)
    np.testing.assert_allclose(schedule(0), 1e-3)


def test_peak_learning_rate():
    assert OptimizerConfig(blr=1e-4).peak_lr(1024) == pytest.approx(4e-4)
    assert OptimizerConfig(blr=1e-4, lr=3e-4).peak_lr(1024) == 3e-4


# --- Updates -----------------------------------------------------------------------------------------------------


def test_adamw_against_numpy():
    """Global clipping at 3, then AdamW with decoupled decay, in float64 from the definition."""
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    schedule = learning_rate(config, BATCH, warmup_steps=2, total_steps=10)
    params = make_tree(0, 1.0)
    grads = [make_tree(seed, scale) for seed, scale in ((1, 1.0), (2, 0.05), (3, 10.0), (4, 0.1))]
    norms = [np.sqrt(sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in jax.tree.leaves(grad))) for grad in grads]
    assert norms[1] < 3 and norms[3] < 3 and norms[0] > 3 and norms[2] > 3
    history = run(config, schedule, grads, params)

    decays = {
        "class_emb": True,
        "mask_token": True,
        "z_proj": {"kernel": True, "bias": False},
        "encoder_norm": {"scale": False},
        "encoder_blocks": {"fc1": {"kernel": True, "bias": False}, "norm1": {"scale": False}},
        "diffloss": {"res_blocks": {"mlp_0": {"kernel": False}}, "cond_embed": {"kernel": False}},
    }
    assert decay_mask(params) == decays
    flat = [leaf.astype(np.float64) for leaf in jax.tree.leaves(params)]
    first, second = [np.zeros_like(leaf) for leaf in flat], [np.zeros_like(leaf) for leaf in flat]
    for step, (grad, got) in enumerate(zip(grads, history, strict=True), start=1):
        lr = 1e-2 * min((step - 1) / 2, 1)
        clip = min(1, 3 / norms[step - 1])
        for i, (g, decayed) in enumerate(zip(jax.tree.leaves(grad), jax.tree.leaves(decays), strict=True)):
            g = g.astype(np.float64) * clip
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.95 * second[i] + 0.05 * g**2
            direction = first[i] / (1 - 0.9**step) / (np.sqrt(second[i] / (1 - 0.95**step)) + 1e-8)
            flat[i] = flat[i] * (1 - lr * 0.1 * decayed) - lr * direction
        for leaf, expected in zip(jax.tree.leaves(got), flat, strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)


def test_muon_moves_the_kernels_of_the_stacks_only():
    """Per layer: 0.2 sqrt(max(in, out)) times an orthogonal matrix, and decay outside the head; the rest by Adam."""
    lr, decay = 1e-2, 0.5
    config = OptimizerConfig(optimizer="muon", weight_decay=decay, grad_clip=1e6)
    # Outside the stacks parameters are zero, so that what is left of an update is Adam's.
    params, grads = jax.tree.map(np.zeros_like, make_tree(0, 1.0)), make_tree(1, 0.01)
    params |= {name: make_tree(0, 1.0)[name] for name in ("encoder_blocks", "diffloss")}
    moved = run(config, lambda step: lr, [grads], params)[0]

    adam = optax.adam(lr, 0.9, 0.95, nesterov=True)
    by_adam = jax.device_get(jit(adam.update)(grads, adam.init(params))[0])
    by_muon = []
    for path, update in jax.tree_util.tree_leaves_with_path(jax.tree.map(np.subtract, moved, params)):
        names = [part.key for part in path]
        param, grad, expected = (
            functools.reduce(lambda tree, key: tree[key], names, tree) for tree in (params, grads, by_adam)
        )
        if names[-1] != "kernel" or not {"encoder_blocks", "res_blocks"} & set(names):
            np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-6, err_msg=str(names))
            continue
        by_muon.append(names[0])
        decayed = lr * decay * param if names[0] == "encoder_blocks" else np.zeros_like(param)
        for layer, layer_grad in zip(update + decayed, grad, strict=True):
            u, _, vt = np.linalg.svd(layer_grad, full_matrices=False)
            sizes = np.linalg.svd(layer, compute_uv=False) / (lr * 0.2 * math.sqrt(max(layer.shape)))
            assert sizes.min() > 0.5 and sizes.max() < 1.5, names
            cosine = np.sum(layer * (u @ vt)) / np.linalg.norm(layer) / np.linalg.norm(u @ vt)
            assert cosine < -0.95, names
    assert sorted(by_muon) == ["diffloss", "encoder_blocks"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_fits_the_model(optimizer):
    """Both optimizers take a whole model: updates have its structure, shapes and dtypes."""
    params = golden_params("tiny").mar
    tx = make_optimizer(OptimizerConfig(optimizer=optimizer), lambda step: 1e-4)
    updates, _ = jax.eval_shape(lambda params: tx.update(params, tx.init(params), params), params)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), updates) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), params
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer='sgd' must be one of adamw, muon"),
        ({"lr_schedule": "linear"}, "lr_schedule='linear' must be one of constant, cosine"),
        ({"blr": 0.0}, "blr=0.0 must be a positive finite number"),
        ({"lr": -1e-4}, "lr=-0.0001 must be a positive finite number"),
        ({"lr": float("nan")}, "lr=nan must be a positive finite number"),
        ({"grad_clip": float("inf")}, "grad_clip=inf must be a positive finite number"),
        ({"min_lr": -1.0}, "min_lr=-1.0 must be finite and >= 0"),
        ({"warmup_epochs": float("nan")}, "warmup_epochs=nan must be finite and >= 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be finite and >= 0"),
        ({"beta1": 1.0}, r"beta1=1.0 must lie in \[0, 1\)"),
        ({"beta2": -0.1}, r"beta2=-0.1 must lie in \[0, 1\)"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**values)
