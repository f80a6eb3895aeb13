"""What each acceleration costs in quality and buys in time, at equal seeds: same orders, same noise, same labels.

    python benchmarks/fidelity.py --data /usr/share/datasets/fashion-mnist             # every row of the tables
    python benchmarks/fidelity.py --data DIR --accel none marche marche:budget=20      # a table of one's own
    python benchmarks/fidelity.py --data DIR --quick                                   # two minutes

Three stages, which can run apart (`--only`):

    images    generates every row's images in `--work`, a few at a time; run it again and it goes on where it stopped
    speed     times one batch of every row, interleaved, on an otherwise idle machine
    report    measures; writes fidelity.json, fidelity.md and fidelity.png to `--out`

Headline rows have `--num-images` images, the others `--num-paired`; distances of different numbers are not comparable,
so every row is also measured on the first `--num-paired`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_sample import flops
from fidelity_report import open_test_images, write_report
from timing import Timing, interleaved, machine, write_text
from tqdm import tqdm

import marjax
from marjax.accel import resolve
from marjax.cli_options import positive
from marjax.files import atomic_write
from marjax.sample import to_images
from marjax.types import DTYPES, MARParams


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: what it shows.
        accel: the acceleration.
        num_iter: decode steps.
        headline: whether it gets many images.
    """

    name: str
    accel: str = "none"
    num_iter: int = 64
    headline: bool = False

    @property
    def slug(self) -> str:
        """A file name, which stands for what is computed, whatever it is called."""
        return short_hash(f"{resolve(self.accel)} {self.num_iter}".encode())


def short_hash(*parts: bytes) -> str:
    """Names contents."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


BUDGETS = (20, 30, 41, 60)  # of 204 positions; 41 is the published share, and the default
ROWS = (
    Row("exact", headline=True),
    *(Row(f"exact, {steps} steps", num_iter=steps, headline=True) for steps in (32, 16, 8)),
    Row("LazyMAR", "lazymar", headline=True),
    Row("LazyMAR: its head cache as published", "lazymar:head_period=7"),
    Row("LazyMAR: token cache alone", "lazymar:condition=off,head=off"),
    Row("LazyMAR: condition cache alone", "lazymar:tokens=off,head=off"),
    *(Row(f"LazyMAR: head cache alone, period {period}", f"none:head=on,head_period={period}") for period in (7, 3)),
    Row("LazyMAR: without refresh", "lazymar:refresh_every=never"),
    Row("LazyMAR: without warm-up", "lazymar:warmup=0"),
    Row("LazyMAR: without warm-up and refresh", "lazymar:warmup=0,refresh_every=never"),
    Row("LazyMAR: prune layer 1", "lazymar:prune_layer=1"),
    Row("MARché", "marche", headline=True),
    Row("MARché: without caching tokens", "marche:include_caching=off"),
    Row("MARché: without generating tokens", "marche:include_generating=off"),
    Row("MARché: random choice", "marche:select=random"),
    Row("MARché: least attention", "marche:select=least_attention"),
    *(Row(f"MARché: decision layer {layer}", f"marche:decision_layer={layer}") for layer in (1, 4)),
    *(Row(f"MARché: budget {budget}", f"marche:budget={budget}") for budget in BUDGETS if budget != 41),
    *(Row(f"MARché: refresh every {period}", f"marche:refresh_every={period}") for period in (2, 6)),
    Row("MARché: without refresh", "marche:refresh_every=never"),
    Row("MARché: full encoder", "marche:encoder=full"),
    Row("MARché: every MLP", "marche:skip_mlp=off"),
    Row("MARché + condition cache", "marche:condition=on", headline=True),
    Row("MARché + head cache", "marche:head=on,head_period=3"),
    Row("MARché + condition and head cache", "marche:condition=on,head=on,head_period=3"),
)
QUICK = (Row("exact", num_iter=16), Row("LazyMAR", "lazymar", 16), Row("MARché", "marche", 16))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="directory of Fashion-MNIST's IDX files; the test split is used")
    parser.add_argument("--model", default="fashion_mnist")
    parser.add_argument("--accel", nargs="+", help="rows of one's own instead of the tables'; the first is the base")
    parser.add_argument("--num-iter", type=positive, default=64, help="decode steps of rows of one's own")
    parser.add_argument("--num-images", type=positive, default=2000, help="images of headline rows")
    parser.add_argument("--num-paired", type=positive, default=500, help="images of the other rows")
    parser.add_argument("--batch-size", type=positive, default=20)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=positive, default=3, help="timed batches of every row")
    parser.add_argument("--work", type=Path, default=Path("runs/fidelity"), help="where images are kept")
    parser.add_argument("--out", type=Path, default=Path("runs/fidelity"), help="where the report goes")
    parser.add_argument("--only", choices=("images", "speed", "report"))
    parser.add_argument("--quick", action="store_true", help="three rows of 40 images in 16 steps; one timed batch")
    options = parser.parse_args()
    rows = ROWS
    if options.accel:
        rows = tuple(Row(accel, accel, options.num_iter) for accel in options.accel)
    elif options.quick:
        rows, options.num_images, options.num_paired, options.repeats = QUICK, 40, 40, 1
        options.work, options.out = options.work / "quick", options.out / "quick"
    try:
        params = marjax.load(options.model)
        work = {row.slug: flops(params, row.accel, row.num_iter, None, params.config.cfg) for row in rows}
        open_test_images(options.data)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    settings = {name: getattr(options, name) for name in ("model", "batch_size", "dtype")}
    settings |= {"cfg": params.config.cfg, "temperature": params.config.temperature, "seed": 0}
    settings |= {"num_sampling_steps": params.config.num_sampling_steps}
    settings |= {"weights": short_hash(*(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)))}
    try:
        files = Work(options.work, settings)
    except ValueError as error:
        parser.error(str(error))
    if options.only in (None, "images"):
        generate(params, rows, files, options)
    if options.only in (None, "speed"):
        measure_speed(params, rows, files, options)
    if options.only in (None, "report"):
        described = [{**dataclasses.asdict(row), "flops": work[row.slug]} for row in rows]
        speed = [files.speed(rows).get(row.slug) for row in rows]
        write_report(options, described, [files.load(row) for row in rows], speed, {**settings, **machine()})


class Work:
    """Files between the stages: one per row, written anew after every few batches, and the times.

    Raises:
        ValueError: if the directory holds images of other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        record = path / "settings.json"
        if not record.exists():
            write_text(record, json.dumps(settings))
        elif (found := json.loads(record.read_text())) != settings:
            raise ValueError(f"{path} holds images of {found}, not of {settings}; give another --work.")

    def load(self, row: Row) -> dict[str, np.ndarray]:
        """`images` uint8 and `latents` float32 of the row's first images, none if there are none yet."""
        file = self.path / f"{row.slug}.npz"
        if not file.exists():
            return {}
        with np.load(file) as arrays:
            return dict(arrays)

    def save(self, row: Row, arrays: dict[str, np.ndarray]) -> None:
        """Replaces the row's file."""
        with atomic_write(self.path / f"{row.slug}.npz") as temporary:
            np.savez(temporary, **arrays)

    def speed(self, rows: tuple[Row, ...]) -> dict[str, list[float]]:
        """Times of the last run that timed exactly these rows, by slug; of rounds that were complete."""
        file = self._speed_file(rows)
        return json.loads(file.read_text()) if file.exists() else {}

    def save_speed(self, rows: tuple[Row, ...], timings: dict[str, Timing]) -> None:
        """Keeps the times."""
        write_text(self._speed_file(rows), json.dumps({slug: timing.seconds for slug, timing in timings.items()}))

    def _speed_file(self, rows: tuple[Row, ...]) -> Path:
        return self.path / f"speed-{short_hash(*(row.slug.encode() for row in rows))}.json"


