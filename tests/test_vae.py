"""The autoencoder equals the reference in values and names; its converter loses nothing and accepts nothing else."""

from __future__ import annotations

import ast
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from marjax import convert_vae, vae
from marjax.config import VAEConfig
from marjax.convert import torch_shapes
from marjax.types import cast_matrices, count_params

CONFIG = VAEConfig(ch=32, ch_mult=(1, 1, 1, 1, 2))
TINY = VAEConfig(ch=32, ch_mult=(1, 1), num_res_blocks=1, embed_dim=4)

encode = jax.jit(vae.encode, static_argnames="config")
decode = jax.jit(vae.decode, static_argnames=("config", "chunk"))


def nhwc(array: np.ndarray) -> np.ndarray:
    return array.transpose(0, 2, 3, 1)


def close(got, expected, atol: float) -> None:
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, nhwc(expected), rtol=0, atol=atol)


def template(config: VAEConfig):
    return jax.eval_shape(functools.partial(vae.init, config), jax.random.key(0))


@pytest.fixture(scope="module")
def state(golden):
    return golden("vae_small.safetensors")


@pytest.fixture(scope="module")
def params(state):
    return convert_vae.from_state_dict(state, CONFIG)


@pytest.fixture(scope="module")
def arrays(golden):
    return golden("vae_small.npz")


