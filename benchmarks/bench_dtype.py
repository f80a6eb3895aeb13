"""bfloat16 against float32 sampling, in one process, alternating: a ratio, not two absolute numbers.

    python benchmarks/bench_dtype.py                       # MAR-B, batch 8, random weights
    python benchmarks/bench_dtype.py --model fashion_mnist --batch-size 10 --num-iter 64 --num-sampling-steps 50

Compilation is timed apart, both programs run once before any timing, and the pairs alternate. The last line of the
output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import jax
import jax.numpy as jnp

import marjax
from marjax import mar
from marjax.types import DTYPES, MARParams


def load_model(name: str) -> MARParams:
    """A preset with random weights, or a model that `marjax.load` knows; the shipped model has real weights."""
    if name in marjax.PRESETS and name != "fashion_mnist":
        config = marjax.get_preset(name)
        tree = jax.jit(lambda key: mar.init(config, key))(jax.random.key(0))
        # Fresh adaLN and output layers are zero, which would make the head's products trivial.
        tree = jax.tree.map(lambda leaf: leaf + 0.01 * jax.random.normal(jax.random.key(1), leaf.shape), tree)
        return MARParams(mar=tree, vae=None, config=config)
    return marjax.load(name)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mar_base")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-iter", type=int, default=2)
    parser.add_argument("--num-sampling-steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()

    params = load_model(options.model)
    labels = jnp.arange(options.batch_size) % params.config.class_num

    def seconds(dtype: str, seed: int) -> float:
        start = time.perf_counter()
        marjax.sample_latents(
            params,
            jax.random.key(seed),
            labels,
            num_iter=options.num_iter,
            num_sampling_steps=options.num_sampling_steps,
            dtype=dtype,
        ).block_until_ready()
        return time.perf_counter() - start

    first = {dtype: seconds(dtype, 0) for dtype in DTYPES}
    runs = {dtype: [] for dtype in DTYPES}
    for pair in range(options.pairs):
        for dtype in DTYPES:
            runs[dtype].append(seconds(dtype, pair + 1))
    ratios = [slow / fast for slow, fast in zip(runs["float32"], runs["bfloat16"], strict=True)]
    for dtype in DTYPES:
        print(
            f"{dtype:9s} {statistics.median(runs[dtype]):8.2f} s per batch of {options.batch_size} "
            f"(first call, with compilation, {first[dtype]:.1f} s)"
        )
    print(f"float32 / bfloat16: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    record = {
        **vars(options),
        "guided": params.config.cfg != 1.0,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "machine": platform.processor() or platform.machine(),
        "seconds": runs,
        "first_call_seconds": first,
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
