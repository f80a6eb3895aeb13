"""Two-path attention: what every implementation must do, on random inputs of many shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marjax.kernels.two_path_attention import two_path_attention


def dense(q, k_fresh, v_fresh, k_cached, v_cached, fresh_mask, cached_mask):
    """One softmax over all usable keys, in float64; zeros for a query without any."""
    q, *rest = (np.asarray(part, np.float64) for part in (q, k_fresh, v_fresh, k_cached, v_cached))
    k, v = np.concatenate([rest[0], rest[2]], axis=1), np.concatenate([rest[1], rest[3]], axis=1)
    mask = np.concatenate([fresh_mask, cached_mask], axis=1)[:, None, None, :]
    scores = np.where(mask, np.einsum("rmhd,rnhd->rhmn", q, k), -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = np.nan_to_num(weights / weights.sum(axis=-1, keepdims=True))
    out = np.einsum("rhmn,rnhd->rmhd", weights, v)
    return out.reshape(*out.shape[:2], -1)


def random_inputs(seed, rows, queries, fresh, cached, heads, width, scale=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = [(rows, queries), *[(rows, fresh)] * 2, *[(rows, cached)] * 2]
    q, k_f, v_f, k_c, v_c = (rng.normal(size=(*shape, heads, width)).astype(dtype) for shape in shapes)
    masks = [rng.random((rows, count)) < 0.7 for count in (fresh, cached)]
    return q * dtype(scale), k_f, v_f, k_c, v_c, *masks


@jax.jit
def run(q, k_f, v_f, k_c, v_c, fresh_mask, cached_mask):
    return two_path_attention(q, k_f, v_f, k_c, v_c, fresh_mask=fresh_mask, cached_mask=cached_mask)


@settings(max_examples=20)
@given(
    st.integers(0, 99), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(1, 20), st.integers(1, 4)
)
def test_equals_one_softmax(seed, rows, queries, fresh, cached, heads):
    inputs = random_inputs(seed, rows, queries, fresh, cached, heads, 8)
    np.testing.assert_allclose(run(*inputs), dense(*inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_large_scores(scale):
    inputs = random_inputs(0, 2, 5, 7, 11, 2, 16, scale)
    got = run(*inputs)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, dense(*inputs), rtol=0, atol=1e-4)


def test_parts_without_keys():
    q, k_f, v_f, k_c, v_c, fresh_mask, cached_mask = random_inputs(1, 3, 4, 5, 6, 2, 8)
    none, some = np.zeros_like(fresh_mask), np.ones_like(cached_mask)
    for masks in ((none, some), (~none, ~some), (none, ~some)):
        got = run(q, k_f, v_f, k_c, v_c, *masks)
        np.testing.assert_allclose(got, dense(q, k_f, v_f, k_c, v_c, *masks), rtol=0, atol=2e-6)
    assert not np.any(run(q, k_f, v_f, k_c, v_c, none, ~some))
    empty = k_c[:, :0], v_c[:, :0], some[:, :0]
    got = run(q, k_f, v_f, *empty[:2], ~none, empty[2])
    np.testing.assert_allclose(got, dense(q, k_f, v_f, *empty[:2], ~none, empty[2]), rtol=0, atol=2e-6)


def test_without_masks_everything_is_used():
    q, k_f, v_f, k_c, v_c, fresh_mask, cached_mask = random_inputs(2, 1, 3, 4, 5, 1, 8)
    everything = np.ones_like(fresh_mask), np.ones_like(cached_mask)
    np.testing.assert_array_equal(two_path_attention(q, k_f, v_f, k_c, v_c), run(q, k_f, v_f, k_c, v_c, *everything))


def test_values_behind_a_mask_do_not_matter():
    q, k_f, v_f, k_c, v_c, fresh_mask, cached_mask = random_inputs(3, 2, 3, 4, 5, 2, 8)
    other = np.where(cached_mask[..., None, None], k_c, 77.0), np.where(cached_mask[..., None, None], v_c, -5.0)
    expected = run(q, k_f, v_f, k_c, v_c, fresh_mask, cached_mask)
    np.testing.assert_array_equal(run(q, k_f, v_f, *other, fresh_mask, cached_mask), expected)


def test_bfloat16_accumulates_in_float32():
    inputs = random_inputs(4, 2, 6, 8, 40, 2, 32)
    narrow = [jnp.asarray(part, jnp.bfloat16) for part in inputs[:5]]
    got = run(*narrow, *inputs[5:])
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, dense(*narrow, *inputs[5:]), rtol=0, atol=2e-2)
