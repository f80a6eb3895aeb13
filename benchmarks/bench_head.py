"""The diffusion head: milliseconds per diffusion step against rows, and what preparing modulations ahead brings.

    python benchmarks/bench_head.py                                  # MAR-B's head, bfloat16
    python benchmarks/bench_head.py --model mar_huge --dtype float32 --out runs/head
    python benchmarks/bench_head.py --quick

"prepared" is the exact head as sampling runs it: modulations of several diffusion steps in one product; "step by step"
is the same without that; "cached" is LazyMAR's head cache. Rows are tokens of the conditional and unconditional halves
together. The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from curves import Panel, draw
from presets import random_model
from timing import interleaved, machine, spread

import marjax
from marjax import diffusion, diffusion_head
from marjax.accel.head import ExactHead, HeadCache, HeadInput, HeadPolicy, steps_at_once
from marjax.cli_options import positive
from marjax.layers import dense
from marjax.noise_schedule import NoiseSchedule, noise_schedule
from marjax.types import DTYPES, Array, PyTree

GUIDANCE = 3.0


def sample(head: PyTree, z: Array, noise: Array, schedule: NoiseSchedule, policy: HeadPolicy, at_once: int) -> Array:
    """Tokens [n, D] of conditioning z [2 n, E], as `marjax/decode.py` samples them."""
    head, tokens, num_steps = diffusion_head.unstack(head), noise.shape[1], schedule.num_steps
    time = diffusion_head.time_embedding(head, jnp.asarray(schedule.timestep_map))
    cond = dense(head["cond_embed"], z)

    def denoise(cache: PyTree, x: Array, row: Array, prepared: PyTree) -> tuple[PyTree, Array, Array]:
        step = HeadInput(head, x, time[row], cond, row, prepared, num_steps)
        cache, eps_c, eps_u, v = policy.apply(cache, step)
        return cache, eps_u + GUIDANCE * (eps_c - eps_u), v

    return diffusion.sample(
        denoise,
        noise,
        schedule,
        temperature=1.0,
        clip_denoised=False,
        cache=policy.init(head, tokens, guided=True),
        prepare=lambda rows: policy.prepare(head, time[rows], cond, tokens),
        at_once=at_once,
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(marjax.PRESETS), default="mar_base")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 4, 7, 16, 32, 56, 128])
    parser.add_argument("--num-sampling-steps", type=positive, default=100)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_head"), help="directory of the picture")
    parser.add_argument("--quick", action="store_true", help="two sizes, 20 diffusion steps, one repeat")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.num_sampling_steps, options.repeats = [1, 16], 20, 1

    config, num_steps = marjax.get_preset(options.model), options.num_sampling_steps
    head = random_model(config, dtype=options.dtype).mar["diffloss"]
    schedule = noise_schedule(str(num_steps))
    results = []
    print(f"{'rows':>5s} {'at once':>8s} {'GFLOP/s':>8s}  ms per diffusion step: prepared, step by step, cached")
    for tokens in options.tokens:
        rows = 2 * tokens
        z = jax.random.normal(jax.random.key(1), (rows, config.decoder_embed_dim))
        ahead = steps_at_once(num_steps, rows)
        settings = {
            "prepared": (ExactHead(), ahead),
            "step by step": (ExactHead(), 1),
            "cached": (HeadCache(period=7), ahead),
        }

        def variant(policy: HeadPolicy, at_once: int, tokens: int = tokens, z: Array = z):
            run = jax.jit(lambda head, z, noise: sample(head, z, noise, schedule, policy, at_once))
            shape = (num_steps + 1, tokens, config.token_dim)
            return lambda seed: run(head, z, jax.random.normal(jax.random.key(seed), shape))

        timings = interleaved({name: variant(*setting) for name, setting in settings.items()}, options.repeats)
        each = {name: [1e3 * s / num_steps for s in timing.seconds] for name, timing in timings.items()}
        work = 2 * tokens * ExactHead().cost(config.diffloss_d, config.diffloss_w, num_steps, guided=True)
        rate = work / timings["prepared"].median / 1e9
        print(f"{rows:5d} {ahead:8d} {rate:8.0f}  " + ", ".join(spread(values) for values in each.values()), flush=True)
        results.append({"rows": rows, "at_once": ahead, "gflops": rate, "ms_per_step": each})
    curves = {
        name: [(result["rows"], sorted(result["ms_per_step"][name])[options.repeats // 2]) for result in results]
        for name in settings
    }
    draw(options.out / "bench_head.png", [Panel("rows", f"ms per diffusion step, {options.model}", curves)])
    print(json.dumps({**vars(options), "out": str(options.out), **machine(), "results": results}))


if __name__ == "__main__":
    main()
