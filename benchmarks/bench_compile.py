"""Compilation of `sample`: seconds at the first start and at the second, and the memory that the program asks for.

    python benchmarks/bench_compile.py                               # MAR-H, batch 8, bfloat16, every acceleration
    python benchmarks/bench_compile.py --model mar_base --batch-size 1 --accel none marche
    python benchmarks/bench_compile.py --quick

Each start is a process of its own, which shares nothing but the directory of compiled programs with the others. Nothing
runs, so no weights are needed. Memory is the compiler's account: arguments are the weights, in the compute dtype, and
the rest is what the program allocates besides. The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from presets import random_model
from timing import machine

import marjax
from marjax.cli_options import positive
from marjax.compilation import use_persistent_cache
from marjax.types import DTYPES

STARTED = "--in-a-process-of-its-own"


def start(options: argparse.Namespace, accel: str, cache: str) -> dict[str, float]:
    """What one start measured.

    Raises:
        RuntimeError: if it failed.
    """
    task = {name: getattr(options, name) for name in ("model", "batch_size", "dtype", "num_iter", "vae")}
    done = subprocess.run(
        [sys.executable, __file__, STARTED, json.dumps({**task, "accel": accel})],
        env={**os.environ, "MARJAX_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{accel}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def compile_once(model: str, batch_size: int, dtype: str, num_iter: int, accel: str, *, vae: bool) -> dict[str, float]:
    """Traces, lowers and compiles, and says what that took, in seconds and bytes."""
    use_persistent_cache()
    config = marjax.get_preset(model)
    params = jax.eval_shape(lambda: random_model(config, with_vae=vae, dtype=dtype))
    labels = np.arange(batch_size) % config.class_num
    draw = marjax.sample if vae else marjax.sample_latents
    options = {"accel": accel, "num_iter": num_iter, "dtype": dtype}

    begin = time.perf_counter()
    lowered = jax.jit(lambda params, key: draw(params, key, labels, **options)).lower(params, jax.random.key(0))
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    memory = compiled.memory_analysis()
    return {
        "trace_and_lower_seconds": middle - begin,
        "compile_seconds": end - middle,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "bodies": lowered.as_text().count("stablehlo.while"),
        "machine": machine(),
    }


def main() -> None:
    """Runs the benchmark."""
    if sys.argv[1:2] == [STARTED]:
        print(json.dumps(compile_once(**json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(marjax.PRESETS), default="mar_huge")
    parser.add_argument("--accel", nargs="+", default=["none", "lazymar", "marche", "marche:condition=on,head=on"])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--num-iter", type=positive, default=64)
    parser.add_argument("--vae", action="store_true", help="with the autoencoder")
    parser.add_argument("--quick", action="store_true", help="the shipped model's size, the first two accelerations")
    options = parser.parse_args()
    if options.quick:
        options.model, options.accel = "fashion_mnist", options.accel[:2]
    results = {}
    print(f"{'':32s} {'first start':>12s} {'second':>8s} {'loops':>6s} {'weights':>9s} {'temporary':>10s}")
    try:
        for accel in options.accel:
            with tempfile.TemporaryDirectory() as cache:
                first, second = start(options, accel, cache), start(options, accel, cache)
            seconds = [each["trace_and_lower_seconds"] + each["compile_seconds"] for each in (first, second)]
            print(
                f"{accel:32s} {seconds[0]:10.1f} s {seconds[1]:6.1f} s {first['bodies']:6d} "
                f"{first['argument_bytes'] / 2**30:5.2f} GiB {first['temporary_bytes'] / 2**30:6.2f} GiB",
                flush=True,
            )
            results[accel] = {"first": first, "second": second}
    except RuntimeError as error:
        parser.exit(1, f"{error}\n")
    print(json.dumps({**vars(options), "results": results}))


if __name__ == "__main__":
    main()
