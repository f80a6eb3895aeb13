"""Between images, latents and tokens: scales, memory and dtypes. (Parity of patchify is tested with the model.)"""

from __future__ import annotations

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY_VAE, random_vae

from marjax import codec
from marjax.config import get_preset
from marjax.types import MARParams

CONFIG = dataclasses.replace(
    get_preset("tiny"), img_size=16, vae_stride=2, patch_size=2, vae_embed_dim=4, class_num=3, vae=TINY_VAE
)
sampling = importlib.import_module("marjax.sample")  # the package's attribute of that name is the function


def test_moments_to_tokens():
    rng = np.random.default_rng(0)
    mean, logvar, noise = rng.normal(size=(3, 2, 8, 8, 4)).astype(np.float16)
    tokens = codec.moments_to_tokens(CONFIG, jnp.asarray(np.concatenate([mean, logvar], axis=-1)), noise)
    assert tokens.shape == (2, 16, 16) and tokens.dtype == jnp.float32
    latents = mean + np.exp(0.5 * np.float32(logvar)) * noise
    np.testing.assert_allclose(codec.unpatchify(tokens, 2), latents * 0.5, rtol=1e-5, atol=1e-6)


def test_decoding_a_large_batch_takes_the_memory_of_a_small_one():
    def working_memory(count):
        latents = jax.ShapeDtypeStruct((count, 8, 8, 4), jnp.float32)
        program = codec.latents_to_images.lower(CONFIG, random_vae(), latents).compile()
        return program.memory_analysis().temp_size_in_bytes

    image = 16 * 16 * 3 * 4
    small, large = working_memory(2 * codec.VAE_CHUNK), working_memory(8 * codec.VAE_CHUNK)
    assert large - small < 6 * codec.VAE_CHUNK * 2.5 * image, "what grows is the images themselves"
    assert small > codec.VAE_CHUNK * 10 * image, "which is little beside the activations of a chunk"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling_decodes_in_its_dtype(dtype, monkeypatch):
    """The autoencoder's products are in the compute dtype that was asked for, whatever the weights are stored in."""
    latents, seen = jnp.ones((1, 8, 8, 4)), []

    def decode(config, params, latents):
        seen.append({leaf.dtype.name for leaf in jax.tree.leaves(params)})
        return latents

    monkeypatch.setattr(sampling, "sample_latents", lambda *arguments, **options: latents)
    monkeypatch.setattr(codec, "latents_to_images", decode)
    params = MARParams(mar={}, vae=random_vae(), config=CONFIG)
    assert sampling.sample(params, jax.random.key(0), [0], dtype=dtype) is latents
    assert seen == [{"float32", dtype}]
