"""`marjax inpaint`: the masked part of a picture generated anew, once per label."""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import numpy as np

from marjax import checkpoint, images
from marjax.arguments import label_list
from marjax.cli_options import (
    add_model,
    add_sampling,
    check_codec,
    check_writable,
    image_shape,
    locate_model,
    sampling_settings,
)
from marjax.compilation import Stopwatch
from marjax.inpaint import inpaint

EXAMPLES = """examples:
  marjax inpaint --image shoe.png --mask upper-half.png --labels "ankle boot"
  marjax inpaint --image shoe.png --mask upper-half.png --labels all --seed 1 --out every-class.png

The mask is white (above half) where the picture is to be generated. The model generates whole tokens; of these, the
pixels that are not masked are put back as they were.
"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `inpaint` to the command line."""
    parser = commands.add_parser(
        "inpaint",
        help="generate part of a picture",
        description="Generate the masked part of a picture anew, once for each label.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    add_model(parser)
    parser.add_argument("--image", required=True, help="the picture, of the model's size")
    parser.add_argument("--mask", required=True, help="grey picture of the same size, white where to generate")
    parser.add_argument("--labels", metavar="A,B,...", help='class names and numbers, or "all" (default: no class)')
    parser.add_argument("--out", default="inpainted.png", help="PNG, a grid of several labels (default: %(default)s)")
    add_sampling(parser)


def run(args: argparse.Namespace) -> None:
    """Inpaints as the command line says.

    Raises:
        ValueError, TypeError, OSError: on bad input, before anything is computed.
    """
    source = locate_model(args.model, args.weights)
    header = checkpoint.describe(source)
    check_codec(header, args.model)
    config = header.config
    height, width, channels = image_shape(config)
    images.check_channels(channels)
    labels = None
    if args.labels is not None:
        labels = np.array(label_list(config.class_names, config.class_num, args.labels), np.int32)
    settings = sampling_settings(args, config, conditional=labels is not None)
    picture = images.read_image(args.image, (height, width, channels))
    mask = images.read_image(args.mask, (height, width, 1))[..., 0] >= 128
    if not mask.any():
        raise ValueError(f"--mask {args.mask} selects nothing; make white what is to be generated.")
    if Path(args.out).suffix.lower() != ".png":
        raise ValueError(f"--out {args.out}: pictures are written as PNG; give a .png file.")
    check_writable(args.out)
    params = checkpoint.load(source)
    if args.batch_size is not None:
        settings["batch_size"] = args.batch_size
    with Stopwatch() as watch:
        made = np.asarray(inpaint(params, jax.random.key(args.seed), labels, image=picture, mask=mask, **settings))
    pixels = images.to_uint8(made)
    images.write_png(args.out, images.make_grid(pixels) if len(pixels) > 1 else pixels[0])
    share = f"{mask.mean():.0%} of the picture"
    print(
        f"{args.out}: {len(pixels)} x {share} in {watch.work_seconds:.1f} s, compilation {watch.compile_seconds:.1f} s"
    )
