"""How much the exact model's features change from step to step: what the caches of LazyMAR and MARché live on.

    python benchmarks/redundancy.py                                  # shipped model, 50 images, 64 steps
    python benchmarks/redundancy.py --model DIR --num-images 8 --out runs/redundancy
    python benchmarks/redundancy.py --quick                          # 10 images, 16 steps

A token never changes once it is predicted, so the latents of one exact run tell the known tokens of every step, and
each step's transformer is run on them again with every layer's keys and values in view. Written to `--out`:
redundancy.json, redundancy_features.png, redundancy_layers.png, redundancy_guidance.png, after the motivating figures
of LazyMAR (arXiv 2503.12450) and MARché (arXiv 2506.12035).
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from bench_sample import load_model
from timing import machine, write_text
from tqdm import tqdm

import marjax
from marjax import codec, mar
from marjax.accel.blocks import KeysValues, run
from marjax.accel.lazymar import cosine
from marjax.cli_options import positive
from marjax.schedule import step_counts
from marjax.types import Array, MARParams, cast_matrices

mpl.use("agg")
import matplotlib.pyplot as plt

GROUPS = ("decoded now", "decoded in the last step", "decoded earlier", "still masked", "buffers")


@functools.partial(jax.jit, static_argnums=0)
def forward(config: marjax.MARConfig, params, tokens: Array, order: Array, class_emb: Array, num_known: Array):
    """One step's transformer, in generation order.

    Returns:
        Decoder input and output [R, N, E], and keys and values [L, R, N, H, Dh] of every decoder layer.
    """
    positions = mar.gather_positions(params, config, order)
    x = mar.encode(params, config, mar.embed(params, tokens, class_emb, positions.encoder), num_known)
    x = mar.decoder_input(params, config, x, num_known, positions.decoder)
    heads, depth = config.decoder_num_heads, config.decoder_depth
    empty = KeysValues.empty(depth, *x.shape[:2], heads, x.shape[2], x.dtype)
    return x, *run(params["decoder_blocks"], x, empty, num_heads=heads, start=0)


def similarities(params: MARParams, num_images: int, num_iter: int, seed: int) -> dict[str, np.ndarray]:
    """Averages over images and positions, for every step but the first.

    Returns:
        `input`, `output` [steps - 1, groups]: cosine of decoder input and output with those of the step before, NaN for
        empty groups; `k`, `v` [steps - 1, L, groups]; `conditional`, `unconditional`, `residual` [steps - 1]: mean
        squared change of the outputs and of their difference, as a share of the conditional output's mean square.
    """
    config, tree = params.config, cast_matrices(params.mar, jnp.float32)
    labels, rng = np.arange(num_images) % config.class_num, np.random.default_rng(seed)
    order = np.stack([rng.permutation(config.seq_len) for _ in labels]).astype(np.int32)
    latents = marjax.sample_latents(
        params, jax.random.key(seed), labels, order=order, num_iter=num_iter, dtype="float32", batch_size=num_images
    )
    tokens = jnp.take_along_axis(codec.patchify(latents, config.patch_size), order[..., None], axis=1)
    class_emb = [mar.class_embedding(tree, each, num_images) for each in (labels, None)]
    known, _ = step_counts(config.seq_len, num_iter)
    rows, before = [], None
    for step in tqdm(range(num_iter), disable=None):
        now = forward(config, tree, tokens, order, jnp.concatenate(class_emb), known[step])
        if before is not None:
            rows.append(change(now, before, config, known[step - 1 : step + 2]))
        before = now
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def change(now, before, config: marjax.MARConfig, known: np.ndarray) -> dict[str, np.ndarray]:
    """One step against the step before; `known` are the counts before, at and after it."""
    (x, out, kv), (old_x, old_out, old_kv) = now, before
    batch, last, first, stop = len(x) // 2, *(config.buffer_size + known)
    total = config.buffer_size + config.seq_len
    bounds = ((first, stop), (last, first), (config.buffer_size, last), (stop, total), (0, config.buffer_size))

    def grouped(similarity: Array) -> np.ndarray:
        """[.., R, N] -> [.., groups] means over the conditional half."""
        similarity = np.asarray(similarity)[..., :batch, :]
        means = [
            similarity[..., a:b].mean(axis=(-2, -1)) if b > a else np.full(similarity.shape[:-2], np.nan)
            for a, b in bounds
        ]
        return np.stack(means, axis=-1)

    def features(a: Array, b: Array) -> np.ndarray:
        return grouped(cosine(a[:, :, None], b[:, :, None]))

    def moved(part: Array, old: Array) -> np.ndarray:
        return np.asarray(jnp.mean((part - old) ** 2) / jnp.mean(out[:batch] ** 2))

    return {
        "input": features(x, old_x),
        "output": features(out, old_out),
        "k": grouped(jax.vmap(cosine)(kv.k, old_kv.k)),
        "v": grouped(jax.vmap(cosine)(kv.v, old_kv.v)),
        "conditional": moved(out[:batch], old_out[:batch]),
        "unconditional": moved(out[batch:], old_out[batch:]),
        "residual": moved(out[batch:] - out[:batch], old_out[batch:] - old_out[:batch]),
    }


def draw(measured: dict[str, np.ndarray], out: Path) -> None:
    """The three figures."""

    def distance(cosine: np.ndarray) -> np.ndarray:
        return np.where(cosine < 1, 1 - cosine, np.nan)  # no change at all has no place on a logarithmic axis

    steps = np.arange(1, len(measured["output"]) + 1)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, name, title in zip(axes, ("input", "output"), ("decoder input", "decoder output"), strict=True):
        for group, values in zip(GROUPS, measured[name].T, strict=True):
            axis.plot(steps, distance(values), label=group)
        axis.set(title=title, xlabel="step", ylabel="1 - cosine with the step before", yscale="log", ylim=(1e-6, 2))
    axes[0].legend()
    figure.savefig(out / "redundancy_features.png", dpi=140)

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, name in zip(axes, ("k", "v"), strict=True):
        layers = np.nanmean(measured[name], axis=0)  # [L, groups]
        for group, values in zip(GROUPS, layers.T, strict=True):
            axis.plot(np.arange(1, len(layers) + 1), distance(values), "o-", label=group)
        axis.set(title={"k": "keys", "v": "values"}[name], xlabel="decoder layer")
        axis.set(ylabel="1 - cosine with the step before", yscale="log", ylim=(1e-6, 2))
    axes[0].legend()
    figure.savefig(out / "redundancy_layers.png", dpi=140)

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in ("conditional", "unconditional", "residual"):
        axis.plot(steps, measured[name], label=name)
    axis.set(xlabel="step", ylabel="mean squared change / mean square", yscale="log", title="outputs of the decoder")
    axis.legend()
    figure.savefig(out / "redundancy_guidance.png", dpi=140)
    plt.close("all")


def main() -> None:
    """Runs the analysis."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="fashion_mnist")
    parser.add_argument("--num-images", type=positive, default=50)
    parser.add_argument("--num-iter", type=positive, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/redundancy"))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.num_images, options.num_iter = 10, 16

    if options.num_iter < 2:
        parser.error(f"--num-iter {options.num_iter}: there is no step before the first; give at least 2.")
    try:
        params = load_model(options.model)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    measured = similarities(params, options.num_images, options.num_iter, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(measured, options.out)
    print(f"{'':26s} cosine with the step before, mean over steps")
    for index, group in enumerate(GROUPS):
        print(f"{group:26s} output {np.nanmean(measured['output'][:, index]):.3f}", end="")
        for name in ("k", "v"):
            print(f"   {name} " + " ".join(f"{x:.3f}" for x in np.nanmean(measured[name][..., index], axis=0)), end="")
        print()
    for name in ("conditional", "unconditional", "residual"):
        print(f"{name:26s} mean squared change {measured[name].mean():.4f} of the output's mean square")
    lists = {name: np.where(np.isnan(values), None, values.round(5)).tolist() for name, values in measured.items()}
    document = {**vars(options), "out": str(options.out), "groups": GROUPS, **machine(), "measured": lists}
    write_text(options.out / "redundancy.json", json.dumps(document) + "\n")
    print(json.dumps({name: document[name] for name in ("model", "num_images", "num_iter", "seed", "out")}))


if __name__ == "__main__":
    main()
