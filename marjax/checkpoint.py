"""Checkpoints: a model's arrays together with the configuration that gives them meaning.

Two forms hold the same content:

    directory     `config.json` (the header) and `params/` (the arrays, written by orbax): `save`
    single file   `*.safetensors`, flat names like `mar/encoder_blocks/qkv/kernel`, header in the metadata: `save_file`

`load` reads either, and trusts neither:

1. The header must be ours, of a version we know, and match its own checksum.
2. The leaves it lists must be exactly those its configuration calls for: names, shapes, dtypes.
3. The stored content must match the header's SHA-256 digests, and the arrays must be those listed and finite.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from marjax import mar, vae
from marjax.config import PRESETS, MARConfig, get_preset
from marjax.files import atomic_dir, atomic_write, check_room, remove_leftovers, tensorstore_errors
from marjax.files import sha256 as _digest_file
from marjax.header import FORMAT, Header, Leaf
from marjax.types import MARParams, PyTree, cast_matrices

SHIPPED = ("fashion_mnist",)  # models in marjax/assets
SUFFIX = ".safetensors"
RUN_MODELS = ("ema", "raw")  # the checkpoints in a training run's directory
RUN_STATE = "state"  # what else it holds, from the start
DTYPES = ("float32", "bfloat16")  # of kernels; every other leaf is float32

_HEADER_FILE, _ARRAYS_DIR = "config.json", "params"


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names it and says what to do."""


