"""The key table between the reference's autoencoder and our `vae` tree, complete in both directions.

Our paths are the reference's: `encoder/mid/attn_1/q/kernel` is `encoder.mid.attn_1.q.weight`. Convolutions change
layout, from torch's [out, in, height, width] to [height, width, in, out].
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from marjax import vae
from marjax.config import VAEConfig
from marjax.convert import SAME, Source, Transform, fill, spread
from marjax.types import PyTree

CONV = Transform(lambda array: array.transpose(2, 3, 1, 0), lambda array: array.transpose(3, 2, 0, 1))

_LEAVES = {"kernel": ("weight", CONV), "scale": ("weight", SAME), "bias": ("bias", SAME)}
# Keys that the autoencoders of latent-diffusion have and ours never has.
_LATENT_DIFFUSION = re.compile(r"loss\.|decoder\.up\.\d+\.attn\.")


def vae_source(path: str, shape: tuple[int, ...]) -> Source:
    """The table of the `vae` tree.

    Args:
        path: slash-separated path of a leaf.
        shape: its shape; no leaf of this tree is stacked, so it does not matter.
    """
    module, leaf = path.rsplit("/", 1)
    name, transform = _LEAVES[leaf]
    return Source((f"{module.replace('/', '.')}.{name}",), transform)


def refuse_latent_diffusion(keys: Iterable[str]) -> None:
    """Refuses the keys of an autoencoder of latent-diffusion.

    Raises:
        ValueError: if they are; the message gives the reason.
    """
    if foreign := next((key for key in keys if _LATENT_DIFFUSION.match(key)), None):
        raise ValueError(
            f"The state dict has {foreign}, so it is an autoencoder of latent-diffusion. MAR's was trained anew and "
            "its latents have other statistics; use the kl16.ckpt that belongs to the MAR weights."
        )


@functools.lru_cache(maxsize=16)
def vae_template(config: VAEConfig) -> PyTree:
    """The `vae` tree of a configuration, with `jax.ShapeDtypeStruct` for leaves."""
    return jax.eval_shape(lambda key: vae.init(config, key), jax.random.key(0))


def from_state_dict(state: Mapping[str, np.ndarray], config: VAEConfig, dtype: str = "float32") -> PyTree:
    """Builds the `vae` tree from the state dict of a reference autoencoder.

    Args:
        state: torch key -> array (float32, float16 or bfloat16).
        config: the configuration the weights belong to.
        dtype: of the kernels, "float32" or "bfloat16"; every other leaf is float32.

    Raises:
        ValueError: if it is an autoencoder of latent-diffusion; or if a key is unused, a leaf unfilled, or a shape
            wrong, all of them in one message.
    """
    refuse_latent_diffusion(state)
    return jax.tree.map(jnp.asarray, fill(vae_template(config), state, vae_source, dtype))


def to_state_dict(params: PyTree, config: VAEConfig) -> dict[str, np.ndarray]:
    """The reference's state dict of these parameters: torch key -> float32 array.

    Args:
        params: a `vae` tree.
        config: the configuration they belong to.

    Raises:
        ValueError: if the tree is not the one `config` calls for.
    """
    got, expected = _shapes(params), _shapes(vae_template(config))
    if wrong := sorted({name for name, _ in got.items() ^ expected.items()}):
        raise ValueError(f"The parameters do not fit this configuration; they differ in {', '.join(wrong)}.")
    return spread(params, vae_source)


def _shapes(params: PyTree) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in traverse_util.flatten_dict(params, sep="/").items()}
