"""A tiny model, the options that go with it, and files to read and write."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from marjax import mar
from marjax.config import MARConfig
from marjax.types import MARParams

ROOT = Path(__file__).parents[2]
NAMES = ("sneaker", "bag", "ankle boot")
SIZES = {"encoder_embed_dim": 32, "encoder_depth": 1, "encoder_num_heads": 2, "buffer_size": 2, "diffloss_d": 1}
SIZES |= {"decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2, "diffloss_w": 16}
TINY = MARConfig(
    **{"img_size": 8, "vae_stride": 1, "vae_embed_dim": 1, "patch_size": 2, "class_num": 3, "class_names": NAMES},
    **{"num_sampling_steps": "4", "clip_denoised": True},
    **SIZES,
)
# One compiled program for every test that really samples.
FAST = ("--num-iter", "1", "--batch-size", "2")
FAST_OPTIONS = {"num_iter": 1, "batch_size": 2}


@functools.cache
def random_model(config):
    """Weights drawn without compiling anything."""
    shapes, rng = jax.eval_shape(functools.partial(mar.init, config), jax.random.key(0)), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.1, leaf.shape), leaf.dtype), shapes)
    return MARParams(mar=params, vae=None, config=config)


def read(path):
    with Image.open(path) as image:
        return np.asarray(image)
