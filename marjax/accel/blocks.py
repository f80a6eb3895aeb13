"""Transformer layers for policies that keep keys and values between decode steps.

A cache of L' layers is [L', R, N, H, Dh], in the compute dtype. All writes go through `write`, which checks what fits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from marjax.accel.base import StepInput
from marjax.kernels.two_path_attention import two_path_attention
from marjax.layers import Block, attention
from marjax.types import Array, PyTree


@struct.dataclass
class KeysValues:
    """Keys and values of some layers: each [L', R, M, H, Dh]."""

    k: Array
    v: Array


def empty(layers: int, rows: int, positions: int, num_heads: int, dim: int, dtype: jnp.dtype) -> KeysValues:
    """A cache of zeros."""
    shape = (layers, rows, positions, num_heads, dim // num_heads)
    return KeysValues(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def write(cache: Array, new: Array, start: tuple[int | Array, ...]) -> Array:
    """The cache with `new` at `start`, which has one entry per leading axis; the other axes are whole.

    Raises:
        ValueError: if `new` has another dtype, or does not fit.
    """
    start = (*start, *(0,) * (cache.ndim - len(start)))
    if new.dtype != cache.dtype or new.ndim != cache.ndim or not np.all(np.less_equal(new.shape, cache.shape)):
        raise ValueError(f"{new.dtype}{new.shape} does not fit into a cache of {cache.dtype}{cache.shape}.")
    return lax.dynamic_update_slice(cache, new, start)


def block(stack: PyTree, num_heads: int, index: int | Array) -> Block:
    """One layer of a depth-stacked tree, whose parts can be called."""
    # Indexing the whole stack: a slice of it would be copied.
    params = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), stack)
    dim, hidden = params["fc1"]["kernel"].shape
    return Block(dim, num_heads, hidden).bind({"params": params})


def run(
    stack: PyTree, x: Array, *, num_heads: int, start: int, stop: int, key_mask: Array | None = None
) -> tuple[Array, KeysValues]:
    """Layers [start, stop) over x [R, M, E], and the keys and values of each."""

    def one(x: Array, index: Array) -> tuple[Array, KeysValues]:
        layer = block(stack, num_heads, index)
        q, k, v = layer.project_qkv(x)
        return layer.add_mlp(layer.add_attention(x, attention(q, k, v, key_mask))), KeysValues(k=k, v=v)

    return lax.scan(one, x, jnp.arange(start, stop))


@struct.dataclass
class Active:
    """A choice of positions, [R, A] each.

    Attributes:
        index: positions; entries that are not valid are among them too, and mean nothing.
        valid: True for the positions that are chosen.
    """

    index: Array
    valid: Array

    def gather(self, x: Array) -> Array:
        """Rows [R, A, E] of x [R, N, E]."""
        return jnp.take_along_axis(x, self.index[..., None], axis=1)

    def target(self, positions: int) -> tuple[Array, Array]:
        """Where to scatter rows: indices [R, 1] and [R, A], out of range for entries that are not valid."""
        return jnp.arange(self.index.shape[0])[:, None], jnp.where(self.valid, self.index, positions)

    def scatter(self, x: Array, rows: Array) -> Array:
        """X [R, N, E] with the valid rows [R, A, E] put in their places."""
        return x.at[self.target(x.shape[1])].set(rows, mode="drop")

    def outside(self, positions: int) -> Array:
        """[R, N] True at the positions that are not chosen."""
        everywhere = jnp.ones((self.index.shape[0], positions), bool)
        return everywhere.at[self.target(positions)].set(False, mode="drop")

    def chosen(self, positions: int, step: StepInput) -> Array | None:
        """[R, N] True at the positions that are chosen, if anybody wants to know."""
        return ~self.outside(positions) if step.trace else None


def run_active(
    stack: PyTree, x: Array, active: Active, cache: KeysValues, *, num_heads: int, start: int
) -> tuple[Array, KeysValues]:
    """Layers [start, L) over the active rows only; everything else lends its cached keys and values.

    Args:
        stack: block parameters, each leaf [L, ...].
        x: [R, A, E] active rows.
        active: which positions they are.
        cache: of layers [start, L), over all positions.
        num_heads: attention heads.
        start: first layer.

    Returns:
        [R, A, E], and the cache with the active positions' fresh keys and values.
    """
    positions = cache.k.shape[2]
    usable, (rows, index) = active.outside(positions), active.target(positions)

    def one(carry: tuple[Array, KeysValues], number: Array) -> tuple[tuple[Array, KeysValues], None]:
        x, cache = carry
        layer = block(stack, num_heads, start + number)
        q, k, v = layer.project_qkv(x)
        old = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, number, keepdims=False), cache)
        attended = two_path_attention(q, k, v, old.k, old.v, fresh_mask=active.valid, cached_mask=usable)
        x = layer.add_mlp(layer.add_attention(x, attended))
        fresh = KeysValues(k=k, v=v)
        cache = jax.tree.map(lambda leaf, new: leaf.at[number, rows, index].set(new, mode="drop"), cache, fresh)
        return (x, cache), None

    return lax.scan(one, (x, cache), jnp.arange(cache.k.shape[0]))[0]
