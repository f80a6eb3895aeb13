"""`marjax sample`: images into a grid or a directory. Also what `marjax eval` generates its images with."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from marjax import checkpoint, image_array, images
from marjax.accel import NAMES, resolve
from marjax.arguments import DEFAULT_BATCH_SIZE, label_list
from marjax.cli_options import (
    add_model,
    add_sampling,
    check_codec,
    check_writable,
    image_shape,
    locate_model,
    positive,
    sampling_settings,
)
from marjax.compilation import Stopwatch
from marjax.config import MARConfig
from marjax.data import IMAGE_EXTENSIONS
from marjax.header import Header
from marjax.sample import sample
from marjax.types import Array, MARParams

GRID_SUFFIX = ".png"
MANY_CLASSES = 100  # a model with more does not draw all by default

EXAMPLES = """examples:
  marjax sample                                              one image of every class, in grid.png
  marjax sample --labels "sneaker,bag,3" --out three.png     classes by name or number
  marjax sample --per-class 8 --seed 1 --cfg 3               a row of 8 images for every class
  marjax sample --accel marche:condition=on                  faster, with caches that change the images a little
  marjax sample --per-class 1000 --out samples/              a directory of PNGs; run it again to resume
  marjax sample --model mar_base --per-class 50 --out-npz samples.npz         50,000 images, as FID is computed on
  marjax sample --unconditional 16 --model runs/mine --weights raw
"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `sample` to the command line."""
    parser = commands.add_parser("sample", help="generate images", description="Generate images.", epilog=EXAMPLES)
    parser.set_defaults(run=run)
    add_model(parser)
    parser.add_argument(
        "--labels", metavar="A,B,...", help=f'class names and numbers, or "all" (default, up to {MANY_CLASSES} classes)'
    )
    parser.add_argument("--per-class", type=positive, metavar="N", help="images of each label (default: 1)")
    parser.add_argument("--unconditional", type=positive, metavar="N", help="N images of no given class")
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--out",
        default="grid.png",
        help="a .png for one grid, anything else for a directory of PNGs, which can be resumed (default: %(default)s)",
    )
    target.add_argument(
        "--out-npz",
        metavar="FILE",
        help="one array of all images and one of their labels, for evaluation suites; can be resumed",
    )
    add_sampling(parser)


