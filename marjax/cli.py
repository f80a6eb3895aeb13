"""The command line: parser, exit codes, and `marjax info`.

Bad input ends with exit code 2 and one sentence on stderr, a diverged training run or too little memory with 1, Ctrl-C
with 130. Anything else that goes wrong is a bug, and shows its traceback; with $MARJAX_TRACEBACK set, so do bad input
and too little memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax

from marjax import checkpoint, cli_convert, cli_encode, cli_eval, cli_inpaint, cli_sample, cli_train, mar
from marjax.cli_options import Parser, add_weights, dashed, locate_model
from marjax.compilation import use_persistent_cache
from marjax.config import PRESETS, MARConfig
from marjax.header import Header
from marjax.train import NonFiniteLossError
from marjax.types import count_params
from marjax.version import __version__

BAD_INPUT, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141

EPILOG = """examples:
  marjax sample --per-class 8 --out grid.png
  marjax train --data fashion-mnist/ --out runs/mine --epochs 20 --batch-size 64
  marjax eval --data fashion-mnist/ --model runs/mine
  marjax convert checkpoint-last.pth mar_base --vae kl16.ckpt
  marjax info

Options may be spelled with hyphens or underscores. Compiled programs are kept in $MARJAX_CACHE_DIR (default:
~/.cache/marjax). Set $MARJAX_TRACEBACK=1 to see where an error came from.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit code: 0, or what the module's description says.
    """
    if argv is None:  # the process is ours
        _quiet_libraries()
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser().parse_args(dashed(argv), argparse.Namespace(argv=argv))
        _use_cache()
        args.run(args)
        sys.stdout.flush()  # a closed pipe is noticed here, not while Python shuts down
    except SystemExit as done:  # --help and --version
        return done.code
    except NonFiniteLossError as error:
        return _fail(FAILED, error)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, TypeError, OSError) as error:
        if os.environ.get("MARJAX_TRACEBACK"):
            raise
        return _fail(BAD_INPUT, error)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or os.environ.get("MARJAX_TRACEBACK"):
            raise
        return _fail(FAILED, f"{str(error).partition(chr(10))[0]} Too little memory; lower --batch-size.")
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted.")
    return 0


def _fail(code: int, error: Exception | str) -> int:
    print("marjax:", " ".join(str(error).split()), file=sys.stderr)
    return code


def _quiet_libraries() -> None:
    """What orbax and tensorstore raise becomes one sentence; their logs and late callbacks would bury it in pages."""
    if os.environ.get("MARJAX_TRACEBACK"):
        return
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = hook


def _use_cache() -> None:
    try:
        use_persistent_cache()
    except (OSError, RuntimeError) as error:
        print(
            f"marjax: warning: compiled programs cannot be kept for the next run ({error}); "
            "set MARJAX_CACHE_DIR to a folder that can be written to.",
            file=sys.stderr,
        )


def _parser() -> Parser:
    parser = Parser(prog="marjax", description="Masked autoregressive image generation (MAR) in JAX.", epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"marjax {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (cli_sample, cli_inpaint, cli_encode, cli_train, cli_eval, cli_convert):
        module.add_command(commands)
    info = commands.add_parser(
        "info", help="describe a model, or list what there is", description="Describe a model and verify its checksums."
    )
    info.add_argument("model", nargs="?", metavar="MODEL", help="as --model of `marjax sample`; without it, a list")
    add_weights(info)
    info.set_defaults(run=_info)
    return parser


def _info(args: argparse.Namespace) -> None:
    if args.model is None:
        _list_models()
    else:
        _describe_model(locate_model(args.model, args.weights))


def _list_models() -> None:
    print("Presets:")
    for name, config in PRESETS.items():
        shapes = jax.eval_shape(functools.partial(mar.init, config), jax.random.key(0))
        print(f"  {name:15}{_size(config)}, {count_params(shapes) / 1e6:.3g}M parameters")
    print("Shipped models:")
    for name in checkpoint.SHIPPED:
        try:
            header = checkpoint.describe(name)
        except checkpoint.CheckpointError as error:
            print(f"  {name:15}unusable: {error}")
        else:
            print(f"  {name:15}{_size(header.config)}, {_count(header) / 1e6:.3g}M parameters")


def _describe_model(source: str) -> None:
    header = checkpoint.describe(source)
    kernels = sorted({leaf.dtype for name, leaf in header.leaves.items() if name.endswith("/kernel")})
    alone = not any(name.startswith("mar/") for name in header.leaves)
    print(f"{source}: {'an autoencoder alone' if alone else _size(header.config)}")
    print(f"parameters: {_count(header):,} (matrices in {', '.join(kernels)})")
    print(f"written by: marjax {header.marjax_version}")
    for title, values in (("config", dataclasses.asdict(header.config)), ("provenance", header.provenance)):
        print(f"{title}:")
        for name, value in values.items():
            print(f"  {name}: {value if isinstance(value, str) else json.dumps(value)}")
    sys.stdout.flush()
    checkpoint.load(source)  # reads and verifies everything
    print(f"checksums: {len(header.digests)} verified")


def _size(config: MARConfig) -> str:
    side = config.img_size
    return f"{side} x {side} pixels, {config.class_num} classes, {config.seq_len} tokens"


def _count(header: Header) -> int:
    return sum(math.prod(leaf.shape) for leaf in header.leaves.values())
