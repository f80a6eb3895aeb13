"""What XLA's CPU backend needs to be told, each thing measured; on other backends all of this does nothing.

from_stack  a layer of depth-stacked weights, without a float32 copy of the whole stack
map_rows    a function of independent rows, a few at a time, so that its temporaries stay in the cache
row_major   an operand in the memory layout that fast bfloat16 products want
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from marjax.types import Array, PyTree

CACHE_BYTES = 12 * 2**20  # of temporaries that `map_rows` allows at once


def to_bits(x: Array) -> Array:
    """Bfloat16 as uint16, bit for bit; anything else as it is.

    XLA on CPU slices and updates an array of bfloat16 by converting all of it to float32, but not one of integers.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: Array) -> Array:
    """The inverse of `to_bits`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def from_stack(stack: PyTree, index: int | Array) -> PyTree:
    """Entry `index` of every leaf's first axis."""
    return jax.tree.map(lambda leaf: _entry(leaf, index), stack)


@jax.custom_vjp
def _entry(leaf: Array, index: int | Array) -> Array:
    def plain(leaf: Array, index: Array) -> Array:
        return lax.dynamic_index_in_dim(leaf, index, keepdims=False)

    def as_bits(leaf: Array, index: Array) -> Array:
        # The barrier keeps the bits of the whole stack from being computed, and kept, outside the loop over layers.
        leaf, index = lax.optimization_barrier((leaf, index))
        return from_bits(plain(to_bits(leaf), index))

    if leaf.dtype != jnp.bfloat16:
        return plain(leaf, index)
    return lax.platform_dependent(leaf, jnp.asarray(index), cpu=as_bits, default=plain)


def _entry_forward(leaf: Array, index: int | Array) -> tuple[Array, tuple[Array, int | Array]]:
    return _entry(leaf, index), (jnp.zeros_like(leaf), index)


def _entry_backward(residuals: tuple[Array, int | Array], cotangent: Array) -> tuple[Array, None]:
    zeros, index = residuals
    return lax.dynamic_update_index_in_dim(zeros, cotangent, index, 0), None


_entry.defvjp(_entry_forward, _entry_backward)


def map_rows(f: Callable[..., PyTree], *arrays: PyTree, row_bytes: int) -> PyTree:
    """`f(*arrays)`, computed for a few rows at a time.

    Args:
        f: maps arrays of r rows to arrays of r rows, each row by itself.
        *arrays: trees of arrays [R, ...].
        row_bytes: size of the largest temporaries of a row.
    """
    rows = jax.tree.leaves(arrays)[0].shape[0]
    most = max(1, CACHE_BYTES // row_bytes)
    at_once = max(count for count in range(1, rows + 1) if rows % count == 0 and count <= most)
    if at_once == rows:
        return f(*arrays)

    def split(x: Array) -> Array:
        return x.reshape(rows // at_once, at_once, *x.shape[1:])

    def in_turn(*arrays: PyTree) -> PyTree:
        out = lax.map(lambda few: f(*few), jax.tree.map(split, arrays))
        return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), out)

    return lax.platform_dependent(*arrays, cpu=in_turn, default=f)


def row_major(x: Array) -> Array:
    """X, copied into row-major order where its layout would make a bfloat16 product slow."""
    if x.dtype == jnp.float32:
        return x
    layout = Layout(tuple(np.arange(x.ndim).tolist()))
    return lax.platform_dependent(x, cpu=lambda y: with_layout_constraint(y, layout), default=lambda y: y)