def save(
    params: MARParams,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    preset: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a checkpoint directory; it appears complete or not at all.

    Args:
        params: the model.
        path: the directory to make; its parent must exist.
        dtype: "float32" or "bfloat16" casts the kernels; None keeps them. Other leaves are float32 always.
        preset: name of the preset that `params.config` comes from, kept for information.
        provenance: where the weights come from; JSON values only.
        overwrite: replace an existing checkpoint. A directory that holds anything else is refused.

    Raises:
        CheckpointError: if the model is not one that `load` would accept, or the name does not suit.
        FileExistsError: if `path` exists and `overwrite` is False.
        OSError: if the disk refuses (see `marjax.files`).
    """
    check_target(path, overwrite=overwrite)
    header, arrays = _pack(params, dtype, preset, provenance)
    with atomic_dir(path, overwrite=overwrite) as temporary:
        _write_arrays(temporary / _ARRAYS_DIR, arrays)
        files = (file for file in sorted((temporary / _ARRAYS_DIR).rglob("*")) if file.is_file())
        digests = {file.relative_to(temporary).as_posix(): _digest_file(file) for file in files}
        header = dataclasses.replace(header, digests=digests)
        (temporary / _HEADER_FILE).write_text(header.to_json(), encoding="utf-8")


def check_target(path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuses a name that no checkpoint directory should have, and to overwrite anything but a checkpoint.

    Raises:
        CheckpointError: as `save`.
    """
    directory = Path(path)
    if str(directory) in SHIPPED and not os.fspath(path).startswith("."):
        raise CheckpointError(f"Cannot write {path}: load would give the shipped model of that name; use ./{path}.")
    if directory.suffix == SUFFIX:
        raise CheckpointError(f"Cannot write {path}: save makes a directory; use save_file for a {SUFFIX} file.")
    if overwrite and directory.is_dir() and (names := {entry.name for entry in directory.iterdir()}):
        if others := names - {_HEADER_FILE, _ARRAYS_DIR}:
            raise CheckpointError(
                f"Cannot write {path}: overwriting would delete {min(others)}, which is in it; choose another name."
            )
        if not _is_ours(directory / _HEADER_FILE):
            raise CheckpointError(
                f"Cannot write {path}: it holds something else than a checkpoint; choose another name."
            )


def _is_ours(file: Path) -> bool:
    try:
        return json.loads(file.read_bytes())["format"] == FORMAT
    except (OSError, ValueError, TypeError, KeyError):
        return False


def save_file(
    params: MARParams,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    preset: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the compact form, one safetensors file; equal arguments give equal bytes.

    Args:
        params: the model.
        path: the file to make, ending in ".safetensors"; its folder must exist.
        dtype: as for `save`.
        preset: as for `save`.
        provenance: as for `save`.
        overwrite: replace an existing file.

    Raises:
        CheckpointError, FileExistsError: as for `save`.
        OSError: if the disk refuses (see `marjax.files`).
    """
    import safetensors.numpy

    if Path(path).suffix != SUFFIX:
        raise CheckpointError(f"Cannot write {path}: the name must end in {SUFFIX}; use save for a directory.")
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(f"Cannot write {path}: it exists; choose another name or ask to overwrite it.")
    header, arrays = _pack(params, dtype, preset, provenance)
    header = dataclasses.replace(header, digests={name: _digest(array) for name, array in arrays.items()})
    content = safetensors.numpy.save(arrays, metadata={FORMAT: header.to_json()})
    remove_leftovers(path)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def load(source: str | os.PathLike[str]) -> MARParams:
    """Reads a model, completely and strictly checked.

    Args:
        source: the name of a shipped model ("fashion_mnist"), a directory from `save`, or a file from `save_file`.
            A shipped name wins over a path of the same spelling; write "./fashion_mnist" for the path.

    Returns:
        The model on the default device, its kernels in the stored dtype.

    Raises:
        CheckpointError: if there is no such checkpoint, or anything about it is not as it should be.
    """
    with _located(source) as path, reporting(f"Cannot load '{source}'"), ThreadPoolExecutor(1) as thread:
        header = _read_header(path)
        # What is there is read while what should be there is traced, which takes over half a second for a large model.
        reading = thread.submit(_read_directory if path.is_dir() else _read_file, path, header)
        template = _check_leaves(header.leaves, header.config)
        arrays = reading.result()
        if _leaves(arrays) != header.leaves:
            raise ValueError("its arrays are not those that its header lists; get a fresh copy")
        _check_finite(arrays)
        # All at once, which is several times as fast as one by one.
        arrays = jax.device_put(arrays)
        tree = jax.tree_util.tree_map_with_path(lambda leaf, _: arrays[_name(leaf)], template)
        return MARParams(mar=tree["mar"], vae=tree["vae"], config=header.config)


def describe(source: str | os.PathLike[str]) -> Header:
    """Reads only the header of what `load` would read: configuration, provenance, shapes.

    Raises:
        CheckpointError: if there is no such checkpoint, or its header is not as it should be.
    """
    with _located(source) as path, reporting(f"Cannot load '{source}'"):
        header = _read_header(path)
        _check_leaves(header.leaves, header.config)
        return header


def fingerprint(params: MARParams) -> str:
    """SHA-256 of a model's arrays: their names, shapes, dtypes and contents."""
    return tree_fingerprint({"mar": params.mar, "vae": params.vae})


def tree_fingerprint(tree: PyTree) -> str:
    """SHA-256 of the arrays of a tree: their names, shapes, dtypes and contents."""
    arrays = {_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    facts = [f"{name} {array.dtype.name} {array.shape} {_digest(array)}" for name, array in sorted(arrays.items())]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


# Writing.


def _pack(
    params: MARParams, dtype: str | None, preset: str | None, provenance: Mapping[str, Any] | None
) -> tuple[Header, dict[str, np.ndarray]]:
    """A model as header (without digests) and named arrays, checked as `load` will check them."""
    if not isinstance(params, MARParams):
        raise CheckpointError(f"Cannot save a {type(params).__name__}; give a marjax.MARParams.")
    if dtype not in (None, *DTYPES):
        raise CheckpointError(f"Cannot save as dtype={dtype!r}; expected None or one of {', '.join(DTYPES)}.")
    if preset is not None:
        get_preset(preset)
    try:
        provenance = json.loads(json.dumps(dict(provenance or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"provenance must hold JSON values only ({error}); convert the others to text."
        ) from error
    tree = {"mar": params.mar, "vae": params.vae}
    if dtype is not None:
        tree = cast_matrices(tree, jnp.dtype(dtype))
    arrays = {_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    leaves = _leaves(arrays)
    with reporting("Cannot save these params"):
        _check_leaves(leaves, params.config)
        _check_finite(arrays)
    return Header(config=params.config, leaves=leaves, digests={}, preset=preset, provenance=provenance), arrays


class _Unchanging(np.ndarray):
    """An array that orbax may write as it is; of any other it makes a copy first, in case it changes meanwhile."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Unchanging:
        return self


def _write_arrays(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    check_room(directory, sum(array.nbytes for array in arrays.values()))
    # Weights hardly compress, and would be slower to load.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    with tensorstore_errors(directory), ocp.Checkpointer(handler) as checkpointer:
        views = {name: array.view(_Unchanging) for name, array in arrays.items()}
        checkpointer.save(directory, args=ocp.args.PyTreeSave(traverse_util.unflatten_dict(views, sep="/")))


# Reading.


@contextlib.contextmanager
def _located(source: str | os.PathLike[str]) -> Iterator[Path]:
    """The checkpoint that a shipped name or a path stands for, known to be a directory or a .safetensors file."""
    with contextlib.ExitStack() as stack:
        if source in SHIPPED:
            asset = resources.files("marjax") / "assets" / f"{source}{SUFFIX}"
            path = stack.enter_context(resources.as_file(asset))
        else:
            path = os.fspath(source)
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError as error:
            without = "it is a preset, of which no weights ship" if source in PRESETS else "no such path"
            raise CheckpointError(
                f"Cannot load '{source}': {without}; give a checkpoint directory, a {SUFFIX} file, "
                f"or the name of a shipped model ({', '.join(SHIPPED)})."
            ) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"Cannot load '{source}': the path is unusable ({error}); give another.") from error
        if not (stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and Path(path).suffix == SUFFIX)):
            raise CheckpointError(
                f"Cannot load '{source}': it is neither a checkpoint directory nor a {SUFFIX} file; "
                "convert PyTorch weights with `marjax convert`."
            )
        yield Path(path)


@contextlib.contextmanager
def reporting(prefix: str) -> Iterator[None]:
    """Turns an error whose message is a clause, or a sentence, into a CheckpointError that is a sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{prefix}: {str(error).removesuffix('.')}.") from error


def _read_header(path: Path) -> Header:
    if path.is_dir():
        if all((path / name).is_dir() for name in RUN_MODELS):
            raise ValueError(f"it is the directory of a training run; give {path / RUN_MODELS[0]}")
        if (path / RUN_STATE).is_dir():
            raise ValueError("it is the directory of a training run without a model yet; wait for its first checkpoint")
        try:
            return Header.from_json((path / _HEADER_FILE).read_bytes())
        except OSError as error:
            raise ValueError(
                f"its {_HEADER_FILE} cannot be read ({error.strerror}); give a directory that marjax.save wrote"
            ) from error
    with open_safetensors(path) as file:
        metadata = file.metadata() or {}
    if FORMAT not in metadata:
        raise ValueError("it was not written by marjax; convert PyTorch weights with `marjax convert`")
    return Header.from_json(metadata[FORMAT])


def _read_directory(path: Path, header: Header) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    _check_digests(header, lambda name: _digest_file(path / name) if (path / name).is_file() else None)
    with ocp.StandardCheckpointer() as checkpointer:
        # Without a target orbax gives what is stored, as numpy arrays: it neither casts nor reshapes.
        tree = checkpointer.restore((path / _ARRAYS_DIR).absolute())
    return traverse_util.flatten_dict(tree, sep="/")


def _read_file(path: Path, header: Header) -> dict[str, np.ndarray]:
    with open_safetensors(path) as file:
        names = file.keys()
        arrays = {name: file.get_tensor(name) for name in names}
    _check_digests(header, lambda name: _digest(arrays[name]) if name in arrays else None)
    return arrays


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """A safetensors file, opened by the library's own reader, which checks its header; errors are clauses."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"it is not a complete safetensors file ({error}), so it is truncated or damaged; get a fresh copy"
        ) from error


# Checks; each raises a ValueError that lists everything it found, as a clause.


@functools.lru_cache(maxsize=16)
def _template(config: MARConfig, with_mar: bool, with_vae: bool) -> tuple[PyTree, dict[str, jax.ShapeDtypeStruct]]:
    """The tree that `config` calls for (None for what is not asked for), and its leaves by name."""
    key = jax.random.key(0)
    template = {
        "mar": jax.eval_shape(functools.partial(mar.init, config), key) if with_mar else None,
        "vae": jax.eval_shape(functools.partial(vae.init, config.vae), key) if with_vae else None,
    }
    return template, {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(template)}


def _check_leaves(leaves: Mapping[str, Leaf], config: MARConfig) -> PyTree:
    """Compares names, shapes and dtypes with what `config` calls for, which is returned."""
    with_vae = config.vae is not None and any(name.startswith("vae/") for name in leaves)
    # Leaves of an autoencoder only are an autoencoder alone.
    with_mar = not with_vae or any(name.startswith("mar/") for name in leaves)
    template, expected = _template(config, with_mar, with_vae)
    problems = [f"{name} is missing" for name in expected if name not in leaves]
    problems += [f"{name} is not part of the model" for name in leaves if name not in expected]
    for name in (name for name in expected if name in leaves):
        shape, dtypes = expected[name].shape, DTYPES if name.endswith("/kernel") else DTYPES[:1]
        if leaves[name].shape != shape:
            problems.append(f"{name} has shape {leaves[name].shape}, expected {shape}")
        if leaves[name].dtype not in dtypes:
            problems.append(f"{name} has dtype {leaves[name].dtype}, expected {' or '.join(dtypes)}")
    if problems:
        raise ValueError(f"arrays and configuration do not fit: {'; '.join(problems)}; use the config they belong to")
    return template


def _check_digests(header: Header, digest: Callable[[str], str | None]) -> None:
    """Compares the header's digests with those of the content at hand, None where there is none."""
    if damaged := [name for name, expected in header.digests.items() if digest(name) != expected]:
        raise ValueError(f"{', '.join(damaged)} is damaged or missing; get a fresh copy")


def _check_finite(arrays: Mapping[str, np.ndarray]) -> None:
    if infinite := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
        raise ValueError(f"NaN or infinite values in {', '.join(infinite)}; use an earlier checkpoint")


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _leaves(arrays: Mapping[str, np.ndarray]) -> dict[str, Leaf]:
    return {name: Leaf(array.shape, array.dtype.name) for name, array in arrays.items()}


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()