@dataclasses.dataclass(frozen=True)
class Request:
    """Images to generate: image j is a function of (model, seed, j, its label, settings).

    Attributes:
        config: the model's configuration.
        labels: [N] int32, or None for unconditional images.
        count: N.
        seed: seed of orders and noise.
        batch_size: images computed at once.
        settings: the other arguments of `marjax.sample`.
    """

    config: MARConfig
    labels: np.ndarray | None
    count: int
    seed: int
    batch_size: int
    settings: dict[str, Any]

    @classmethod
    def from_args(cls, args: argparse.Namespace, config: MARConfig, labels: np.ndarray | None, count: int) -> Request:
        """Puts a request together, with every default spelled out.

        Raises:
            ValueError: if the model's images cannot be written.
        """
        settings = sampling_settings(args, config, conditional=labels is not None)
        request = cls(config, labels, count, args.seed, min(args.batch_size or DEFAULT_BATCH_SIZE, count), settings)
        images.check_channels(image_shape(config)[-1])
        return request

    @property
    def class_names(self) -> list[str]:
        """What to call each image."""
        if self.labels is None:
            return ["unconditional"] * self.count
        return [self.config.class_names[label] if self.config.class_names else str(label) for label in self.labels]

    def generate(
        self, params: MARParams, indices: np.ndarray, watch: Stopwatch
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Generates the images at `indices` under a progress bar.

        Args:
            params: the model.
            indices: [M] integers in [0, N), M >= 1.
            watch: times the sampling.

        Yields:
            Batches: indices [B] and images uint8 [B, H, W, C].
        """
        from tqdm import tqdm

        rng, total = jax.random.key(self.seed), len(indices)
        layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} images [{elapsed}{postfix}]"
        with tqdm(total=total, bar_format=layout, disable=None) as bar:  # None: only on a terminal
            for start in range(0, total, self.batch_size):
                # The last batch is filled up with copies of its last image, so that every batch has one shape.
                batch = indices[np.minimum(np.arange(start, start + self.batch_size), total - 1)]
                with watch:
                    pixels = np.asarray(self._sample(params, rng, batch))
                size = min(self.batch_size, total - start)
                bar.set_postfix_str(speed(start + size, watch), refresh=False)
                bar.update(size)
                yield batch[:size], images.to_uint8(pixels[:size])

    def _sample(self, params: MARParams, rng: Array, batch: np.ndarray) -> Array:
        labels = None if self.labels is None else self.labels[batch]
        return sample(params, rng, labels, indices=batch, batch_size=self.batch_size, **self.settings)


def speed(count: int, watch: Stopwatch) -> str:
    """What so many images took, for people."""
    return f"{count / watch.work_seconds:.3g} images/s, compilation {watch.compile_seconds:.1f} s"


def run(args: argparse.Namespace) -> None:
    """Generates what the command line asks for.

    Raises:
        ValueError, TypeError, OSError: on bad input, before anything is computed.
    """
    to_array = args.out_npz is not None
    if to_array and Path(args.out_npz).suffix != image_array.SUFFIX:
        raise ValueError(f"--out-npz {args.out_npz}: the name must end in {image_array.SUFFIX}.")
    to_grid = args.out.lower().endswith(GRID_SUFFIX)
    if not to_grid and Path(args.out).suffix.lower() in IMAGE_EXTENSIONS:
        raise ValueError(f"--out {args.out}: images are written as PNG; give a {GRID_SUFFIX} file or a directory.")
    source = locate_model(args.model, args.weights)
    header = checkpoint.describe(source)
    check_codec(header, args.model)
    request = Request.from_args(args, header.config, *_requested(args, header.config))
    if to_array:
        _sample_array(request, source, header, args.out_npz)
    elif to_grid:
        _sample_grid(request, source, args.out, columns=args.per_class)
    else:
        _sample_directory(request, source, header, args.out)


def _requested(args: argparse.Namespace, config: MARConfig) -> tuple[np.ndarray | None, int]:
    """Labels [N] int32 or None, and N."""
    if args.unconditional is not None:
        if args.labels is not None or args.per_class is not None:
            raise ValueError("--unconditional excludes --labels and --per-class; leave out either.")
        return None, args.unconditional
    if args.labels is None and args.per_class is None and config.class_num > MANY_CLASSES:
        raise ValueError(f"The model has {config.class_num} classes; choose some with --labels, or --labels all.")
    classes = label_list(config.class_names, config.class_num, "all" if args.labels is None else args.labels)
    if len(classes) * (args.per_class or 1) >= 2**31:
        raise ValueError(f"--per-class {args.per_class} of {len(classes)} labels: expected fewer than 2**31 images.")
    labels = np.repeat(np.array(classes, np.int32), args.per_class or 1)
    return labels, len(labels)


def _sample_grid(request: Request, source: str, out: str, *, columns: int | None) -> None:
    """One row per class, if there are several images of each."""
    check_writable(out)
    watch = Stopwatch()
    batches = request.generate(checkpoint.load(source), np.arange(request.count), watch)
    cells = np.concatenate([pixels for _, pixels in batches])
    images.write_png(out, images.make_grid(cells, None if columns == 1 else columns))
    print(f"{out}: {request.count} images ({speed(request.count, watch)})")


def _sample_array(request: Request, source: str, header: Header, out: str) -> None:
    shape = (request.count, *image_shape(request.config))
    with image_array.open_array(out, shape, request.labels, _identity(request, header)) as array:
        if array.complete:
            print(f"{out}: all {request.count} images were there already")
            return
        kept, watch = array.done, Stopwatch()
        if kept < request.count:
            for _, pixels in request.generate(checkpoint.load(source), np.arange(kept, request.count), watch):
                array.append(pixels)
        array.finish()
    print(f"{out}: {_written(request.count - kept, kept, watch)}")


def _sample_directory(request: Request, source: str, header: Header, out: str) -> None:
    shape, options = image_shape(request.config), _identity(request, header)
    directory = images.ImageDirectory(Path(out), request.class_names, shape, options)
    missing, watch = directory.missing(), Stopwatch()
    kept = request.count - len(missing)
    if not missing.size:
        print(f"{out}: all {kept} images were there already")
        return
    check_writable(directory.path / images.OPTIONS_FILE)
    for indices, pixels in request.generate(checkpoint.load(source), missing, watch):
        for index, image in zip(indices.tolist(), pixels, strict=True):
            directory.write(index, image)
    print(f"{out}: {_written(len(missing), kept, watch)}")


def _written(count: int, kept: int, watch: Stopwatch) -> str:
    return f"{count} images written, {kept} kept" + (f" ({speed(count, watch)})" if count else "")


def _identity(request: Request, header: Header) -> dict[str, Any]:
    """Everything that determines the images, as JSON values."""
    labels = None if request.labels is None else request.labels.tolist()
    facts = {"model": _fingerprint(header), "seed": request.seed, "count": request.count, "labels": labels}
    accel = resolve(request.settings["accel"])  # whatever words it was given in
    return {**facts, **request.settings, "accel": "none" if accel == NAMES["none"] else repr(accel)}


def _fingerprint(header: Header) -> str:
    """Names a model by its content, wherever it lies."""
    content = json.dumps([header.config.to_dict(), dict(header.digests)], sort_keys=True)
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"