def sampled(params: MARParams, row: Row, indices: np.ndarray, seed: int, options: argparse.Namespace):
    """[B, h, w, c] latents of the images of those numbers, whose classes take turns."""
    return marjax.sample_latents(
        params,
        jax.random.key(seed),
        indices % params.config.class_num,
        indices=indices,
        accel=row.accel,
        num_iter=row.num_iter,
        dtype=options.dtype,
    )


def generate(params: MARParams, rows: tuple[Row, ...], work: Work, options: argparse.Namespace) -> None:
    """Generates what is missing; headline rows first get as many images as the others."""
    passes = [(row, options.num_paired) for row in rows]
    passes += [(row, options.num_images) for row in rows if row.headline]
    for row, wanted in passes:
        arrays = work.load(row)
        done = len(arrays.get("images", ()))
        chunks = range(done, wanted, options.batch_size)
        for number, start in enumerate(tqdm(chunks, desc=row.name, disable=None)):
            latents = sampled(params, row, np.arange(start, start + options.batch_size), 0, options)
            images = np.asarray(np.round(to_images(params, latents, options.dtype) * 255), np.uint8)
            new = {"images": images, "latents": np.asarray(latents)}
            arrays = {**arrays, **{name: np.concatenate([arrays.get(name, x[:0]), x]) for name, x in new.items()}}
            if number % 5 == 4 or start + options.batch_size >= wanted:
                work.save(row, arrays)


def measure_speed(params: MARParams, rows: tuple[Row, ...], work: Work, options: argparse.Namespace) -> None:
    """Times a batch of every row."""
    indices = np.arange(options.batch_size)
    variants = {row.slug: lambda seed, row=row: sampled(params, row, indices, seed, options) for row in rows}
    interleaved(variants, options.repeats, after_round=lambda timings: work.save_speed(rows, timings))


if __name__ == "__main__":
    main()
