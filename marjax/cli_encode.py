"""`marjax encode`: the latents of a folder of images, cached for training."""

from __future__ import annotations

import argparse
from pathlib import Path

from marjax.cli_options import load_vae, positive
from marjax.compilation import Stopwatch
from marjax.data import ImageFolder, open_source
from marjax.encode import encode_folder
from marjax.latents import STORED_DTYPES
from marjax.types import DTYPES

ESTIMATE = "estimate"

EXAMPLES = """examples:
  marjax encode --data imagenet/ --model mar-b/ --out latents/ --dtype bfloat16 --save-dtype float16
  marjax encode --data photos/ --model mine/ --out latents/ --img-size 128 --scale estimate
  marjax train --data latents/ --out runs/mar --preset mar_base

The same command goes on with a run that was interrupted.
"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `encode` to the command line."""
    parser = commands.add_parser(
        "encode",
        help="cache the latents of images for training",
        description="Encode every image of a folder, and its mirror image, with a model's autoencoder. What is stored "
        "is the distribution of the latents; training draws from it anew each time.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--data", required=True, help="directory of one directory of images per class")
    parser.add_argument("--model", required=True, help="checkpoint that carries the autoencoder")
    parser.add_argument("--out", required=True, help="directory of the latents; made if missing, gone on with if begun")
    parser.add_argument(
        "--split", default="train", help="which part of the data, if it has directories of parts (default: %(default)s)"
    )
    parser.add_argument(
        "--img-size", type=positive, default=256, metavar="N", help="crop images to this side (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=64, metavar="N", help="images encoded at once (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of products (default: %(default)s)")
    parser.add_argument(
        "--save-dtype", choices=STORED_DTYPES, default="float32", help="of what is stored (default: %(default)s)"
    )
    parser.add_argument(
        "--scale",
        type=_scale,
        metavar="X",
        help=f"latents are multiplied by this; `{ESTIMATE}` takes 1 / their standard deviation (default: the model's)",
    )


def run(args: argparse.Namespace) -> None:
    """Encodes as the command line says.

    Raises:
        ValueError, TypeError, OSError: on bad input.
    """
    from tqdm import tqdm

    source = open_source(args.data, split=args.split, img_size=args.img_size, channels=3)
    if not isinstance(source, ImageFolder):
        raise ValueError(f"{args.data} is no directory of one directory of images per class, which encoding needs.")
    if Path(args.out).resolve().is_relative_to(Path(args.data).resolve()):
        raise ValueError(f"--out {args.out} lies inside the images' directory; it would become a class of them.")
    config, params = load_vae(args.model)
    scale = config.scale if args.scale is None else args.scale
    counts: list[int] = []
    layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} images [{elapsed}<{remaining}]"
    with tqdm(total=len(source), bar_format=layout, disable=None) as bar, Stopwatch() as watch:

        def report(done: int) -> None:
            counts.append(done)
            bar.update(done - bar.n)

        header = encode_folder(
            source,
            config,
            params,
            args.out,
            batch_size=args.batch_size,
            compute_dtype=args.dtype,
            dtype=args.save_dtype,
            scale=None if scale == ESTIMATE else scale,
            progress=report,
        )
    total, shape = len(source), " x ".join(map(str, header.encoding.shape))
    if counts:
        new = counts[-1] - counts[0]
        speed = f"{new / watch.work_seconds:.3g} images/s, compilation {watch.compile_seconds:.1f} s"
        print(f"{args.out}: {new} images encoded, {total - new} kept ({speed})")
    else:
        print(f"{args.out}: all {total} images were encoded already")
    print(
        f"moments: {shape} in {args.save_dtype}; latents: standard deviation {header.std:.4g}, so that 1/std = "
        f"{1 / header.std:.4g}; scale: {header.scale:.4g}"
    )


def _scale(text: str) -> float | str:
    if text == ESTIMATE:
        return ESTIMATE
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number or `{ESTIMATE}`") from None
