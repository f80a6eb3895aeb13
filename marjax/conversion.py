"""Whole files from PyTorch's world to marjax and back: what `marjax convert` does.

    to_checkpoint   the reference's weights, and its autoencoder, into a marjax checkpoint
    to_reference    a marjax model into safetensors files with the reference's key names

Nothing is built twice: a source file is mapped, or read one tensor at a time, and let go before anything is written;
what is built of it are numpy arrays, which no device has to hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marjax import checkpoint, convert, convert_vae, detection, torch_files
from marjax.checkpoint import reporting
from marjax.config import MARConfig, VAEConfig
from marjax.files import sha256
from marjax.torch_files import WeightFile
from marjax.types import MARParams, PyTree, cast_matrices, count_params

READABLE = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What was converted.

    Attributes:
        preset: the preset that the model is, if any.
        config: its configuration.
        num_params: scalars in the transformer with its head; 0 for an autoencoder alone.
        num_vae_params: scalars in the autoencoder; 0 without one.
        checksums: what was written -> SHA-256, of a checkpoint's arrays (`marjax.checkpoint.fingerprint`) or of a file.
        sources: what was read -> what of it was used.
        ignored: what was read -> the entries that were not used.
    """

    preset: str | None
    config: MARConfig
    num_params: int
    num_vae_params: int
    checksums: Mapping[str, str]
    sources: Mapping[str, str]
    ignored: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Origin:
    """Where weights came from, as facts for provenance and report; the weights themselves are let go."""

    path: str
    weights: str | None
    epoch: int | None
    ignored: tuple[str, ...]

    @classmethod
    def of(cls, path: str, file: WeightFile) -> _Origin:
        return cls(path, file.weights, file.epoch, file.ignored)

    def provenance(self) -> dict[str, Any]:
        facts = {"file": Path(self.path).name, "sha256": sha256(Path(self.path)), "weights": self.weights}
        return {**facts, "epoch": self.epoch}


def to_checkpoint(
    source: str,
    out: str,
    *,
    weights: str | None = None,
    vae: str | None = None,
    vae_scale: float | None = None,
    dtype: str = "float32",
    options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    stage: Callable[[str], None] = lambda text: None,
) -> Report:
    """Converts the reference's files into a marjax checkpoint; it appears complete or not at all.

    Args:
        source: `.pth`, `.ckpt` or flat safetensors file of a MAR model, or of MAR's autoencoder alone.
        out: the checkpoint to make: a directory, or one file if the name ends in ".safetensors".
        weights: "model_ema" or "model"; None: model_ema where there is a choice.
        vae: file of the autoencoder to put with a MAR model.
        vae_scale: scale of the latents, None for the reference's.
        dtype: of the matrices, "float32" or "bfloat16".
        options: fields of MARConfig that the user gave (see `marjax.detection`).
        overwrite: replace an existing checkpoint.
        stage: called with what happens next.

    Raises:
        CheckpointError, ValueError, OSError: if a file cannot be read, is something else, does not fit, or leaves
            something open; or if `out` cannot be written.
    """
    stage(f"reading {source}")
    origins = {}
    if vae is None:
        params, origins["model"] = _read_any(source, weights, None, vae_scale, dtype, options)
    else:
        vae_config, vae_params, origins["vae"] = _read_vae(vae, vae_scale, dtype)
        params, origins["model"] = _read_any(source, weights, vae_config, vae_scale, dtype, options)
        params = params.replace(vae=vae_params)
    preset = None if params.mar is None else detection.preset_name(params.config)
    provenance = {"converted_from": {name: origin.provenance() for name, origin in origins.items()}}
    stage(f"writing {out}")
    save = checkpoint.save_file if Path(out).suffix == checkpoint.SUFFIX else checkpoint.save
    save(params, out, preset=preset, provenance=provenance, overwrite=overwrite)
    return Report(
        preset=preset,
        config=params.config,
        num_params=count_params(params.mar),
        num_vae_params=count_params(params.vae),
        checksums={out: checkpoint.fingerprint(params)},
        sources={origin.path: _used(origin) for origin in origins.values()},
        ignored={origin.path: origin.ignored for origin in origins.values() if origin.ignored},
    )


