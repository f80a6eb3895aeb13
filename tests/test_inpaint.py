"""Inpainting: what is known comes back bit for bit, a full mask is plain sampling, a plain re-statement agrees."""

from __future__ import annotations

import dataclasses
import functools
import importlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden_params
from test_sample import plain_sample_latents

import marjax
from marjax import codec, decode, mar, vae
from marjax.config import MARConfig, VAEConfig

sample = importlib.import_module("marjax.sample")  # the attribute of that name is the function

KEY = jax.random.key(7)
PARAMS = golden_params("tiny")
CONFIG = PARAMS.config
OPTIONS = {"num_iter": 3, "num_sampling_steps": 40, "cfg": 3.0, "temperature": 0.9, "dtype": "float32"}
LABELS = np.array([3, 1, 4, 1])
RNG = np.random.default_rng(0)
LATENTS = RNG.normal(0, 1, (4, 8, 8, 16)).astype(np.float32)

PIXELS = MARConfig(
    **{"img_size": 8, "vae_stride": 1, "patch_size": 2, "vae_embed_dim": 1, "class_num": 3, "buffer_size": 2},
    **{"encoder_embed_dim": 32, "encoder_depth": 1, "encoder_num_heads": 2, "diffloss_d": 1, "diffloss_w": 32},
    **{"decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2, "clip_denoised": True},
)
PIXEL_OPTIONS = {"num_iter": 4, "num_sampling_steps": 4, "dtype": "float32"}


@functools.cache
def pixel_model():
    return marjax.MARParams(
        mar=jax.jit(functools.partial(mar.init, PIXELS))(jax.random.key(0)), vae=None, config=PIXELS
    )


def some_masks():
    """No token, one, a half, all but one, all: [5, 8, 8]."""
    masks = np.zeros((5, 8, 8), bool)
    masks[1, 3, 4] = True
    masks[2, :4] = True
    masks[3:] = True
    masks[3, 7, 7] = False
    return masks


def test_known_latents_are_kept_and_the_others_generated():
    masks = some_masks()
    latents = np.concatenate([LATENTS, LATENTS[:1] * 2])
    labels = [3, 1, 4, 1, 5]
    got = np.asarray(marjax.inpaint_latents(PARAMS, KEY, labels, latents=latents, mask=masks, **OPTIONS))
    assert got.shape == latents.shape and got.dtype == np.float32
    np.testing.assert_array_equal(got[~masks], latents[~masks])
    assert (np.abs(got[masks] - latents[masks]).max(axis=-1) > 1e-3).all()
    # Alone, with what is masked replaced by NaN, each image is the same.
    for index in range(5):
        hidden = np.where(masks[index, ..., None], np.nan, latents[index])
        alone = marjax.inpaint_latents(
            PARAMS, KEY, labels[index : index + 1], latents=hidden, mask=masks[index], indices=[index], **OPTIONS
        )
        np.testing.assert_allclose(alone[0], got[index], rtol=0, atol=1e-3)


def test_a_full_mask_is_plain_sampling():
    mask = np.ones((8, 8), bool)
    got = marjax.inpaint_latents(PARAMS, KEY, LABELS, latents=LATENTS, mask=mask, **OPTIONS)
    np.testing.assert_allclose(got, marjax.sample_latents(PARAMS, KEY, LABELS, **OPTIONS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_known", [5, 62])
def test_loop_equals_its_plain_restatement(num_known):
    """62 of 64 tokens are known: two steps remain of the three asked for."""
    order = np.random.default_rng(3).permutation(64)
    mask = np.ones(64, bool)
    mask[order[:num_known]] = False
    got = marjax.inpaint_latents(PARAMS, KEY, [3], latents=LATENTS[0], mask=mask.reshape(8, 8), indices=[5], **OPTIONS)
    options = {
        "num_iter": min(3, 64 - num_known),
        "cfg": 3.0,
        "cfg_schedule": "linear",
        "temperature": 0.9,
        "steps": 40,
    }
    expected = plain_sample_latents(PARAMS, KEY, 3, 5, known=(codec.patchify(LATENTS[:1], 1)[0], ~mask), **options)
    np.testing.assert_allclose(got[0], expected, rtol=0, atol=1e-3)


def test_counts_of_a_bucket_share_a_program():
    """Other counts of known tokens, of the same bucket, do not compile again."""
    options, before = {**OPTIONS, "cfg": 1.0}, []
    for count in (17, 18, 24):  # one bucket of eight
        mask = (np.arange(64) >= count).reshape(8, 8)
        marjax.inpaint_latents(PARAMS, KEY, [3], latents=LATENTS[0], mask=mask, **options)
        before.append(sample._run._cache_size())
    assert len(set(before)) == 1


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_known_positions_lead_in_the_images_own_order(size, seed):
    rng = np.random.default_rng(seed)
    order, unknown = np.stack([rng.permutation(size) for _ in range(3)]), rng.random((3, size)) < 0.5
    got = np.asarray(decode.known_first(jnp.asarray(order), jnp.asarray(unknown)))
    for row, before, hidden in zip(got, order, unknown, strict=True):
        assert row.tolist() == [p for p in before if not hidden[p]] + [p for p in before if hidden[p]]


def test_known_pixels_of_a_pixel_model_come_back_bit_for_bit():
    image = RNG.integers(0, 256, (2, 8, 8, 1), dtype=np.uint8)
    mask = np.zeros((8, 8), bool)
    mask[2:5, 3:6] = True  # not on the borders of tokens
    got = np.asarray(marjax.inpaint(pixel_model(), KEY, [0, 2], image=image, mask=mask, **PIXEL_OPTIONS))
    assert got.shape == image.shape
    np.testing.assert_array_equal(got[:, ~mask], image[:, ~mask].astype(np.float32) / np.float32(255))
    assert np.abs(got[:, mask] - image[:, mask] / 255).max() > 0.05
    floats = marjax.inpaint(pixel_model(), KEY, [0, 2], image=image / np.float32(255), mask=mask, **PIXEL_OPTIONS)
    np.testing.assert_array_equal(floats, got)
    # Tokens with any masked pixel are generated: what lies under their other pixels does not matter.
    other = image.copy()
    other[:, 2:6, 2:6][:, ~mask[2:6, 2:6]] = 0
    again = np.asarray(marjax.inpaint(pixel_model(), KEY, [0, 2], image=other, mask=mask, **PIXEL_OPTIONS))
    np.testing.assert_array_equal(again[:, mask], got[:, mask])


def test_empty_and_full_masks_of_images():
    image = RNG.random((1, 8, 8, 1)).astype(np.float32)
    empty, full = np.zeros((8, 8), bool), np.ones((8, 8), bool)
    same = marjax.inpaint(pixel_model(), KEY, [1], image=image, mask=empty, **PIXEL_OPTIONS)
    np.testing.assert_array_equal(same, image)
    new = marjax.inpaint(pixel_model(), KEY, [1], image=np.full_like(image, np.nan), mask=full, **PIXEL_OPTIONS)
    np.testing.assert_allclose(new, marjax.sample(pixel_model(), KEY, [1], **PIXEL_OPTIONS), rtol=0, atol=1e-5)


def test_latent_models_keep_known_pixels_too():
    config = dataclasses.replace(CONFIG, vae=VAEConfig(ch=32, ch_mult=(1, 1, 1, 1), num_res_blocks=1))
    params = PARAMS.replace(config=config, vae=jax.jit(functools.partial(vae.init, config.vae))(jax.random.key(0)))
    image, mask = RNG.random((64, 64, 3)).astype(np.float32), np.zeros((64, 64), bool)
    mask[9:20, 30:33] = True
    got = np.asarray(marjax.inpaint(params, KEY, [0], image=image, mask=mask, **OPTIONS))[0]
    np.testing.assert_array_equal(got[~mask], image[~mask])
    assert np.abs(got[mask] - image[mask]).max() > 0.05


def test_unconditional_and_inside_a_users_jit():
    mask = some_masks()[2]
    options = {"num_iter": 3, "num_sampling_steps": 40, "dtype": "float32"}
    expected = marjax.inpaint_latents(PARAMS, KEY, None, latents=LATENTS, mask=mask, **options)
    np.testing.assert_array_equal(np.asarray(expected)[:, ~mask], LATENTS[:, ~mask])
    jitted = jax.jit(lambda latents: marjax.inpaint_latents(PARAMS, KEY, None, latents=latents, mask=mask, **options))
    np.testing.assert_allclose(jitted(LATENTS), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": np.ones((8, 8))}, "mask is float64; expected bool, True where to generate"),
        ({"mask": np.ones((7, 8), bool)}, r"mask \(7, 8\); expected \(8, 8, 1\) and \(8, 8\)"),
        ({"image": np.zeros((8, 8))}, r"image has shape \(8, 8\)"),
        ({"image": np.zeros((3, 8, 8, 1))}, r"disagree on the number of images: \[2, 3\]"),
        ({"mask": np.ones((3, 8, 8), bool)}, r"disagree on the number of images: \[2, 3\]"),
        ({"image": np.full((8, 8, 1), 2.0)}, r"image holds values from 2.0 to 2.0 outside the mask; expected \[0, 1\]"),
        ({"image": np.full((8, 8, 1), np.nan)}, "image holds values from nan to nan outside the mask"),
        ({"image": np.zeros((8, 8, 1), int)}, r"image is int64; expected uint8, or floating point in \[0, 1\]"),
        ({"image": np.zeros((0, 8, 8, 1)), "labels": None}, r"image \(0, 8, 8, 1\) and mask .* hold no image"),
        ({"image": [[0.0], [1.0, 2.0]]}, "mask and image must be arrays, or lists of equal shapes"),
        ({"indices": [0, 1, 2], "image": np.zeros((2, 8, 8, 1))}, r"labels and indices disagree .*: \[2, 3\]"),
        ({"labels": [0, 7]}, "labels holds 7; expected 0 to 2"),
        ({"num_iter": 17}, r"num_iter=17 must be an integer in \[1, 16\]"),
    ],
)
def test_bad_input_gets_one_sentence(changes, message):
    mask = np.zeros((8, 8), bool)
    mask[0] = True
    arguments = {"labels": [0, 1], "image": np.zeros((8, 8, 1)), "mask": mask, **PIXEL_OPTIONS, **changes}
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        marjax.inpaint(pixel_model(), KEY, **arguments)
    assert "\n" not in str(caught.value)


def test_what_inpainting_refuses_beside():
    mask = np.ones((8, 8), bool)
    with pytest.raises(TypeError, match="mask must not be traced"):
        jax.eval_shape(lambda m: marjax.inpaint_latents(PARAMS, KEY, [0], latents=LATENTS[0], mask=m), mask)
    nan = np.full((8, 8, 16), np.nan, np.float32)
    with pytest.raises(ValueError, match="known holds NaN or infinite values in tokens that are to be kept"):
        marjax.inpaint_latents(PARAMS, KEY, [0], latents=nan, mask=~mask, **OPTIONS)
    latent = PARAMS.replace(config=dataclasses.replace(CONFIG, vae=VAEConfig(ch_mult=(1, 1, 1, 1))))
    with pytest.raises(ValueError, match="carries no autoencoder; use inpaint_latents"):
        marjax.inpaint(latent, KEY, [0], image=np.zeros((64, 64, 3)), mask=np.ones((64, 64), bool))


def test_several_images_of_one_picture_in_batches(monkeypatch):
    """Without labels: `indices` tell how many there are to be, `batch_size` how many at once; progress counts all."""
    sizes, real = [], sample._run
    monkeypatch.setattr(sample, "_run", lambda *args: sizes.append(len(args[3].indices)) or real(*args))
    image, mask = np.full((8, 8, 1), 0.25, np.float32), np.zeros((8, 8), bool)
    mask[:4] = True
    options = {"image": image, "mask": mask, **PIXEL_OPTIONS}
    got = marjax.inpaint(pixel_model(), KEY, None, indices=[0, 1, 2], batch_size=1, **options)
    assert sizes == [1, 1, 1] and got.shape == (3, 8, 8, 1)
    assert not np.array_equal(got[0], got[1])
    np.testing.assert_array_equal(got[:, 4:], np.broadcast_to(image[4:], (3, 4, 8, 1)))

    done = []
    masks = np.stack([mask, np.zeros_like(mask), ~np.zeros_like(mask)])
    marjax.inpaint(pixel_model(), KEY, [0, 1, 2], progress=done.append, **{**options, "mask": masks})
    assert done[-1] == 3


def test_latents_that_are_pixels_are_refused():
    with pytest.raises(ValueError, match="latents are uint8; expected floating point, in the model's scale"):
        marjax.inpaint_latents(PARAMS, KEY, [0], latents=np.zeros((8, 8, 16), np.uint8), mask=np.ones((8, 8), bool))
    with pytest.raises(TypeError, match=r"mask or latents is a list with traced entries; give one array"):
        jax.eval_shape(
            lambda m: marjax.inpaint_latents(PARAMS, KEY, [0], latents=LATENTS[0], mask=[m] * 8), np.ones(8, bool)
        )