@pytest.fixture(scope="module")
def tiny():
    """Random leaves in the initialiser's shapes, without compiling the initialiser."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.1, jnp.float32), template(TINY))


# Values.


def test_encode(params, arrays):
    mean, logvar = encode(params, CONFIG, nhwc(arrays["image"]))
    close(mean, arrays["mean"], 2e-5)
    close(logvar, arrays["logvar"], 2e-5)
    # No golden log variance reaches a clamp, so these are the moments.
    close(jnp.concatenate([mean, logvar], axis=-1), arrays["moments"], 2e-5)


def test_decode(params, arrays):
    images = decode(params, CONFIG, nhwc(arrays["latent"]))
    close(images, arrays["decoded"], 5e-5)
    assert np.abs(images).max() > 1.5  # not clipped


def test_images_that_are_not_square(params, arrays):
    mean, logvar = encode(params, CONFIG, nhwc(arrays["image_odd"]))
    close(mean, arrays["mean_odd"], 2e-5)
    close(logvar, arrays["logvar_odd"], 2e-5)
    close(decode(params, CONFIG, nhwc(arrays["mean_odd"])), arrays["decoded_odd"], 5e-5)


def test_log_variance_is_clamped(tiny, arrays):
    """With a quant_conv of bias only, the log variance before the clamp is whatever we want."""
    before = nhwc(arrays["clamp_in"]).reshape(-1, TINY.embed_dim)
    expected = nhwc(arrays["clamp_logvar"]).reshape(-1, TINY.embed_dim)
    assert before.min() < -30 and before.max() > 20
    images, zeros = jnp.zeros((1, 2, 2, 3)), jnp.zeros_like(tiny["quant_conv"]["kernel"])
    for row, logvar in zip(before, expected, strict=True):
        bias = jnp.concatenate([jnp.full(TINY.embed_dim, 1e3), jnp.asarray(row)])
        got_mean, got_logvar = encode({**tiny, "quant_conv": {"kernel": zeros, "bias": bias}}, TINY, images)
        np.testing.assert_array_equal(got_mean, np.full_like(got_mean, 1e3))
        np.testing.assert_array_equal(got_logvar[0, 0, 0], logvar)


def test_sample_posterior(arrays):
    mean, logvar, noise = (nhwc(arrays[name]) for name in ("mean", "logvar", "sample_eps"))
    close(vae.sample_posterior(mean, logvar, noise), arrays["sample"], 1e-6)
    std = vae.sample_posterior(np.zeros_like(mean), nhwc(arrays["clamp_logvar"]), np.ones_like(mean))
    np.testing.assert_allclose(std, nhwc(arrays["clamp_std"]), rtol=1e-6)


@pytest.mark.parametrize(
    ("block", "path", "tap"),
    [
        (vae.attention_block, ("encoder", "mid", "attn_1"), "enc_mid_attn"),
        (vae.attention_block, ("encoder", "down", "4", "attn", "0"), "enc_down4_attn0"),
        (vae.residual_block, ("decoder", "up", "3", "block", "0"), "dec_up3_block0"),
    ],
)
def test_blocks(params, arrays, block, path, tap):
    leaf = functools.reduce(lambda tree, name: tree[name], path, params)
    close(block(leaf, nhwc(arrays[f"{tap}_in"])), arrays[f"{tap}_out"], 2e-5)


def test_downsampling_pads_right_and_bottom(params, arrays):
    encoder = params["encoder"]
    level = encoder["down"]["0"]
    x = vae.conv(encoder["conv_in"], nhwc(arrays["image"]))
    for i in ("0", "1"):
        x = vae.residual_block(level["block"][i], x)
    close(x[:, -9:, -9:, :4], arrays["enc_down0_ds_in_corner"], 2e-5)
    close(vae.conv(level["downsample"]["conv"], x, stride=2)[:, -4:, -4:, :4], arrays["enc_down0_ds_out"], 2e-5)


def test_chunks_change_nothing_but_memory(tiny):
    latents = jax.random.normal(jax.random.key(1), (9, 8, 6, TINY.embed_dim))

    def compiled(chunk):
        program = decode.lower(tiny, TINY, latents, chunk=chunk).compile()
        return program(tiny, latents), program.memory_analysis().temp_size_in_bytes

    expected, whole_bytes = compiled(None)
    assert expected.shape == (9, 16, 12, 3)
    for chunk in (2, 3):  # with and without a rest
        images, chunk_bytes = compiled(chunk)
        np.testing.assert_allclose(images, expected, rtol=0, atol=2e-6)
        assert chunk_bytes < whole_bytes / 2
    texts = {decode.lower(tiny, TINY, latents, chunk=chunk).as_text() for chunk in (None, 9, 10)}
    assert len(texts) == 1


def test_bfloat16_kernels(params, arrays):
    expected = nhwc(arrays["decoded"])
    got = decode(cast_matrices(params, jnp.bfloat16), CONFIG, nhwc(arrays["latent"]))
    assert got.dtype == jnp.float32
    error = np.sqrt(np.mean(np.square(got - expected)) / np.mean(np.square(expected)))
    # bfloat16 rounds by up to 2^-9 of a value; the lower bound shows that it was used.
    assert 1e-4 < error < 0.02


def test_bfloat16_kernels_in_the_encoder(tiny):
    images = jax.random.uniform(jax.random.key(2), (3, 8, 8, 3), minval=-1.0)
    expected = jnp.concatenate(encode(tiny, TINY, images), axis=-1)
    got = encode(cast_matrices(tiny, jnp.bfloat16), TINY, images)
    assert {part.dtype for part in got} == {jnp.dtype("float32")}
    error = jnp.sqrt(jnp.mean((jnp.concatenate(got, axis=-1) - expected) ** 2) / jnp.mean(expected**2))
    assert 1e-4 < error < 0.02


def test_estimated_scale_is_that_of_samples(tiny):
    images = jax.random.uniform(jax.random.key(2), (9, 8, 8, 3), minval=-1.0)
    scale = vae.estimate_scale(tiny, TINY, [images[:3], images[3:6], images[6:]])  # the shape is compiled already
    moments = [encode(tiny, TINY, images[start : start + 3]) for start in (0, 3, 6)]
    mean, logvar = (np.concatenate(parts) for parts in zip(*moments, strict=True))
    noise = np.random.default_rng(0).normal(size=(200, *mean.shape))
    assert scale * np.std(vae.sample_posterior(mean, logvar, noise)) == pytest.approx(1, rel=3e-3)


def test_latent_statistics():
    rng = np.random.default_rng(0)
    mean, logvar = rng.normal(2.0, 3.0, (8, 4)).astype(np.float32), rng.normal(size=(8, 4)).astype(np.float32)
    whole = vae.LatentStatistics().add(mean, logvar)
    parts = vae.LatentStatistics().add(mean[:3], logvar[:3]).add(mean[3:], logvar[3:])
    assert parts.count == whole.count == 32
    assert parts.std == pytest.approx(whole.std)
    assert whole.std == pytest.approx(np.sqrt(np.var(np.float64(mean)) + np.mean(np.exp(np.float64(logvar)))))
    with pytest.raises(ValueError, match="No latents have no standard deviation; give at least one image"):
        _ = vae.LatentStatistics().std
    with pytest.raises(ValueError, match=r"The latents have variance 0\.0, expected a positive one"):
        _ = vae.LatentStatistics().add(np.zeros(3), np.full(3, -np.inf)).std


def test_gradients_keep_bfloat16_kernels(tiny):
    def loss(params, images):
        mean, logvar = vae.encode(params, TINY, images)
        return jnp.sum(vae.decode(params, TINY, vae.sample_posterior(mean, logvar, 1.0)))

    narrow = cast_matrices(tiny, jnp.bfloat16)
    grads = jax.eval_shape(jax.grad(loss), narrow, jnp.zeros((1, 4, 4, 3)))
    for got, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(narrow), strict=True):
        assert (got.shape, got.dtype) == (leaf.shape, leaf.dtype)


def test_init():
    @jax.jit  # compiles the initialisers of what is returned only
    def some_leaves(key):
        leaves = traverse_util.flatten_dict(vae.init(TINY, key), sep="/")
        names = ("decoder/conv_in", "encoder/mid/block_1/conv1", "encoder/mid/block_2/conv1")
        kernels = [leaves[f"{name}/kernel"] for name in names]
        return kernels, {name: leaf for name, leaf in leaves.items() if not name.endswith("/kernel")}

    (conv_in, first, second), others = some_leaves(jax.random.key(0))
    bound = (9 * TINY.embed_dim) ** -0.5
    assert conv_in.shape == (3, 3, TINY.embed_dim, 32) and conv_in.dtype == jnp.float32
    assert 0.98 * bound < jnp.abs(conv_in).max() <= bound
    assert first.shape == second.shape and not jnp.array_equal(first, second)
    for name, leaf in others.items():
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf, float(name.endswith("/scale")), err_msg=name)


# Names.


def test_official_keys_and_shapes(request):
    lines = (request.path.parent / "golden" / "keys_vae_kl16.txt").read_text().splitlines()
    official = {key: ast.literal_eval(shape) for key, shape in (line.split(" ", 1) for line in lines)}
    assert torch_shapes(template(VAEConfig()), convert_vae.vae_source) == official
    assert count_params(template(VAEConfig())) == 66_456_019


def test_state_dict_round_trip(params, state):
    again = convert_vae.to_state_dict(params, CONFIG)
    assert sorted(again) == sorted(state)
    for key, array in again.items():
        assert array.dtype == np.float32 and array.flags.c_contiguous
        np.testing.assert_array_equal(array, state[key].astype(np.float32), err_msg=key)


def test_every_unfit_key_is_listed_at_once(state):
    unfit = {key: array for key, array in state.items() if key not in ("quant_conv.bias", "decoder.conv_in.weight")}
    unfit |= {"discriminator.weight": np.ones(1), "encoder.norm_out.bias": np.ones(3)}
    # Products as matrices, and a scalar: other numbers of axes than expected.
    unfit |= {"encoder.mid.attn_1.q.weight": np.ones((64, 64)), "decoder.conv_out.weight": np.float32(1)}
    with pytest.raises(ValueError, match=r"^The state dict does not fit this configuration: .*\.$") as caught:
        convert_vae.from_state_dict(unfit, CONFIG)
    for part in (
        "missing key quant_conv.bias",
        "missing key decoder.conv_in.weight",
        "unused key discriminator.weight",
        "key encoder.norm_out.bias has shape (3,), expected (64,)",
        "key encoder.mid.attn_1.q.weight has shape (64, 64), expected (64, 64, 1, 1)",
        "key decoder.conv_out.weight has shape (), expected (3, 32, 3, 3)",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("key", ["loss.logvar", "decoder.up.4.attn.0.norm.weight"])
def test_autoencoder_of_latent_diffusion(state, key):
    with pytest.raises(ValueError, match=rf"has {key}, so it is an autoencoder of latent-diffusion\. MAR's was"):
        convert_vae.from_state_dict({**state, key: np.ones(64)}, CONFIG)


def test_parameters_of_another_configuration(params):
    other = dataclasses.replace(CONFIG, ch_mult=(1, 1, 1, 2, 2))
    with pytest.raises(
        ValueError, match=r"do not fit this configuration; they differ in .*decoder/up/3/block/0/conv1/kernel"
    ):
        convert_vae.to_state_dict(params, other)


# What must be refused.


def test_unfit_arguments(tiny):
    with pytest.raises(ValueError, match=r"ch=48 must be a multiple of 32, the groups of the norms\."):
        vae.init(VAEConfig(ch=48), jax.random.key(0))
    for shape in ((2, 4, 4, 1), (4, 4, 3), (2, 5, 4, 3), (2, 4, 5, 3)):
        with pytest.raises(ValueError, match=r"images have shape \(.*\), expected \[B, H, W, 3\], .* multiples of 2\."):
            vae.encode(tiny, TINY, jnp.zeros(shape))
    with pytest.raises(ValueError, match=r"images have dtype uint8, expected floating point in \[-1, 1\]; rescale"):
        vae.encode(tiny, TINY, jnp.zeros((1, 2, 2, 3), jnp.uint8))
    for shape in ((2, 4, 4, 16), (4, 4, 4)):
        with pytest.raises(ValueError, match=r"latents have shape \(.*\), expected \[B, h, w, 4\]\."):
            vae.decode(tiny, TINY, jnp.zeros(shape))
    with pytest.raises(ValueError, match=r"chunk=0 must be a positive number of images, or None\."):
        vae.decode(tiny, TINY, jnp.zeros((1, 2, 2, 4)), chunk=0)
