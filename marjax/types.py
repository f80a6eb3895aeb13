"""Dimension glossary, array aliases, and `MARParams`, the one object that carries a model.

Dimensions, used in annotations and as suffixes of local names:

    B  images in a batch              S  image tokens per image (sequence length)
    D  values per token               E  transformer width
    N  positions = buffer + S         H  heads;  Dh  width of a head
    T  diffusion steps                W  width of the diffusion head
    P  tokens predicted in one step   K  known tokens an encoder body has room for
    L  layers of a stack

Sequences are in generation order (see `marjax/decode.py`) unless a name says "image order".
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from marjax.config import MARConfig

Array = jax.Array
PyTree = Any

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}  # compute dtypes by name


@struct.dataclass
class MARParams:
    """A model: array subtrees and the static configuration that gives them meaning.

    A pytree: it passes through `jax.jit`, `jax.device_put`, `jax.tree.map` and orbax. `config` is static (hashable),
    so two models of one configuration share compiled programs.

    Attributes:
        mar: parameters of encoder, decoder and diffusion head; depth-stacked (each block leaf has a leading L axis).
            None for an autoencoder alone, of whose configuration only `vae` and what follows from it mean anything.
        vae: parameters of the autoencoder; None for pixel-space models and for latent models without their VAE.
        config: the model's configuration.
    """

    mar: PyTree
    vae: PyTree
    config: MARConfig = struct.field(pytree_node=False)


def cast_matrices(params: PyTree, dtype: jnp.dtype) -> PyTree:
    """Casts matrix-product operands (leaves named `kernel`) to `dtype`; every other leaf becomes float32.

    The layers compute each product in the dtype of its kernel with float32 accumulation, so this one cast is how a
    compute dtype is chosen.
    """

    def cast(path, leaf):
        name = path[-1].key
        return leaf.astype(dtype if name == "kernel" else jnp.float32)

    return jax.tree_util.tree_map_with_path(cast, params)


def count_params(params: PyTree) -> int:
    """Number of scalars in a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
