"""How the cost of sampling grows: seconds per image against batch, decode steps, sequence length and model size.

    python benchmarks/bench_scaling.py                               # around the shipped model's size, bfloat16
    python benchmarks/bench_scaling.py --accel none marche --dtype float32 --out runs/scaling
    python benchmarks/bench_scaling.py --quick

One number varies at a time: batches of images; decode steps; the image's side, of which the sequence length is the
square; and the width of all layers. Weights are random, so nothing is said about quality. The last line of the output
is one JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from curves import Panel, draw
from presets import random_model
from timing import interleaved, machine

import marjax
from marjax.cli_options import positive
from marjax.config import MARConfig
from marjax.types import DTYPES

CENTRE = {"batch size": 8, "decode steps": 32, "sequence length": 196, "width": 128}
AXES = {
    "batch size": (1, 2, 4, 8, 16, 32),
    "decode steps": (8, 16, 32, 64),
    "sequence length": (49, 100, 196, 400),
    "width": (64, 128, 256, 512),
}


def configuration(base: MARConfig, point: dict[str, int]) -> MARConfig:
    """The shipped model's configuration, with another sequence length and width."""
    width = point["width"]
    heads = max(1, width // 64)
    sides = {"img_size": int(point["sequence length"] ** 0.5) * base.patch_size * base.vae_stride}
    stacks = {f"{stack}_embed_dim": width for stack in ("encoder", "decoder")}
    stacks |= {f"{stack}_num_heads": heads for stack in ("encoder", "decoder")}
    return dataclasses.replace(base, **sides, **stacks, diffloss_w=base.diffloss_w * width // base.decoder_embed_dim)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accel", nargs="+", default=["none", "lazymar", "marche"])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--num-sampling-steps", type=positive, default=20)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench_scaling"), help="directory of the picture")
    parser.add_argument("--quick", action="store_true", help="two batch sizes and widths, few steps, exact only")
    options = parser.parse_args()
    axes, centre = AXES, CENTRE
    if options.quick:
        options.accel, options.repeats, options.num_sampling_steps = ["none"], 1, 5
        axes, centre = {name: AXES[name][:2] for name in ("batch size", "width")}, {**CENTRE, "decode steps": 8}

    base, panels, results = marjax.get_preset("fashion_mnist"), [], {}
    for axis, points in axes.items():
        curves: dict[str, list[tuple[float, float]]] = {accel: [] for accel in options.accel}
        for value in points:
            point = {**centre, axis: value}
            params = random_model(configuration(base, point), dtype=options.dtype)
            labels = np.arange(point["batch size"]) % params.config.class_num

            def variant(accel: str, params=params, labels=labels, num_iter=point["decode steps"]):
                return lambda seed: marjax.sample_latents(
                    params,
                    jax.random.key(seed),
                    labels,
                    accel=accel,
                    num_iter=num_iter,
                    num_sampling_steps=options.num_sampling_steps,
                    dtype=options.dtype,
                )

            try:
                timings = interleaved({accel: variant(accel) for accel in options.accel}, options.repeats)
            except ValueError as error:
                parser.error(str(error))
            for accel, timing in timings.items():
                curves[accel].append((value, timing.median / len(labels)))
            shown = ", ".join(f"{accel} {curve[-1][1]:.3f}" for accel, curve in curves.items())
            print(f"{axis} {value}: {shown} s/image", flush=True)
        panels.append(Panel(axis, "seconds per image", curves))
        results[axis] = curves
    draw(options.out / "bench_scaling.png", panels)
    print(json.dumps({**vars(options), "out": str(options.out), "centre": centre, **machine(), "results": results}))


if __name__ == "__main__":
    main()
