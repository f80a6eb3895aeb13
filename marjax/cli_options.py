"""What the commands share: the parser, options taken from dataclass fields, sampling options, model names."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import os
import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from marjax import accel, checkpoint
from marjax.arguments import DEFAULT_NUM_ITER, default_dtype, default_num_iter
from marjax.config import CFG_SCHEDULES, MARConfig, VAEConfig
from marjax.files import atomic_write
from marjax.header import Header
from marjax.types import DTYPES, PyTree


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ValueError, with one sentence, where argparse would print the usage and exit."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raises what is wrong with the command line as a ValueError."""
        raise ValueError(f"{message.removesuffix('.')}; `{self.prog} --help` lists the options.")


def dashed(argv: Sequence[str]) -> list[str]:
    """The command line with its options in their one spelling: `--num_iter=8` becomes `--num-iter=8`."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [_dashed(word) for word in argv[:end]] + list(argv[end:])


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def positive(text: str) -> int:
    """Type of options that count something."""
    if not text.isdecimal() or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive integer below 2**31")
    return int(text)


def seed(text: str) -> int:
    """Type of seeds: jax would cut off higher bits."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer from 0 to 2**32 - 1")
    return int(text)


# Options from the fields of a configuration.


def add_fields(parser: argparse.ArgumentParser, cls: type, *, default: str | None = None) -> None:
    """Adds an option for each field of a dataclass, and of the dataclasses it is made of.

    The field gives name and type, its entry under "Attributes:" in the docstring the help. Fields of other types (an
    optional dataclass) get no option. An option that is not given is None.

    Args:
        parser: where to add them, as a group.
        cls: the dataclass.
        default: what the help says about defaults. None: each field's own.
    """
    group = parser.add_argument_group(cls.__name__, (inspect.getdoc(cls) or "").partition("\n")[0])
    texts, hints = _field_texts(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            add_fields(parser, hint, default=default)
        elif kind := _kind(field.name, hint):
            text = f"{texts.get(field.name, '')} (default: {field.default if default is None else default})"
            group.add_argument(_dashed(f"--{field.name}"), help=text.strip().replace("%", "%%"), **kind)


def with_options(config: Any, args: argparse.Namespace) -> Any:
    """A dataclass instance with the options of `add_fields` that were given; the class checks the result."""
    changes = {}
    for field in dataclasses.fields(config):
        value, given = getattr(config, field.name), getattr(args, field.name, None)
        if dataclasses.is_dataclass(value):
            changes[field.name] = with_options(value, args)
        elif given is not None:
            changes[field.name] = given
    return dataclasses.replace(config, **changes)


def _kind(name: str, hint: Any) -> dict[str, Any] | None:
    """How argparse reads a field of this type; None for types that have no option."""
    if name == "seed":
        return {"type": seed, "metavar": "N"}
    kinds = {
        bool: {"action": argparse.BooleanOptionalAction},
        int: {"type": int, "metavar": "N"},
        float: {"type": float, "metavar": "X"},
        float | None: {"type": float, "metavar": "X"},
        str: {"metavar": "NAME"},
        tuple[str, ...]: {"type": _names, "metavar": "A,B,..."},
    }
    return kinds.get(hint)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()


def _field_texts(cls: type) -> dict[str, str]:
    """Field -> its description in the class's docstring."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    texts = {}
    for entry in re.split(r"\n(?= {4}\S)", section):
        names, _, text = " ".join(entry.split()).partition(": ")
        texts |= dict.fromkeys(names.split(", "), text.removesuffix("."))
    return texts


# Options of sampling.


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name a model."""
    shipped = ", ".join(checkpoint.SHIPPED)
    parser.add_argument(
        "--model",
        default=checkpoint.SHIPPED[0],
        help=f"a shipped model ({shipped}), a checkpoint, or a training run's directory (default: %(default)s)",
    )
    add_weights(parser)


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Adds the choice between the models of a training run."""
    default, other = checkpoint.RUN_MODELS
    text = f"which model of a training run's directory: {default} (default) or {other}"
    parser.add_argument("--weights", choices=checkpoint.RUN_MODELS, help=text)


def locate_model(model: str, weights: str | None) -> str:
    """What `checkpoint.load` should read: `model` itself, or the wanted weights in a training run's directory.

    Raises:
        ValueError: if weights are asked for where there is no choice.
    """
    is_run = model not in checkpoint.SHIPPED and all(Path(model, name).is_dir() for name in checkpoint.RUN_MODELS)
    if is_run:
        return os.fspath(Path(model, weights or checkpoint.RUN_MODELS[0]))
    if weights is not None:
        raise ValueError(
            f"--weights {weights} is for a training run's directory, which '{model}' is not; leave it out."
        )
    return model


def check_codec(header: Header, model: str) -> None:
    """Refuses a model that makes latents and lacks what turns them into images.

    Raises:
        ValueError: if so.
    """
    if header.config.vae is not None and not any(name.startswith("vae/") for name in header.leaves):
        raise ValueError(
            f"{model} makes latents and carries no autoencoder; convert it with --vae, or train it with --vae-path."
        )


def load_vae(model: str) -> tuple[VAEConfig, PyTree]:
    """Configuration and weights of the autoencoder of a checkpoint.

    Raises:
        ValueError: if it carries none.
        CheckpointError: as `checkpoint.load`.
    """
    params = checkpoint.load(locate_model(model, None))
    if params.vae is None:
        raise ValueError(f"{model} carries no autoencoder; give a checkpoint that does.")
    return params.config.vae, params.vae


def image_shape(config: MARConfig) -> tuple[int, int, int]:
    """(H, W, C) of a model's images."""
    return config.img_size, config.img_size, config.vae_embed_dim if config.vae is None else 3


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `marjax.sample`."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--seed", type=seed, default=0, metavar="N", help="(default: 0)")
    group.add_argument("--batch-size", type=positive, metavar="N", help="images computed at once (default: 64)")
    group.add_argument("--cfg", type=float, metavar="SCALE", help="guidance scale, 1 is none (default: the model's)")
    group.add_argument("--cfg-schedule", choices=CFG_SCHEDULES, help="(default: the model's)")
    group.add_argument(
        "--num-iter",
        type=int,
        metavar="N",
        help=f"decode steps (default: {DEFAULT_NUM_ITER}, or one per token if fewer)",
    )
    group.add_argument(
        "--num-sampling-steps",
        metavar="STEPS",
        help='diffusion steps per token: "100", "a,b,c" or "ddimN" (default: the model\'s)',
    )
    group.add_argument("--temperature", type=float, metavar="SCALE", help="of the noise (default: the model's)")
    group.add_argument(
        "--accel",
        default="none",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"caches: {', '.join(accel.NAMES)}, with options as in marche:budget=32,condition=on (default: none)",
    )
    group.add_argument(
        "--dtype", choices=DTYPES, help="of matrix products (default: float32 on CPU, bfloat16 elsewhere)"
    )


def sampling_settings(args: argparse.Namespace, config: MARConfig, *, conditional: bool) -> dict[str, Any]:
    """The keyword arguments of `marjax.sample` that determine the images, every default spelled out.

    Raises:
        ValueError: if the acceleration is unknown, or does not fit the model.
    """
    accel.resolve(args.accel).check(config)
    settings = {"accel": args.accel, "num_iter": args.num_iter, "dtype": args.dtype or default_dtype()}
    if args.num_iter is None:
        settings["num_iter"] = default_num_iter(config)
    for name in ("cfg", "cfg_schedule", "temperature", "num_sampling_steps"):
        given = getattr(args, name)
        settings[name] = getattr(config, name) if given is None else given
    if not conditional and args.cfg is None:
        settings["cfg"] = 1.0
    return settings


# Checks before long work.


class _EnoughError(Exception):
    """Ends a trial of writing."""


def check_writable(path: str | os.PathLike[str], writer: Callable = atomic_write) -> None:
    """Raises what `files.atomic_write`, or another such context manager, would raise, and leaves no trace."""
    with contextlib.suppress(_EnoughError), writer(path):
        raise _EnoughError
