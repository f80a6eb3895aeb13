"""Attention in the shapes of the models: what sampling runs, its alternatives, and two-path attention.

    python benchmarks/bench_attention.py                             # MAR-B, batch 4 with guidance, bfloat16
    python benchmarks/bench_attention.py --model mar_huge --batch-size 1 --dtype float32
    python benchmarks/bench_attention.py --quick

Every form runs as one of the layers of a loop, so that its buffers are reused as in a model. "in turn" is what the
model does: a few images at a time where that keeps scores in the cache. Two-path attention is compared with attention
over the renewed cache, of which the cost of renewing is part. The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from timing import interleaved, machine, spread

import marjax
from marjax.accel.blocks import Active
from marjax.cli_options import positive
from marjax.cpu import map_rows
from marjax.kernels.two_path_attention import two_path_attention
from marjax.layers import attention
from marjax.types import DTYPES, Array

LAYERS = 8


def in_turn(q: Array, k: Array, v: Array) -> Array:
    """As `marjax.mar.run_layer` does it, without its products."""
    _, positions, heads, _ = k.shape
    return map_rows(attention, q, k, v, row_bytes=4 * heads * positions * q.shape[1])


def of_jax(q: Array, k: Array, v: Array) -> Array:
    """`jax.nn.dot_product_attention`."""
    out = jax.nn.dot_product_attention(q, k, v, scale=1.0)
    return out.reshape(*out.shape[:2], -1)


def two_path(q: Array, k: Array, v: Array, k_fresh: Array, v_fresh: Array, active: Active) -> Array:
    """Fresh and cached keys apart."""
    masks = {"fresh_mask": active.valid, "cached_mask": ~active.chosen}
    return two_path_attention(q, k_fresh, v_fresh, k, v, **masks)


def renewed(q: Array, k: Array, v: Array, k_fresh: Array, v_fresh: Array, active: Active) -> Array:
    """The cache is renewed first."""
    return attention(q, active.put(k, k_fresh), active.put(v, v_fresh))


def in_a_loop(f: Callable[..., Array]) -> Callable[..., Array]:
    """`LAYERS` times f, whose queries depend on the result before. A run is given arguments, and a seed to ignore."""

    @jax.jit
    def run(arguments: tuple, _: int) -> Array:
        q, *rest = arguments
        return lax.fori_loop(0, LAYERS, lambda _, x: x + (1e-3 * f(x, *rest)).reshape(x.shape).astype(x.dtype), q)

    return run


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(marjax.PRESETS), default="mar_base")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--batch-size", type=positive, default=4)
    parser.add_argument("--active", type=positive, help="active positions; default: a fifth")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--quick", action="store_true", help="batch 1, one repeat")
    options = parser.parse_args()
    if options.quick:
        options.batch_size, options.repeats = 1, 1
    config = marjax.get_preset(options.model)
    heads, rows = config.decoder_num_heads, 2 * options.batch_size
    width, positions = config.decoder_embed_dim // heads, config.buffer_size + config.seq_len
    few = options.active or positions // 5
    if few > positions:
        parser.error(f"--active {few} must not exceed the model's {positions} positions")

    def random(seed: int, count: int) -> Array:
        return jax.random.normal(jax.random.key(seed), (rows, count, heads, width)).astype(DTYPES[options.dtype])

    q, k, v, k_fresh, v_fresh = (random(seed, n) for seed, n in enumerate((positions, positions, positions, few, few)))
    index = jnp.argsort(jax.random.uniform(jax.random.key(9), (rows, positions)), axis=1)[:, :few]
    active = Active.of(index, jnp.ones((rows, few), bool), positions)
    groups = {
        f"all {positions} positions": ({"in turn": in_turn, "at once": attention, "jax.nn": of_jax}, (q, k, v)),
        f"{few} of {positions}": (
            {"two-path": two_path, "renewed cache": renewed},
            (q[:, :few], k, v, k_fresh, v_fresh, active),
        ),
    }
    results = {}
    print(f"{'':36s} {'GFLOP/s':>8s}  ms, {rows} rows, {heads} heads of {width}, {options.dtype}")
    for title, (forms, arguments) in groups.items():
        variants = {name: functools.partial(in_a_loop(form), arguments) for name, form in forms.items()}
        timings = interleaved(variants, options.repeats)
        for name, timing in timings.items():
            each = [1e3 * seconds / LAYERS for seconds in timing.seconds]
            work = 4 * rows * arguments[0].shape[1] * positions * heads * width
            rate = work * LAYERS / timing.median / 1e9
            print(f"{title + ', ' + name:36s} {rate:8.0f}  {spread(each)}")
            results[f"{title}, {name}"] = {"ms": each, "gflops": rate}
    print(json.dumps({**vars(options), **machine(), "results": results}))


if __name__ == "__main__":
    main()
