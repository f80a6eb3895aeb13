"""What the CPU backend is told changes speed and memory, and no result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marjax import cpu, products

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what is compiled for the CPU")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_entry_of_a_stack_is_that_entry_and_has_its_gradient(dtype):
    stack = {"a": jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 4)), dtype), "b": jnp.ones((5, 2), dtype)}
    got = jax.jit(lambda stack: jax.lax.map(lambda index: cpu.from_stack(stack, index), jnp.arange(5)))(stack)
    jax.tree.map(np.testing.assert_array_equal, got, stack)
    value, grad = jax.jit(jax.value_and_grad(lambda stack: jnp.sum(jnp.float32(cpu.from_stack(stack, 3)["a"]) ** 2)))(
        stack
    )
    np.testing.assert_allclose(value, np.sum(np.float32(stack["a"][3]) ** 2), rtol=1e-6)
    expected = np.zeros((5, 3, 4), np.float32)
    expected[3] = 2 * np.float32(stack["a"][3])
    np.testing.assert_allclose(np.float32(grad["a"]), expected, rtol=1e-2)
    np.testing.assert_array_equal(np.float32(grad["b"]), 0)


@on_cpu
def test_no_copy_of_a_stack_of_weights():
    """Neither in float32, nor as bits, nor for the loop over layers."""
    stack = jax.ShapeDtypeStruct((6, 256, 256), jnp.bfloat16)

    def run(stack, x):
        return jax.lax.fori_loop(
            0, 6, lambda i, x: products.matmul(x.astype(jnp.bfloat16), cpu.from_stack(stack, i)), x
        )

    compiled = jax.jit(run).lower(stack, jax.ShapeDtypeStruct((8, 256), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * 256 * 256 * 2
    assert "f32[6,256,256]" not in compiled.as_text()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 24), st.integers(1, 2 * cpu.CACHE_BYTES), st.booleans())
def test_rows_in_turn_are_rows_at_once(rows, row_bytes, masked):
    rng = np.random.default_rng(rows)
    x, mask = rng.normal(size=(rows, 3, 2)).astype(np.float32), rng.random((rows, 3)) < 0.5 if masked else None

    def f(x, mask):
        y = x * 2 if mask is None else jnp.where(mask[..., None], x, 0.0)
        return y, {"sum": jnp.sum(y, axis=(1, 2))}

    got, expected = cpu.map_rows(f, x, mask, row_bytes=row_bytes), f(x, mask)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@on_cpu
def test_rows_are_taken_in_turn_where_they_are_large():
    def loops(row_bytes):
        f = jax.jit(lambda x: cpu.map_rows(jnp.sin, x, row_bytes=row_bytes))
        return f.lower(jnp.zeros((6, 4))).as_text().count("stablehlo.while")

    assert loops(cpu.CACHE_BYTES // 6) == 0
    assert loops(cpu.CACHE_BYTES // 3) == 1
    assert loops(2 * cpu.CACHE_BYTES) == 1
