"""Attention of a few active positions over fresh and cached keys, without putting the two together.

A policy that recomputes the keys and values of an active set A only attends to two arrays: its own fresh ones, and the
cache, in which the entries of A are stale and must not be used. The two softmax parts are merged by their maxima and
sums (the online softmax of FlashAttention, arXiv 2205.14135; MARché, arXiv 2506.12035, calls it two-path attention):

    m = max(m_A, m_C);   out = (e^(m_A - m) acc_A + e^(m_C - m) acc_C) / (e^(m_A - m) l_A + e^(m_C - m) l_C)

which is one softmax over all usable keys.
"""

from __future__ import annotations

import jax.numpy as jnp

from marjax.layers import softmax_part
from marjax.types import Array


def two_path_attention(
    q: Array,
    k_fresh: Array,
    v_fresh: Array,
    k_cached: Array,
    v_cached: Array,
    *,
    fresh_mask: Array | None = None,
    cached_mask: Array | None = None,
) -> Array:
    """Attention over fresh and cached keys; a query that may attend to nothing gives zeros.

    Args:
        q: [R, M, H, Dh] queries, already scaled by Dh^-0.5.
        k_fresh: [R, A, H, Dh] keys of the active set.
        v_fresh: [R, A, H, Dh] its values.
        k_cached: [R, N, H, Dh] cached keys.
        v_cached: [R, N, H, Dh] cached values.
        fresh_mask: [R, A], True where a fresh key may be attended; None: everywhere.
        cached_mask: [R, N], True where a cached key may be attended, so False at active positions; None: everywhere.

    Returns:
        [R, M, H * Dh] float32.
    """
    top_a, sum_a, out_a = softmax_part(q, k_fresh, v_fresh, fresh_mask)
    top_c, sum_c, out_c = softmax_part(q, k_cached, v_cached, cached_mask)
    top = jnp.maximum(top_a, top_c)
    weight_a, weight_c = _decay(top_a, top), _decay(top_c, top)
    total = weight_a * sum_a + weight_c * sum_c
    out = (weight_a * out_a + weight_c * out_c) / jnp.where(total > 0, total, 1.0)
    out = jnp.swapaxes(out, 1, 2)
    return out.reshape(*out.shape[:2], -1)


def _decay(top: Array, new_top: Array) -> Array:
    """e^(top - new_top); 0 for a part without any key."""
    return jnp.where(jnp.isfinite(top), jnp.exp(top - jnp.where(jnp.isfinite(new_top), new_top, 0.0)), 0.0)
