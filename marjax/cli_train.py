"""`marjax train`: options from the configuration classes, a progress report, and the trained model in compact form."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from marjax import checkpoint, mar
from marjax.cli_options import add_fields, check_writable, image_shape, load_vae, locate_model, with_options
from marjax.compilation import Stopwatch
from marjax.config import IMAGENET_CLASSES, PRESETS, MARConfig, get_preset
from marjax.data import ImageFolder, Source, open_source
from marjax.latents import LatentSource, is_cache
from marjax.train import TrainConfig, train
from marjax.types import MARParams, PyTree, cast_matrices

DEFAULT_PRESET, LATENT_PRESET = "fashion_mnist", "mar_base"
IMAGENET_ENDS = ("n01440764", "n15075141")  # its first and last directory; their order is that of the labels

EXAMPLES = """examples:
  marjax train --data fashion-mnist/ --out runs/mine --batch-size 64 --epochs 20 --warmup-epochs 1 --lr 5e-4
  marjax train --data photos/ --out runs/photos --batch-size 64 --img-size 32 --vae-embed-dim 3 --class-num 5
  marjax train --data fashion-mnist/ --out runs/more --batch-size 64 --epochs 1 --warmup-epochs 0 --lr 1e-4 \\
      --init-from fashion_mnist --save-file more.safetensors
  marjax train --data latents/ --out runs/mar --preset mar_large --diffloss-d 3 --diffloss-w 1024 --remat

The same command resumes a run that was interrupted; with more --epochs it prolongs one. Defaults are the reference's,
for ImageNet on many GPUs: batches of 2048, of which each image counts 4 times (--diffusion-batch-mul), and 100 epochs
of warm-up.
"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `train` to the command line."""
    parser = commands.add_parser(
        "train",
        help="train a model, or resume",
        description="Train a model: of pixels on images, of latents on what `marjax encode` wrote. The run's directory "
        "holds its state, metrics.jsonl, and the models ema/ and raw/.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--data", required=True, help="directory of IDX files, of one directory of images per class, or of latents"
    )
    parser.add_argument("--out", required=True, help="directory of the run; made if missing, resumed if it has a run")
    base = parser.add_mutually_exclusive_group()
    base.add_argument(
        "--preset",
        help=f"model to start from: {', '.join(PRESETS)} (default: {DEFAULT_PRESET}, for latents {LATENT_PRESET})",
    )
    base.add_argument("--init-from", metavar="MODEL", help="model whose configuration and weights to start from")
    parser.add_argument(
        "--vae-path",
        metavar="MODEL",
        help="checkpoint whose autoencoder the latents come from: it is stored with the models, which then give images",
    )
    parser.add_argument("--save-file", metavar="FILE", help="also write the EMA model as one .safetensors file")
    parser.add_argument(
        "--save-dtype",
        choices=checkpoint.DTYPES,
        default="bfloat16",
        help="of the matrices in that file (default: %(default)s)",
    )
    add_fields(parser, TrainConfig)
    add_fields(parser, MARConfig, default="the preset's")


def run(args: argparse.Namespace) -> None:
    """Trains as the command line says.

    Raises:
        ValueError, TypeError, OSError: on bad input, before anything is computed.
        NonFiniteLossError: as `marjax.train.train`.
    """
    recipe = with_options(TrainConfig(), args)
    initial = None if args.init_from is None else checkpoint.load(locate_model(args.init_from, None))
    of_latents = is_cache(Path(args.data))
    base = get_preset(args.preset or (LATENT_PRESET if of_latents else DEFAULT_PRESET))
    if initial is not None:
        base = initial.config
    elif of_latents:
        base = dataclasses.replace(base, vae=None)  # the latents tell
    if args.class_num not in (None, base.class_num):
        base = dataclasses.replace(base, class_num=args.class_num, class_names=())  # those names were for other classes
    config = with_options(base, args)
    size, _, channels = image_shape(config)
    source = open_source(args.data, split="train", img_size=size, channels=channels)
    if isinstance(source, LatentSource) and (initial is None or config.vae is None):
        config = dataclasses.replace(config, vae=source.vae)
    if args.class_names is None:
        config = _named_classes(config, source, args)
    if initial is not None:
        initial = _trainable(initial, config)
    if args.save_file is not None:
        if Path(args.save_file).suffix != checkpoint.SUFFIX:
            raise ValueError(f"--save-file {args.save_file}: the name must end in {checkpoint.SUFFIX}.")
        check_writable(args.save_file)
    options = {} if initial is None else {"vae": initial.vae}
    if args.vae_path is not None:
        options["vae"] = load_vae(args.vae_path)[1]

    provenance = {"command": shlex.join(["marjax", *args.argv])}
    total, warmup = recipe.steps(recipe.epochs, len(source)), recipe.optimizer.warmup_epochs
    if warmup >= recipe.epochs:
        print(
            f"marjax: note: the learning rate still rises at the end: --warmup-epochs {warmup:g} are not less than the "
            f"--epochs {recipe.epochs:g}.",
            file=sys.stderr,
        )
    with Stopwatch() as watch, _progress(total) as progress:
        options |= {"init_from": initial, "provenance": provenance, "progress": progress}
        model = train(config, recipe, source, args.out, **options)
    facts = checkpoint.describe(Path(args.out, "ema")).provenance
    spent = datetime.timedelta(seconds=round(watch.seconds))
    print(f"{args.out}: at step {facts['step']} after {spent}, of which compilation {watch.compile_seconds:.1f} s")
    if args.save_file is not None:
        checkpoint.save_file(model, args.save_file, dtype=args.save_dtype, provenance=facts, overwrite=True)
        print(f"{args.save_file}: the EMA model, matrices in {args.save_dtype}")


def _named_classes(config: MARConfig, source: Source, args: argparse.Namespace) -> MARConfig:
    """Class directories name the classes, also those of latents; IDX files number them, so a named model names them."""
    if not isinstance(source, ImageFolder | LatentSource):
        return config if args.preset or args.init_from else dataclasses.replace(config, class_names=())
    names = source.class_names if source.num_classes == config.class_num else ()
    if len(names) == len(IMAGENET_CLASSES) and (names[0], names[-1]) == IMAGENET_ENDS:
        names = IMAGENET_CLASSES
    return dataclasses.replace(config, class_names=names)


def _trainable(initial: MARParams, config: MARConfig) -> MARParams:
    """Weights in float32, checked to be those of a model of configuration `config`."""
    expected = jax.eval_shape(functools.partial(mar.init, config), jax.random.key(0))
    if _shapes(expected) != _shapes(initial.mar):
        raise ValueError(
            "--init-from: the weights do not fit the options that change the model's shape; leave these out."
        )
    # A compact file holds its matrices in bfloat16.
    return initial.replace(mar=cast_matrices(initial.mar, jnp.float32), config=config)


def _shapes(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.shape, params)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[dict[str, float]], None]]:
    """A function that reports a line of metrics: as a bar on a terminal, as lines elsewhere."""
    from tqdm import tqdm

    layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} steps{postfix}"
    with tqdm(total=total, bar_format=layout, disable=None) as bar:

        def report(metrics: dict[str, float]) -> None:
            left = datetime.timedelta(seconds=round(metrics["eta_s"]))
            text = f"loss {metrics['loss']:.4f}, {metrics['images_per_s']:.3g} images/s, {left} left"
            if bar.disable:
                print(f"step {metrics['step']}/{total}: {text}", file=sys.stderr, flush=True)
            else:
                bar.set_postfix_str(text, refresh=False)
                bar.update(metrics["step"] - bar.n)

        yield report
