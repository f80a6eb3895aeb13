"""`marjax eval`: the quality of a model's images, against the test split of its data."""

from __future__ import annotations

import argparse
import json

import jax
import numpy as np

from marjax import checkpoint, metrics
from marjax.cli_options import add_model, add_sampling, image_shape, locate_model, positive
from marjax.cli_sample import Request, speed
from marjax.compilation import Stopwatch
from marjax.config import MARConfig
from marjax.data import open_source
from marjax.latents import LatentSource
from marjax.version import __version__

NEIGHBOURS = 3  # of precision and recall
FEW_IMAGES = 2000  # below, the bias of the Fréchet distance is larger than what it is to show

EXAMPLES = """examples:
  marjax eval --data fashion-mnist/
  marjax eval --data fashion-mnist/ --model runs/mine --num-iter 32 --cfg 1.5 | tail -n 1 > scores.json
"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `eval` to the command line."""
    parser = commands.add_parser(
        "eval",
        help="measure the quality of a model's images",
        description="Generate images of all classes in turn and compare them with the test split of the data, in the "
        "features of a classifier. The last line printed is one JSON document.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    add_model(parser)
    parser.add_argument("--data", required=True, help="directory of Fashion-MNIST's IDX files; the test split is used")
    parser.add_argument(
        "--num-images", type=positive, default=2000, metavar="N", help="images to generate (default: %(default)s)"
    )
    add_sampling(parser)


def run(args: argparse.Namespace) -> None:
    """Generates, measures, prints.

    Raises:
        ValueError, TypeError, OSError: on bad input, before anything is computed.
    """
    source = locate_model(args.model, args.weights)
    config = checkpoint.describe(source).config
    _check_model(config)
    size, _, channels = metrics.IMAGE_SHAPE
    real = open_source(args.data, split="test", img_size=size, channels=channels)
    if isinstance(real, LatentSource):
        raise ValueError(f"{args.data} holds cached latents; give the images that they were made of.")
    if min(args.num_images, len(real)) <= NEIGHBOURS:
        raise ValueError(
            f"--num-images {args.num_images} and {len(real)} test images: the metrics need at least "
            f"{NEIGHBOURS + 1} of each."
        )
    extractor, params = metrics.load_feature_extractor("fashion_mnist"), checkpoint.load(source)
    labels = (np.arange(args.num_images) % config.class_num).astype(np.int32)
    request, watch = Request.from_args(args, config, labels, args.num_images), Stopwatch()
    generated = np.concatenate([x for _, x in request.generate(params, np.arange(request.count), watch)])
    real_images, _ = real.get(np.arange(len(real)))
    scores = metrics.evaluate(generated, labels, real_images, extractor, NEIGHBOURS)
    table = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in scores.items()}
    for name, value in {**table, "speed": speed(request.count, watch)}.items():
        print(f"{name.replace('_', ' '):18}{value}")
    if request.count < FEW_IMAGES:
        print(f"note: of {request.count} images, the Fréchet distance is too large; compare equal numbers only")
    document = {
        **scores,
        **{"num_real_images": len(real), "seconds_per_image": watch.work_seconds / request.count},
        **{"compile_seconds": watch.compile_seconds, "model": source, "data": args.data},
        **{"extractor": "fashion_mnist", "k": NEIGHBOURS, "seed": request.seed, "batch_size": request.batch_size},
        **request.settings,
        **{"device": jax.devices()[0].device_kind, "num_devices": jax.local_device_count()},
        **{"jax": jax.__version__, "marjax": __version__},
    }
    print(json.dumps(document))


def _check_model(config: MARConfig) -> None:
    shape, classes = image_shape(config), config.class_num
    if (shape, classes) != (metrics.IMAGE_SHAPE, metrics.NUM_CLASSES):
        got, expected = (" x ".join(map(str, dims)) for dims in (shape, metrics.IMAGE_SHAPE))
        raise ValueError(
            f"The model generates {got} images of {classes} classes, but only the fashion_mnist feature extractor "
            f"ships, for {expected} images of {metrics.NUM_CLASSES} classes; evaluate other models with your own."
        )
