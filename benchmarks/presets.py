"""Models for benchmarks: presets with random weights, which take as long as trained ones, and the shipped model."""

from __future__ import annotations

import jax

import marjax
from marjax import mar, vae
from marjax.config import MARConfig
from marjax.types import DTYPES, MARParams, cast_matrices


def load_model(name: str, *, with_vae: bool = False) -> MARParams:
    """A preset with random weights, or a model that `marjax.load` knows; the shipped model has real weights.

    Args:
        name: the preset or model.
        with_vae: give a preset an autoencoder too, if it is of latents.

    Raises:
        ValueError, OSError: as `marjax.load`.
    """
    if name in marjax.PRESETS and name != "fashion_mnist":
        return random_model(marjax.get_preset(name), with_vae=with_vae)
    return marjax.load(name)


def random_model(config: MARConfig, *, with_vae: bool = False, dtype: str = "float32") -> MARParams:
    """Random weights, the large matrices in `dtype`."""

    def init(key: jax.Array):
        tree = mar.init(config, key)
        # Fresh adaLN and output layers are zero, which would make the head's products trivial.
        tree = jax.tree.map(lambda leaf: leaf + 0.01 * jax.random.normal(jax.random.key(1), leaf.shape), tree)
        return cast_matrices(tree, DTYPES[dtype])

    wanted = with_vae and config.vae is not None
    decoder = jax.jit(lambda key: vae.init(config.vae, key))(jax.random.key(2)) if wanted else None
    return MARParams(mar=jax.jit(init)(jax.random.key(0)), vae=decoder, config=config)
