"""The training objective: loss and gradients against the reference, and the statistics of its random draws."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import generation_order, golden_config, golden_params, jit, relative_error, to_generation
from scipy import stats

from marjax import codec, convert, diffusion, diffusion_head, objective
from marjax.config import get_preset
from marjax.layers import dense
from marjax.objective import Draws, Objective
from marjax.types import MARParams

NAMES = ("tiny", "tiny_p2")
MUL = 2  # diffusion_batch_mul of the golden losses
EXACT = Objective(mask_ratio_min=0.5, diffusion_batch_mul=MUL)  # room for all known tokens of the golden masks

# Measured between implementations: 2e-6 and 8e-6; in tiny_p2 the bounds reach 787.
MSE_TOLERANCE = {"rtol": 0, "atol": 1e-5}
VB_TOLERANCE = {"rtol": 2e-6, "atol": 5e-5}


@functools.partial(jit, static_argnames="config")
def loss_and_grads(params, config, tokens, labels, draws):
    # One model the plain way, the other by recomputing blocks in the backward pass: same values, same gradients.
    target = dataclasses.replace(EXACT, remat=config == golden_config("tiny_p2"))

    def value(params):
        return objective.loss(params, config, target, tokens, labels, draws)

    return jax.value_and_grad(value, has_aux=True)(params)


@functools.partial(jit, static_argnames="config")
def conditioning(params, config, tokens, labels, draws):
    return objective.conditioning(params, config, EXACT, tokens, labels, draws)


@functools.cache
def case(name, golden):
    """A golden loss: configuration, parameters, arrays, tokens in image order, and draws in generation order."""
    config, arrays = golden_config(name), golden(f"{name}_loss.npz")
    order = generation_order(arrays["mask"])
    draws = Draws(
        order=order,
        num_known=np.int32((arrays["mask"][0] == 0).sum()),
        t=by_image(arrays["t"], order),
        noise=by_image(arrays["noise"], order),
        drop_label=np.zeros(len(order), bool),
    )
    tokens = np.asarray(codec.patchify(arrays["latent"].transpose(0, 2, 3, 1), config.patch_size))
    return config, golden_params(name).mar, arrays, tokens, draws


def by_image(rows, order):
    """Rows of the golden files, rep * B * S + image * S + position -> [mul, B, S, ...] in generation order."""
    rows = rows.reshape(MUL, *order.shape, *rows.shape[1:])
    return np.stack([to_generation(rep, order) for rep in rows])


@functools.cache
def result(name, golden):
    """Loss, parts and gradients of a golden case."""
    config, params, arrays, tokens, draws = case(name, golden)
    return loss_and_grads(params, config, tokens, arrays["labels"], draws)


# --- Parity with the reference -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_conditioning(name, golden):
    config, params, arrays, tokens, draws = case(name, golden)
    z, target = conditioning(params, config, tokens, arrays["labels"], draws)
    np.testing.assert_allclose(z, to_generation(arrays["z"], draws.order), atol=2e-5)
    np.testing.assert_array_equal(target, to_generation(arrays["target"], draws.order))


@pytest.mark.parametrize("name", NAMES)
def test_loss_per_token(name, golden):
    """The diffusion loss of every repeated row, known tokens too, from the reference's own z."""
    _, params, arrays, _, _ = case(name, golden)
    head = params["diffloss"]

    @jit
    def losses(head, x0, z, t, noise):
        xt = diffusion.add_noise(x0, t, noise)
        time, cond = diffusion_head.time_embedding(head, t), dense(head["cond_embed"], z)
        return diffusion.training_losses(
            diffusion_head.apply(diffusion_head.unstack(head), xt, time, cond), x0, xt, t, noise
        )

    x0, z = (np.tile(arrays[key].reshape(-1, arrays[key].shape[-1]), (MUL, 1)) for key in ("target", "z"))
    mse, vb = losses(head, x0, z, arrays["t"], arrays["noise"])
    np.testing.assert_allclose(mse, arrays["per_mse"], **MSE_TOLERANCE)
    np.testing.assert_allclose(vb, arrays["per_vb"], **VB_TOLERANCE)
    np.testing.assert_allclose(mse + vb, arrays["per_loss"], **VB_TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_loss(name, golden):
    _, _, arrays, _, _ = case(name, golden)
    (loss, parts), _ = result(name, golden)
    mask = np.tile(arrays["mask"].reshape(-1).astype(np.float64), MUL)
    np.testing.assert_allclose(loss, arrays["loss"], rtol=2e-6, atol=1e-5)
    for part in ("mse", "vb"):
        expected = (arrays[f"per_{part}"] * mask).sum() / mask.sum()
        np.testing.assert_allclose(parts[part], expected, rtol=2e-6, atol=1e-5)
    np.testing.assert_allclose(parts["mse"] + parts["vb"], loss, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, golden):
    config, _, arrays, _, _ = case(name, golden)
    _, grads = result(name, golden)
    grads = convert.to_state_dict(MARParams(mar=grads, vae=None, config=config))
    assert set(grads) == set(arrays["grad_names"])
    unused = set(arrays["grad_none"])
    assert unused == {"fake_latent"} and not grads["fake_latent"].any()

    expected = dict(zip(arrays["grad_names"], arrays["grad_norms"], strict=True))
    for key in set(grads) - unused:
        np.testing.assert_allclose(np.linalg.norm(grads[key].astype(np.float64)), expected[key], rtol=2e-5, err_msg=key)
    full = [key for key in arrays if key.startswith("grad/")]
    assert len(full) > 10
    for key in full:
        assert relative_error(grads[key.removeprefix("grad/")], arrays[key]) < 5e-5, key


# --- Properties --------------------------------------------------------------------------------------------------


def test_dropped_labels_train_the_unconditional_embedding(golden):
    config, params, arrays, tokens, draws = case("tiny_p2", golden)
    draws = draws.replace(drop_label=np.array([True, False, True]))
    z, _ = conditioning(params, config, tokens, arrays["labels"], draws)
    other, _ = conditioning(params, config, tokens, (arrays["labels"] + np.array([1, 0, 2])) % 10, draws)
    np.testing.assert_array_equal(z, other)
    kept = to_generation(arrays["z"], draws.order)
    np.testing.assert_allclose(z[1], kept[1], atol=2e-5)
    assert relative_error(z[::2], kept[::2]) > 0.01

    _, grads = loss_and_grads(params, config, tokens, arrays["labels"], draws)
    assert np.abs(grads["fake_latent"]).max() > 0
    assert np.nonzero(np.abs(grads["class_emb"]).max(axis=1))[0].tolist() == [arrays["labels"][1]]


def test_only_masked_tokens_count(golden):
    """Timesteps and noise of known tokens, and the order within known and within masked tokens, do not matter."""
    config, params, arrays, tokens, draws = case("tiny_p2", golden)
    (loss, _), _ = result("tiny_p2", golden)
    rng, seq_len, num_known = np.random.default_rng(0), config.seq_len, int(draws.num_known)

    def value(draws):
        return loss_and_grads(params, config, tokens, arrays["labels"], draws)[0][0]

    known = np.arange(seq_len) < num_known
    noise = np.where(known[:, None], 9.0, draws.noise).astype(np.float32)
    np.testing.assert_allclose(value(draws.replace(t=np.where(known, 7, draws.t), noise=noise)), loss, rtol=1e-6)
    assert abs(value(draws.replace(noise=draws.noise[:, ::-1])) - loss) > 1e-3

    shuffle = np.concatenate([rng.permutation(num_known), num_known + rng.permutation(seq_len - num_known)])
    moved = draws.replace(
        order=draws.order[:, shuffle], t=draws.t[:, :, shuffle], noise=np.ascontiguousarray(draws.noise[:, :, shuffle])
    )
    np.testing.assert_allclose(value(moved), loss, rtol=1e-5)


def test_number_of_known_tokens_is_traced(golden):
    """One program serves every mask ratio; with nothing known the tokens are targets only."""
    config, params, arrays, tokens, draws = case("tiny_p2", golden)
    before = conditioning._cache_size()
    nothing = draws.replace(num_known=np.int32(0))
    z, _ = conditioning(params, config, tokens, arrays["labels"], nothing)
    other, target = conditioning(params, config, tokens + 1, arrays["labels"], nothing)
    np.testing.assert_allclose(other, z, atol=1e-5)
    np.testing.assert_array_equal(target, to_generation(tokens + 1, draws.order))
    full, _ = conditioning(params, config, tokens, arrays["labels"], draws.replace(num_known=np.int32(8)))
    assert relative_error(full, z) > 1e-3
    assert conditioning._cache_size() <= max(before, 1)


@pytest.mark.parametrize(("rate", "with_key", "drops"), [(0.1, True, True), (0.1, False, False), (0.0, True, False)])
def test_dropout_only_with_a_key(rate, with_key, drops, golden):
    """Whether the traced loss draws random numbers; what they do is tested with the blocks."""
    config, params, arrays, tokens, draws = case("tiny_p2", golden)
    target = dataclasses.replace(EXACT, attn_dropout=rate, proj_dropout=rate)
    key = jax.random.key(0) if with_key else None
    jaxpr = jax.make_jaxpr(
        lambda params: objective.loss(params, config, target, tokens, arrays["labels"], draws, key=key)
    )(params)
    assert ("random_bits" in str(jaxpr)) == drops


# --- Draws -------------------------------------------------------------------------------------------------------

CONFIG = get_preset("tiny")


@jit
@jax.vmap
def draw(key):
    return objective.draw(Objective(diffusion_batch_mul=1), CONFIG, key, 3)


@functools.cache
def many_draws(seed=0):
    """1,024 draws for a batch of 3, as numpy arrays with a leading axis."""
    return jax.device_get(draw(jax.random.split(jax.random.key(seed), 1024)))


def test_draw_shapes():
    draws = jax.eval_shape(lambda key: objective.draw(Objective(), CONFIG, key, 3), jax.random.key(0))
    shapes = {field.name: getattr(draws, field.name).shape for field in dataclasses.fields(draws)}
    expected = {"order": (3, 64), "num_known": (), "t": (4, 3, 64), "noise": (4, 3, 64, 16), "drop_label": (3,)}
    assert shapes == expected
    assert draws.noise.dtype == jnp.float32 and draws.drop_label.dtype == bool


def test_orders_are_permutations_per_image():
    order = many_draws().order
    assert (np.sort(order, axis=-1) == np.arange(64)).all()
    assert (order[:, 0] != order[:, 1]).any(axis=-1).all(), "images of a batch have their own orders"
    counts = np.bincount(order[..., 0].reshape(-1), minlength=64)
    assert stats.chisquare(counts).pvalue > 1e-4, "every position comes first equally often"


def test_number_of_known_tokens_follows_the_truncated_normal():
    """ceil(64 ratio) tokens are masked, the ratio truncated normal on [0.7, 1] with mean 1 and deviation 0.25."""
    masked = 64 - many_draws().num_known
    assert masked.min() >= 45 and masked.max() == 64
    assert Objective().max_known(64) == 19
    edges = stats.truncnorm(-1.2, 0.0, loc=1.0, scale=0.25).cdf(np.arange(44, 65) / 64)
    expected = np.diff(edges) * masked.size
    counts = np.bincount(masked, minlength=65)[45:]
    assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_timesteps_noise_and_dropped_labels():
    draws = many_draws()
    assert draws.t.min() == 0 and draws.t.max() == 999
    assert stats.chisquare(np.bincount(draws.t.reshape(-1), minlength=1000)).pvalue > 1e-4
    assert abs(draws.noise.mean()) < 2e-3 and abs(draws.noise.std() - 1) < 2e-3
    assert abs(draws.drop_label.mean() - 0.1) < 0.02


def test_draws_are_deterministic():
    first, again, other = many_draws(), many_draws.__wrapped__(), many_draws(seed=1)
    for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)
    for field in dataclasses.fields(first):
        assert (getattr(first, field.name) != getattr(other, field.name)).any(), field.name


@pytest.mark.parametrize(("mask_ratio_min", "expected"), [(0.7, 19), (1.0, 0), (0.5, 32), (0.01, 63), (0.75, 16)])
def test_max_known(mask_ratio_min, expected):
    assert Objective(mask_ratio_min=mask_ratio_min).max_known(64) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mask_ratio_min": 0.0}, r"mask_ratio_min=0.0 must lie in \(0, 1\]"),
        ({"mask_ratio_min": 1.01}, r"mask_ratio_min=1.01 must lie in \(0, 1\]"),
        ({"mask_ratio_min": float("nan")}, r"mask_ratio_min=nan must lie in \(0, 1\]"),
        ({"label_drop_prob": 1.0}, r"label_drop_prob=1.0 must lie in \[0, 1\)"),
        ({"attn_dropout": -0.1}, r"attn_dropout=-0.1 must lie in \[0, 1\)"),
        ({"proj_dropout": float("nan")}, r"proj_dropout=nan must lie in \[0, 1\)"),
        ({"diffusion_batch_mul": 0}, r"diffusion_batch_mul=0 must be at least 1"),
        ({"unroll": -1}, r"unroll=-1 must be at least 1"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(ValueError, match=message):
        Objective(**values)
