"""Matrix products: operands in their own dtype, float32 accumulation, and a backward pass that stays on fast paths.

XLA's CPU backend runs a bfloat16 product at full speed only where both operands lie row-major and the left one
contracts its last axis [measured: 170 GFLOP/s a core against 80 for the transposed forms, which fall back to
float32]. Autodiff asks for exactly the transposed forms, so the backward pass here transposes operands in memory
first. In float32, and on other backends, transposed operands cost nothing and are left alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from marjax.cpu import row_major
from marjax.types import Array


@jax.custom_vjp
def matmul(a: Array, b: Array) -> Array:
    """[..., M, K] times [..., K, N] -> [..., M, N] float32; leading axes are equal (batched) or absent from `b`.

    The cotangents are rounded to the operands' dtype before the backward products, which accumulate in float32.
    """
    return _product(a, b)


def transposed(x: Array) -> Array:
    """Swaps the last two axes; a copy in memory where products of transposed operands would be slow."""
    return _transposed(x)


def _forward(a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(a, b), (a, b)


def _backward(operands: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    a, b = operands
    g = g.astype(a.dtype)
    if b.ndim == 2:  # rows of all leading axes are one long axis
        a, g_rows = a.reshape(-1, a.shape[-1]), g.reshape(-1, g.shape[-1])
        grad_a = _product(g_rows, _transposed(b)).reshape(operands[0].shape)
        grad_b = _product(_transposed(a), g_rows)
    else:
        grad_a = _product(g, _transposed(b))
        grad_b = _product(_transposed(a), g)
    return grad_a.astype(a.dtype), grad_b.astype(b.dtype)


matmul.defvjp(_forward, _backward)


def _product(a: Array, b: Array) -> Array:
    batch = tuple(range(b.ndim - 2))
    dimensions = (((a.ndim - 1,), (b.ndim - 2,)), (batch, batch))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _transposed(x: Array) -> Array:
    return row_major(jnp.swapaxes(x, -1, -2))


_transposed.defvjp(lambda x: (_transposed(x), None), lambda _, g: (_transposed(g),))
