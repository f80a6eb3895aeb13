"""`marjax convert`: the reference's PyTorch files into marjax checkpoints, and back."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from marjax import checkpoint, conversion
from marjax.cli_options import add_fields, check_writable, locate_model
from marjax.config import MARConfig
from marjax.conversion import Report
from marjax.files import atomic_dir, atomic_write
from marjax.torch_files import WEIGHTS

FORMS = ("marjax", "safetensors")

EXAMPLES = """examples:
  marjax convert checkpoint-last.pth mar_base --vae kl16.ckpt --dtype bfloat16
  marjax convert mar-base.safetensors mar_base --vae kl16.ckpt
  marjax convert mine.safetensors mine --num-heads 8 --patch-size 1 --img-size 128
  marjax convert runs/mine mine.safetensors --to safetensors

Widths, depths and classes are read from the arrays. Heads, patch size and image size are not in them: they come from
the arguments stored in a .pth, from a preset with exactly the same arrays, or from the options below.
"""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Adds `convert` to the command line."""
    parser = commands.add_parser(
        "convert",
        help="convert PyTorch weights, or write them",
        description="Convert the reference's .pth, .ckpt or safetensors files into a marjax checkpoint, or a marjax "
        "model into safetensors files that the reference reads. A .pth needs PyTorch, and is read in its safe mode.",
        epilog=EXAMPLES,
    )
    parser.set_defaults(run=run)
    parser.add_argument("source", metavar="SOURCE", help="the file to convert; with --to safetensors, a marjax model")
    parser.add_argument("out", metavar="OUT", help="the checkpoint directory, or .safetensors file, to make")
    parser.add_argument("--to", choices=FORMS, default=FORMS[0], help="(default: %(default)s)")
    parser.add_argument("--weights", choices=WEIGHTS, help=f"(default: {WEIGHTS[0]}, where there is a choice)")
    parser.add_argument("--vae", metavar="FILE", help="the autoencoder's file to read, or to write")
    parser.add_argument("--vae-scale", type=float, metavar="X", help="1 / std of its latents (default: 0.2325)")
    parser.add_argument(
        "--dtype", choices=checkpoint.DTYPES, default=checkpoint.DTYPES[0], help="of matrices (default: %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--num-heads", type=int, metavar="N", help="of encoder and decoder (default: as detected)")
    add_fields(parser, MARConfig, default="as detected")


def run(args: argparse.Namespace) -> None:
    """Converts, and prints a report.

    Raises:
        ValueError, TypeError, OSError: on bad input; nothing is written then.
    """
    options = _options(args)
    common = {"vae": args.vae, "dtype": args.dtype, "overwrite": args.overwrite}
    if args.to == "safetensors":
        source = _model(args, options)
        for path in filter(None, (args.out, args.vae)):
            if Path(path).suffix != checkpoint.SUFFIX:
                raise ValueError(
                    f"Cannot write {path}: with --to safetensors its name must end in {checkpoint.SUFFIX}."
                )
            _check_target(path, args.overwrite)
        with _stages() as stage:
            report = conversion.to_reference(source, args.out, **common, stage=stage)
    else:
        _check_target(args.out, args.overwrite)
        extra = {"weights": args.weights, "vae_scale": args.vae_scale, "options": options}
        with _stages() as stage:
            report = conversion.to_checkpoint(args.source, args.out, **common, **extra, stage=stage)
    print("\n".join(_lines(report, args)))


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of MARConfig that were given."""
    names = [field.name for field in dataclasses.fields(MARConfig) if field.name != "vae"]
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.num_heads is not None:
        options = {"encoder_num_heads": args.num_heads, "decoder_num_heads": args.num_heads, **options}
    return options


def _model(args: argparse.Namespace, options: dict[str, Any]) -> str:
    """The model to write under the reference's names."""
    if options or args.vae_scale is not None:
        raise ValueError("--to safetensors writes a model as it is; leave out the options that describe one.")
    source = locate_model(args.source, None)
    if args.weights is None:
        return source
    if source == args.source:
        raise ValueError(f"--weights {args.weights}: '{source}' has one set of weights; leave it out.")
    return locate_model(args.source, dict(zip(WEIGHTS, checkpoint.RUN_MODELS, strict=True))[args.weights])


def _check_target(path: str, overwrite: bool) -> None:
    """Refuses what cannot be written, before the long work."""
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(f"Cannot write {path}: it exists; choose another name or give --overwrite.")
    is_file = Path(path).suffix == checkpoint.SUFFIX
    if not is_file:
        checkpoint.check_target(path, overwrite=overwrite)
    check_writable(path, atomic_write if is_file else functools.partial(atomic_dir, overwrite=overwrite))


@contextlib.contextmanager
def _stages() -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done, on a terminal."""
    from tqdm import tqdm

    with tqdm(bar_format="{desc} [{elapsed}]", leave=False, disable=None) as bar:
        yield bar.set_description_str


def _lines(report: Report, args: argparse.Namespace) -> Iterator[str]:
    config = report.config
    if report.num_params:
        size = f"{config.img_size} x {config.img_size} pixels, {config.class_num} classes, {config.seq_len} tokens"
        yield f"{args.out}: {report.preset or 'no preset'}, {size}"
    else:
        yield f"{args.out}: an autoencoder, {config.vae.embed_dim} channels, stride {config.vae_stride}"
    counts = {"MAR": report.num_params, "autoencoder": report.num_vae_params}
    texts = [f"{count:,} ({name})" for name, count in counts.items() if count]
    yield f"parameters: {' + '.join(texts)}, matrices in {args.dtype}"
    for path, used in report.sources.items():
        yield f"read: {used} from {path}"
    for path, checksum in report.checksums.items():
        yield f"checksum: sha256:{checksum} ({path})"
    for path, names in report.ignored.items():
        yield f"ignored: {', '.join(names)} in {path}"
