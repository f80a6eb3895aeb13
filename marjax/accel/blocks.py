"""Transformer layers for policies that keep keys and values between decode steps.

A cache is updated in place, one layer at a time, and never copied whole: it is carried through the scan over layers,
and all updates are slices.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from marjax.accel.base import StepInput
from marjax.cpu import from_bits, from_stack, to_bits
from marjax.kernels.two_path_attention import two_path_attention
from marjax.layers import Block, attention
from marjax.mar import run_layer
from marjax.types import Array, PyTree


def write(cache: Array, new: Array, start: tuple[int | Array, ...]) -> Array:
    """The cache with `new` at `start`, which has one entry per leading axis; the other axes are whole.

    Raises:
        ValueError: if `new` has another dtype, or does not fit.
    """
    start = tuple(jnp.asarray(index, jnp.int32) for index in (*start, *(0,) * (cache.ndim - len(start))))
    if new.dtype != cache.dtype or new.ndim != cache.ndim or not np.all(np.less_equal(new.shape, cache.shape)):
        raise ValueError(f"{new.dtype}{new.shape} does not fit into a cache of {cache.dtype}{cache.shape}.")
    return lax.dynamic_update_slice(cache, new, start)


@struct.dataclass
class KeysValues:
    """Keys and values of some layers.

    Attributes:
        k: [L', R, M, H, Dh] in the compute dtype; bfloat16 as uint16, bit for bit.
        v: the same.
    """

    k: Array
    v: Array

    @classmethod
    def empty(cls, layers: int, rows: int, positions: int, num_heads: int, dim: int, dtype: jnp.dtype) -> KeysValues:
        """Zeros; `dtype` is the compute dtype."""
        zeros = to_bits(jnp.zeros((layers, rows, positions, num_heads, dim // num_heads), dtype))
        return cls(k=zeros, v=zeros)

    def layer(self, number: Array) -> tuple[Array, Array]:
        """Keys and values [R, M, H, Dh] of one layer."""
        k, v = (from_bits(lax.dynamic_index_in_dim(leaf, number, keepdims=False)) for leaf in (self.k, self.v))
        return k, v

    def write(self, number: Array, k: Array, v: Array, start: int | Array = 0) -> KeysValues:
        """The cache with keys and values [R', M', H, Dh] of a layer put in at positions from `start` on.

        Args:
            number: the layer.
            k: of R' >= R rows; only the first R are kept.
            v: the same.
            start: first position.
        """
        rows = self.k.shape[1]
        k, v = (write(old, to_bits(new[None, :rows]), (number, 0, start)) for old, new in ((self.k, k), (self.v, v)))
        return KeysValues(k=k, v=v)


def block(stack: PyTree, num_heads: int, index: int | Array) -> Block:
    """One layer of a depth-stacked tree, whose parts can be called."""
    params = from_stack(stack, index)
    dim, hidden = params["fc1"]["kernel"].shape
    return Block(dim, num_heads, hidden).bind({"params": params})


def run(
    stack: PyTree,
    x: Array,
    cache: KeysValues,
    *,
    num_heads: int,
    start: int,
    key_mask: Array | None = None,
    outputs: Array | None = None,
) -> tuple[Array, KeysValues]:
    """Layers from `start` on over all of x, renewing the cache.

    Args:
        stack: block parameters, each leaf [L, ...].
        x: [R, M, E]; the cache has room for M positions and R or fewer rows, the first of which it keeps.
        cache: of layers [start, L).
        num_heads: attention heads.
        start: first layer.
        key_mask: [R or 1, M], True where a position may be attended; None: everywhere.
        outputs: positions [m] whose output is wanted; None: all.

    Returns:
        [R, M or m, E], and the cache.
    """

    def one(carry: tuple[Array, KeysValues], number: int | Array, outputs: Array | None = None):
        x, cache = carry
        params = from_stack(stack, start + number)
        x, (_, k, v) = run_layer(params, x, num_heads=num_heads, key_mask=key_mask, outputs=outputs)
        return (x, cache.write(number, k, v)), None

    depth = cache.k.shape[0]
    if outputs is None:
        return lax.scan(one, (x, cache), jnp.arange(depth))[0]
    carry, _ = lax.scan(one, (x, cache), jnp.arange(depth - 1))
    return one(carry, depth - 1, outputs)[0]


@struct.dataclass
class Active:
    """A choice among N positions: at most A, since each step has its own count and the arrays one size.

    Attributes:
        index: [R, A] positions, all different.
        valid: [R, A], True for those that are chosen, False for what fills up the array.
        chosen: [R, N], True for the positions that are chosen.
        place: [R, N] where in `index` they are.
    """

    index: Array
    valid: Array
    chosen: Array
    place: Array

    @classmethod
    def of(cls, index: Array, valid: Array, positions: int) -> Active:
        """From distinct positions [R, A]."""
        same = (index[:, None, :] == jnp.arange(positions)[:, None]) & valid[:, None, :]
        return cls(index=index, valid=valid, chosen=jnp.any(same, axis=-1), place=jnp.argmax(same, axis=-1))

    def gather(self, x: Array) -> Array:
        """Rows [R, A, E] of x [R, N, E]."""
        return jnp.take_along_axis(x, self.index[..., None], axis=1)

    def put(self, x: Array, rows: Array) -> Array:
        """X [R, N, ...] with the chosen positions replaced by their rows [R, A, ...]."""
        trailing = (...,) + (None,) * (x.ndim - 2)
        return jnp.where(self.chosen[trailing], jnp.take_along_axis(rows, self.place[trailing], axis=1), x)


def choose(score: Array, step: StepInput, *, generating: bool = True, caching: bool = True) -> Active:
    """The step's `num_active` positions of the highest score, tokens predicted now and in the step before first.

    Args:
        score: [R, N] float32.
        step: the decode step.
        generating: put the tokens predicted now first.
        caching: put those predicted in the step before first.
    """
    config, rows = step.config, step.rows
    token = jnp.arange(score.shape[1]) - config.buffer_size
    first = rows.num_known - (rows.num_previous if caching else 0)
    last = rows.num_known + (rows.num_predicted if generating else 0)
    forced = (token >= first) & (token < last) & (token >= 0)
    score = jnp.where(forced, jnp.inf, score)
    _, index = lax.top_k(score, step.segment.active)
    valid = jnp.broadcast_to(jnp.arange(step.segment.active) < rows.num_active, index.shape)
    return Active.of(index, valid, score.shape[1])


def run_active(
    stack: PyTree,
    x: Array,
    active: Active,
    cache: KeysValues,
    *,
    num_heads: int,
    start: int,
    two_path: bool,
    every_mlp: bool = False,
) -> tuple[Array, KeysValues]:
    """Layers over the active rows; everything else lends its cached keys and values.

    Args:
        stack: block parameters, each leaf [L, ...].
        x: [R, A, E] active rows; with `every_mlp` all rows [R, N, E].
        active: which positions the active ones are.
        cache: of layers [start, L), over all positions.
        num_heads: attention heads.
        start: first layer.
        two_path: attend to fresh and to cached keys apart, instead of to the renewed cache; the result is the same.
        every_mlp: run the MLPs on all rows, those of inactive positions on a stream without attention.

    Returns:
        x after the layers, and the cache with the active positions' fresh keys and values.
    """

    def one(carry: tuple[Array, KeysValues], number: Array) -> tuple[tuple[Array, KeysValues], None]:
        x, cache = carry
        layer = block(stack, num_heads, start + number)
        rows = active.gather(x) if every_mlp else x
        q, k, v = layer.project_qkv(rows)
        # Written first, then read: the other way round XLA would copy the whole cache.
        old = cache.layer(number)
        renewed = (from_bits(active.put(to_bits(a), to_bits(b))) for a, b in zip(old, (k, v), strict=True))
        cache = cache.write(number, *renewed)
        lent = cache.layer(number)
        if two_path:
            attended = two_path_attention(q, k, v, *lent, fresh_mask=active.valid, cached_mask=~active.chosen)
        else:
            attended = attention(q, *lent)
        rows = layer.add_attention(rows, attended)
        return (layer.add_mlp(active.put(x, rows) if every_mlp else rows), cache), None

    return lax.scan(one, (x, cache), jnp.arange(cache.k.shape[0]))[0]
