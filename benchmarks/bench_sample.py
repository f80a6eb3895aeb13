"""Seconds per image of sampling, for every combination of the accelerations and dtypes asked for, in one run.

    python benchmarks/bench_sample.py                                         # shipped model, none, lazymar, marche
    python benchmarks/bench_sample.py --model mar_base --batch-size 4 --dtype bfloat16 --no-warm-up
    python benchmarks/bench_sample.py --accel none --dtype float32 bfloat16 --batch-size 10
    python benchmarks/bench_sample.py --model mar_base --batch-size 1 --num-iter 8 --vae --breakdown

Runs are interleaved, and ratios are those of runs of one round. FLOPs are the plan's: products only, padding included.
`--breakdown` profiles one more run of each and says which part of the model its operations belong to.
Presets other than the shipped model get random weights, on which every acceleration takes as long as on trained ones.
The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import functools
import json

import jax
import numpy as np
from breakdown import OTHER, PARTS, breakdown
from presets import load_model
from timing import interleaved, machine, ratios, spread

import marjax
from marjax.accel import resolve
from marjax.accel.plan import StepCost, flops_per_image, plan_for
from marjax.arguments import default_num_iter
from marjax.cli_options import positive
from marjax.noise_schedule import noise_schedule
from marjax.types import DTYPES, MARParams


def flops(params: MARParams, accel: str, num_iter: int | None, num_sampling_steps: int | None, cfg: float) -> float:
    """FLOPs per image, by the plan.

    Raises:
        ValueError: if the acceleration is unknown, or does not fit the model.
    """
    config, num_steps = params.config, num_sampling_steps or params.config.num_sampling_steps
    num_steps, guided = noise_schedule(str(num_steps)).num_steps, cfg != 1.0
    num_iter, policy = num_iter or default_num_iter(config), resolve(accel)
    plan = plan_for(config, num_iter, num_steps, accel=policy, guided=guided)
    return flops_per_image(plan, StepCost(config, policy, num_steps, guided))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="fashion_mnist")
    parser.add_argument("--accel", nargs="+", default=["none", "lazymar", "marche"])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--batch-size", type=positive, default=20)
    parser.add_argument("--num-iter", type=positive, help="default: 64")
    parser.add_argument("--num-sampling-steps", type=positive, help="default: the model's")
    parser.add_argument("--cfg", type=float, help="default: the model's")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--no-warm-up", action="store_true", help="time the first runs too, less their compilation")
    parser.add_argument("--vae", action="store_true", help="make images, with the autoencoder, instead of latents")
    parser.add_argument("--breakdown", action="store_true", help="also say what the parts of the model take")
    parser.add_argument("--quick", action="store_true", help="4 decode steps of 10 diffusion steps, one repeat")
    options = parser.parse_args()
    if options.quick:
        options.num_iter, options.num_sampling_steps, options.repeats = 4, 10, 1

    accels, steps = list(dict.fromkeys(options.accel)), (options.num_iter, options.num_sampling_steps)
    try:
        params = load_model(options.model, with_vae=options.vae)
        cfg = params.config.cfg if options.cfg is None else options.cfg
        work = {accel: flops(params, accel, *steps, cfg) for accel in accels}
    except (ValueError, OSError) as error:
        parser.error(str(error))
    labels = np.arange(options.batch_size) % params.config.class_num
    combinations = [(accel, dtype) for dtype in dict.fromkeys(options.dtype) for accel in accels]

    draw = marjax.sample if options.vae else marjax.sample_latents

    def run(params: MARParams, key: jax.Array, accel: str, dtype: str) -> jax.Array:
        return draw(
            params,
            key,
            labels,
            accel=accel,
            dtype=dtype,
            cfg=cfg,
            num_iter=options.num_iter,
            num_sampling_steps=options.num_sampling_steps,
        )

    def variant(accel: str, dtype: str):
        return lambda seed: run(params, jax.random.key(seed), accel, dtype)

    variants = {f"{accel} {dtype}": variant(accel, dtype) for accel, dtype in combinations}
    timings = interleaved(variants, options.repeats, warm_up=not options.no_warm_up)
    base = next(iter(variants))
    shares = ratios(timings, base)
    print(f"{'':40s} {'s/image':>9s} {'images/s':>9s} {'compile':>8s} {'TFLOP/image':>12s}  share of {base}")
    results = {}
    for (accel, _), (name, timing) in zip(combinations, timings.items(), strict=True):
        each = timing.median / len(labels)
        print(
            f"{name:40s} {each:9.3f} {1 / each:9.3f} {timing.compile_seconds:7.1f}s {work[accel] / 1e12:12.3f}  "
            f"{spread(shares[name])}"
        )
        results[name] = {
            "seconds": timing.seconds,
            "seconds_per_image": each,
            "compile_seconds": timing.compile_seconds,
            "flops_per_image": work[accel],
            "ratios": shares[name],
        }
    if options.breakdown:
        print(f"\n{'share of the time of operations':40s}", *(f"{part:>11s}" for part in (*PARTS, OTHER)))
        for (accel, dtype), name in zip(combinations, variants, strict=True):
            program = functools.partial(run, accel=accel, dtype=dtype)
            seconds = results[name]["operation_seconds"] = breakdown(program, params, jax.random.key(0))
            total = sum(seconds.values())
            print(f"{name:40s}", *(f"{100 * part / total:9.1f} %" for part in seconds.values()))
    print(json.dumps({**vars(options), "cfg": cfg, **machine(), "results": results}))


if __name__ == "__main__":
    main()