def to_reference(
    source: str,
    out: str,
    *,
    vae: str | None = None,
    dtype: str = "float32",
    overwrite: bool = False,
    stage: Callable[[str], None] = lambda text: None,
) -> Report:
    """Writes a marjax model under the reference's key names, as flat safetensors.

    Args:
        source: whatever `marjax.load` reads.
        out: the file to make, of the MAR model; of the autoencoder if there is nothing else.
        vae: file to make of the model's autoencoder; None leaves it out.
        dtype: of the matrices, "float32" or "bfloat16".
        overwrite: replace existing files.
        stage: called with what happens next.

    Raises:
        CheckpointError, ValueError, OSError: if the model cannot be read, has no autoencoder to write, or a file cannot
            be written.
    """
    stage(f"reading {source}")
    params = checkpoint.load(source)
    config = params.config
    if vae is not None and (params.vae is None or params.mar is None):
        missing = "autoencoder" if params.vae is None else "MAR model"
        raise ValueError(f"'{source}' has no {missing}, so there is nothing to write to two files; leave --vae out.")
    targets = {out: (params.mar, convert.mar_source)}
    if params.mar is None:
        targets = {out: (params.vae, convert_vae.vae_source)}
    elif vae is not None:
        if os.path.realpath(vae) == os.path.realpath(out):
            raise ValueError(f"The model and its autoencoder cannot both be written to {out}; give --vae another file.")
        targets[vae] = (params.vae, convert_vae.vae_source)
    with contextlib.ExitStack() as both:  # the files appear together, or none does
        for path, (tree, table) in targets.items():
            stage(f"writing {path}")
            arrays = jax.tree.map(np.asarray, cast_matrices(tree, jnp.dtype(dtype)))
            writer = torch_files.writing(path, dict(convert.tensors(arrays, table)), config, overwrite=overwrite)
            both.enter_context(writer)
    left_out = params.mar is not None and params.vae is not None and vae is None
    return Report(
        preset=None if params.mar is None else detection.preset_name(config),
        config=config,
        num_params=count_params(params.mar),
        num_vae_params=0 if left_out else count_params(params.vae),
        checksums={path: sha256(Path(path)) for path in targets},
        sources={source: "everything" if not left_out else "all but the autoencoder"},
        ignored={source: ("the autoencoder, which --vae FILE writes",)} if left_out else {},
    )


def _used(origin: _Origin) -> str:
    epoch = "" if origin.epoch is None else f" of epoch {origin.epoch}"
    return f"{origin.weights or 'all of it'}{epoch}"


def _read_any(
    source: str,
    weights: str | None,
    vae_config: VAEConfig | None,
    vae_scale: float | None,
    dtype: str,
    options: Mapping[str, Any] | None,
) -> tuple[MARParams, _Origin]:
    """A MAR model, or an autoencoder alone."""
    file = torch_files.read(source, weights)
    with reporting(f"Cannot convert '{source}'"):
        if detection.kind(file.state) == "vae":
            if vae_config is not None:
                raise ValueError("it is an autoencoder; give the MAR model first, and this file with --vae")
            if options:
                raise ValueError(f"it is an autoencoder, to which {', '.join(options)} mean nothing; leave them out")
            config, params = _vae(file, vae_scale, dtype)
            alone = MARConfig(vae=config, vae_embed_dim=config.embed_dim, vae_stride=config.stride)
            return MARParams(mar=None, vae=params, config=alone), _Origin.of(source, file)
        if vae_scale is not None and vae_config is None:
            raise ValueError("--vae-scale belongs to an autoencoder; give one with --vae")
        _check_dtypes(file)
        config = detection.detect_mar(
            file.shapes, options=options, args=file.args, recorded=file.config, vae=vae_config
        )
        tree = convert.fill(convert.mar_template(config), file.state, convert.mar_source, dtype)
        return MARParams(mar=tree, vae=None, config=config), _Origin.of(source, file)


def _read_vae(path: str, scale: float | None, dtype: str) -> tuple[VAEConfig, PyTree, _Origin]:
    file = torch_files.read(path)
    with reporting(f"Cannot convert '{path}'"):
        if detection.kind(file.state) != "vae":
            raise ValueError("it is a MAR model, expected MAR's autoencoder after --vae")
        return *_vae(file, scale, dtype), _Origin.of(path, file)


def _vae(file: WeightFile, scale: float | None, dtype: str) -> tuple[VAEConfig, PyTree]:
    if scale is None and file.config is not None and file.config.vae is not None:
        scale = file.config.vae.scale
    config = detection.detect_vae(file.shapes, scale)
    _check_dtypes(file)
    return config, convert.fill(convert_vae.vae_template(config), file.state, convert_vae.vae_source, dtype)


def _check_dtypes(file: WeightFile) -> None:
    wrong = [f"{key} has dtype {array.dtype}" for key, array in file.state.items() if array.dtype.name not in READABLE]
    if wrong:
        raise ValueError(f"{'; '.join(wrong[:3])}, expected {', '.join(READABLE)}")
