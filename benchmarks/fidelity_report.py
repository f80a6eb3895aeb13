"""The report of `fidelity.py`: metrics of every row, as JSON, as a Markdown table and as a picture."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from timing import spread, write_text

from marjax import metrics
from marjax.data import open_source

mpl.use("agg")
import matplotlib.pyplot as plt


def open_test_images(data: str):
    """The test split that distances are measured to.

    Raises:
        ValueError, OSError: if there is none.
    """
    size, _, channels = metrics.IMAGE_SHAPE
    return open_source(data, split="test", img_size=size, channels=channels)


def write_report(
    options: argparse.Namespace,
    rows: list[dict[str, Any]],
    arrays: list[dict[str, np.ndarray]],
    seconds: list[list[float] | None],
    settings: dict[str, Any],
) -> None:
    """Measures and writes.

    Args:
        options: the command line; `out` is the directory.
        rows: name, accel, num_iter, headline and flops of each row; the first is what the others are compared with.
        arrays: their `images` and `latents`.
        seconds: times of each row, if there are any.
        settings: what goes into the record.
    """
    out, extractor = options.out, metrics.load_feature_extractor("fashion_mnist")
    source = open_test_images(options.data)
    real = extractor.features(source.get(np.arange(len(source)))[0])
    base, results = arrays[0], []
    for row, own, times in zip(rows, arrays, seconds, strict=True):
        if len(own.get("images", ())) < options.num_paired:
            print(f"left out, images are missing: {row['name']}")
            continue
        result = {**row, **scores(own["images"], own["latents"], base["latents"], real, extractor, options.num_paired)}
        if own["images"].shape[0] >= options.num_images > options.num_paired:
            every = scores(own["images"], None, None, real, extractor, options.num_images)
            result |= {f"{name}_all": value for name, value in every.items()}
        if times:
            result["seconds_per_image"] = statistics.median(times) / options.batch_size
            result["ratios"] = [each / first for each, first in zip(times, seconds[0], strict=True)]
        results.append(result)
    if not results:
        raise ValueError(f"{options.work} has {options.num_paired} images of no row yet; generate them first.")
    text = markdown(results, options, settings)
    print(text)
    out.mkdir(parents=True, exist_ok=True)
    document = {**settings, "num_images": options.num_images, "num_paired": options.num_paired, "rows": results}
    write_text(out / "fidelity.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    write_text(out / "fidelity.md", text)
    if any("ratios" in result for result in results):
        picture(out / "fidelity.png", results)


def scores(images, latents, exact, real: np.ndarray, extractor: metrics.FeatureExtractor, count: int) -> dict[str, Any]:
    """Metrics of the first `count` images."""
    images = images[:count]
    labels = (np.arange(count) % metrics.NUM_CLASSES).astype(np.int32)
    result = {
        "count": count,
        "frechet_distance": metrics.frechet_distance(real, extractor.features(images)),
        "class_accuracy": metrics.class_accuracy(extractor.predict(images), labels),
    }
    if latents is not None:
        difference, exact = latents[:count] - exact[:count], exact[:count]
        result["latent_error"] = float(np.sqrt(np.mean(difference**2) / np.mean((exact - exact.mean()) ** 2)))
    return result


def markdown(results: list[dict[str, Any]], options: argparse.Namespace, settings: dict[str, Any]) -> str:
    """Two tables: rows with many images, and all rows on the first few."""
    lines = [
        f"Model {settings['model']}, guidance {settings['cfg']:g}, temperature {settings['temperature']:g}, "
        f"{settings['num_sampling_steps']} diffusion steps, batch {options.batch_size}, {options.dtype}; "
        f"{settings['cores']} cores of {settings['machine']}, jax {settings['jax']}.",
        "",
        "Fréchet distance to the test images and class accuracy, in the features of the shipped classifier. Latent "
        "error: root mean square difference from the exact latents of the same seeds, as a share of their standard "
        "deviation. Time: median and range of the ratio to the first row, over interleaved batches.",
    ]
    if many := [result for result in results if "count_all" in result]:
        lines += ["", f"## {options.num_images} images", "", *table(many, "_all")]
    lines += ["", f"## The first {options.num_paired} images", "", *table(results, "")]
    return "\n".join(lines) + "\n"


def table(results: list[dict[str, Any]], suffix: str) -> list[str]:
    """Lines of a Markdown table."""
    head = "| | accel | steps | Fréchet distance | class accuracy | latent error | GFLOP/image | s/image | time |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for result in results:
        timed = "ratios" in result
        lines.append(
            f"| {result['name']} | `{result['accel']}` | {result['num_iter']} "
            f"| {result['frechet_distance' + suffix]:.2f} | {100 * result['class_accuracy' + suffix]:.1f} % "
            f"| {result['latent_error']:.3f} | {result['flops'] / 1e9:.0f} "
            + (f"| {result['seconds_per_image']:.3f} | {spread(result['ratios'])} |" if timed else "| | |")
        )
    return lines


def picture(path: Path, results: list[dict[str, Any]]) -> None:
    """Fréchet distance and latent error against time: one point per row, numbered as in the key."""
    timed = [result for result in results if "ratios" in result]
    figure, (*panels, key) = plt.subplots(1, 3, figsize=(15, 6.5), width_ratios=(5, 5, 3), layout="constrained")
    titles = {"frechet_distance": "Fréchet distance", "latent_error": "latent error"}
    for axes, (value, title) in zip(panels, titles.items(), strict=True):
        for number, result in enumerate(timed, start=1):
            point, color = (statistics.median(result["ratios"]), result[value]), color_of(result)
            axes.plot(*point, "o" if result["headline"] else ".", color=color)
            axes.annotate(number, point, fontsize=7, xytext=(3, 3), textcoords="offset points", color=color)
        axes.set(xlabel="time per image, as a share of exact", ylabel=title)
        axes.grid(alpha=0.3, which="both")
    panels[0].set_yscale("log")
    key.axis("off")
    for number, result in enumerate(timed, start=1):
        key.text(0, 1 - number / (len(timed) + 1), f"{number}  {result['name']}", fontsize=8, color=color_of(result))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def color_of(result: dict[str, Any]) -> str:
    """Colour of a row's family, by the start of its name."""
    family = result["name"].partition(":")[0].partition(",")[0].partition(" +")[0]
    return {"exact": "black", "LazyMAR": "tab:orange", "MARché": "tab:blue"}.get(family, "tab:green")
