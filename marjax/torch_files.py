"""Weight files of the PyTorch world: reading `.pth` / `.ckpt` and safetensors, writing flat safetensors.

A file from elsewhere is trusted with nothing:

1. A `.pth` is a zip archive whose records carry checksums; they are compared first.
2. Its pickles may name the globals in `_ALLOWED` and no others, which is checked without executing them.
3. Then torch reads it, in its safe mode with `argparse.Namespace` (the reference stores its arguments as one) allowed
   and nothing else, and maps the file instead of loading it.
4. Of what comes out only tensors, and the arguments as plain values, are used.

Everything that a file can have wrong ends in one CheckpointError. This is the only module that imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pickle
import pickletools
import re
import stat
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from marjax.checkpoint import SUFFIX, open_safetensors, reporting
from marjax.config import MARConfig
from marjax.files import atomic_write, remove_leftovers

WEIGHTS = ("model_ema", "model")  # the reference's two sets of weights, the one for evaluation first
CONFIG = "marjax_config"  # metadata of the files that `write` makes: the model's configuration

_SETS = (*WEIGHTS, "state_dict")  # entries of a file that hold a state dict, in order of preference
_ZIP_MAGIC = b"PK\x03\x04"
# What files of torch.save refer to when they hold tensors, parameters, plain containers and the reference's arguments.
_ALLOWED = re.compile(
    r"torch\.(Float|Half|BFloat16|Double|Long|Int|Short|Char|Byte|Bool)Storage|torch\._utils\._rebuild_tensor_v2|"
    r"torch\._utils\._rebuild_parameter|collections\.OrderedDict|argparse\.Namespace"
)
# Safe mode itself could be broken out of before: GHSA-53q9-r3pm-6pq6 (2.6), GHSA-63cw-57p8-fm3p (2.10).
_OLDEST_TORCH = "2.10"
_DTYPES = {
    **{"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64, "BOOL": np.bool_},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8},
}


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in a file, read whenever `np.asarray` asks for it.

    Attributes:
        path: the file.
        offset: where in it, in bytes.
        shape: its shape.
        dtype: its dtype.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        array = np.fromfile(self.path, self.dtype, math.prod(self.shape), offset=self.offset).reshape(self.shape)
        return array if dtype is None else array.astype(dtype, copy=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFile:
    """One state dict of a file, and what the file says about it.

    Attributes:
        state: key -> array, or a `StoredArray`.
        weights: name of the entry that held it; None for a file that is nothing but a state dict.
        args: the arguments of the reference's training run, if there.
        epoch: the epoch it was saved in, if there.
        config: the configuration that `write` recorded, if there.
        ignored: names of the entries that were not used (the other weights, optimizer, scaler, ...).
    """

    state: Mapping[str, Any]
    weights: str | None = None
    args: Mapping[str, Any] | None = None
    epoch: int | None = None
    config: MARConfig | None = None
    ignored: tuple[str, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Key -> shape."""
        return {key: array.shape for key, array in self.state.items()}


def read(path: str | os.PathLike[str], weights: str | None = None) -> WeightFile:
    """Reads a `.pth` / `.ckpt` of `torch.save`, or a safetensors file; the content decides which it is.

    Args:
        path: the file.
        weights: "model_ema" or "model". None: model_ema if the file has it, otherwise what it has.

    Returns:
        The wanted state dict. Its arrays are views of the file: copy what must outlive it.

    Raises:
        CheckpointError: if the file cannot be read, safely and completely, or does not hold what is wanted.
    """
    with reporting(f"Cannot read '{path}'"):
        path = _regular_file(path)
        with path.open("rb") as file:
            start = file.read(9)
        if start.startswith(_ZIP_MAGIC):
            return _read_torch(path, weights)
        if start.endswith(b"{") or path.suffix == SUFFIX:
            return _read_safetensors(path, weights)
        raise ValueError(
            "it is neither a safetensors file nor a zip archive as torch.save has written since torch 1.6; get a fresh "
            "copy, or save it again with a newer torch"
        )


@contextlib.contextmanager
def writing(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], config: MARConfig, *, overwrite: bool = False
) -> Iterator[None]:
    """Context manager that writes a flat safetensors file, one tensor after the other; equal arguments, equal bytes.

    The file is written at once, and appears when the block ends without an error.

    Args:
        path: the file to make.
        tensors: key -> float32 or bfloat16 array, of any memory layout.
        config: stored in the metadata, so that `marjax convert` finds everything when the file comes back.
        overwrite: replace an existing file.

    Raises:
        FileExistsError, OSError: as `marjax.files.atomic_write`; FileExistsError also if the file exists.
    """
    if not overwrite and os.path.lexists(path):
        raise FileExistsError(f"Cannot write {path}: it exists; choose another name or ask to overwrite it.")
    names = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", CONFIG: json.dumps(config.to_dict())}}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[key] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    remove_leftovers(path)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
        file.flush()
        yield


# Everything below raises clauses.


def _regular_file(path: str | os.PathLike[str]) -> Path:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise ValueError("no such file") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"the path is unusable ({error})") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file; give a .pth, .ckpt or .safetensors file")
    if not status.st_size:
        raise ValueError("it is empty; get a fresh copy")
    return Path(path)


def _read_safetensors(path: Path, weights: str | None) -> WeightFile:
    _check_no_choice(weights)
    with open_safetensors(path) as file:
        metadata = file.metadata() or {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length), object_pairs_hook=_unique)
    header.pop("__metadata__", None)
    if unknown := {entry["dtype"] for entry in header.values()} - set(_DTYPES):
        raise ValueError(f"it has arrays of dtype {', '.join(sorted(unknown))}, expected F32, F16 or BF16")
    state = {
        key: StoredArray(
            path, 8 + length + entry["data_offsets"][0], tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]])
        )
        for key, entry in header.items()
    }
    return WeightFile(state=state, config=_recorded(metadata))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; repeated names would let two readers of the file see different arrays."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("its header lists a name twice; get a fresh copy")
    return values


def _recorded(metadata: Mapping[str, str]) -> MARConfig | None:
    if CONFIG not in metadata:
        return None
    try:
        return MARConfig.from_dict(json.loads(metadata[CONFIG]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the configuration in its metadata is damaged ({error}); get a fresh copy") from error


def _check_no_choice(weights: str | None) -> None:
    if weights is not None:
        raise ValueError(f"it holds one set of weights, so there is no {weights} to choose; leave --weights out")


def _read_torch(path: Path, weights: str | None) -> WeightFile:
    torch = _import_torch()
    _check_archive(path)
    if path.suffix == SUFFIX:  # which torch itself goes by
        raise ValueError("it is a file of torch.save with another name; rename it to .pth")
    with _parsing("torch cannot read it safely"), _namespace_only(torch), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of what it then refuses
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"it holds a {type(content).__name__}, expected a dictionary of weights")
    size = path.stat().st_size
    if any(isinstance(value, torch.Tensor) for value in content.values()):
        _check_no_choice(weights)
        return WeightFile(state=_arrays(torch, content, size))
    there = [name for name in _SETS if isinstance(content.get(name), dict)]
    if not there:
        raise ValueError(f"it has no {' or '.join(_SETS)}, only {', '.join(content) or 'nothing'}")
    if weights not in (None, *there):
        raise ValueError(f"it has no {weights}, only {', '.join(there)}; leave --weights out")
    name, args, epoch = weights or there[0], content.get("args"), content.get("epoch")
    return WeightFile(
        state=_arrays(torch, content[name], size),
        weights=name,
        args=vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, dict) else None,
        epoch=epoch if isinstance(epoch, int) else None,
        ignored=tuple(other for other in content if other not in (name, "args")),
    )


def _import_torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise ValueError('reading it needs PyTorch; run pip install "marjax[convert]"') from error
    if torch.__version__ < _OLDEST_TORCH:
        raise ValueError(
            f"the safe mode of torch {torch.__version__} is not safe, {_OLDEST_TORCH} or newer is needed; run "
            'pip install -U "marjax[convert]"'
        )
    return torch


@contextlib.contextmanager
def _namespace_only(torch: ModuleType) -> Iterator[None]:
    """Safe mode with `argparse.Namespace` allowed, and nothing that someone else may have registered."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([argparse.Namespace])
    try:
        yield
    finally:
        # Modules of torch that were imported meanwhile may have registered their own.
        others = set(torch.serialization.get_safe_globals()) - {argparse.Namespace}
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([*before, *others])


@contextlib.contextmanager
def _parsing(failure: str) -> Iterator[None]:
    """Turns whatever a parser raises over a hostile file, of which there is no list, into one clause."""
    try:
        yield
    except Exception as error:
        # torch's own sentence about its safe mode recommends to leave it.
        text = "" if isinstance(error, pickle.UnpicklingError) else f": {str(error).strip()}"
        reason = f"{type(error).__name__}{text}".partition("\n")[0][:200]
        raise ValueError(f"{failure} ({reason}); get a fresh copy") from error


def _check_archive(path: Path) -> None:
    """Compares every record with its checksum, and the globals of every pickle with those allowed."""
    with _parsing("it is not a complete zip archive"), zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"its record {damaged} does not match its checksum; get a fresh copy")
    if len({record.filename for record in records}) < len(records):
        raise ValueError("it has two records of one name; get a fresh copy")
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("its records are compressed, which torch.save never does; get a fresh copy")
    with _parsing("its pickle is damaged"), zipfile.ZipFile(path) as archive:
        pickles = [archive.read(record) for record in records if record.filename.endswith(".pkl")]
        names = {name for data in pickles for name in _global_names(data)}
    if foreign := sorted(name for name in names if not _ALLOWED.fullmatch(name)):
        raise ValueError(
            f"it refers to {', '.join(foreign[:5])}, where only tensors, plain containers and argparse.Namespace are "
            "read; do not open it by other means unless you trust where it comes from"
        )


def _global_names(data: bytes) -> Iterator[str]:
    """What a pickle refers to, by name or by a way of its own; nothing is executed."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("GLOBAL", "INST"):
            yield argument.replace(" ", ".")
        elif opcode.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            yield f"something by {opcode.name}"


def _arrays(torch: ModuleType, tensors: Mapping[str, Any], size: int) -> dict[str, np.ndarray]:
    """Views of tensors, which together cannot be larger than their file: strides could make much of little."""
    arrays = {}
    for key, tensor in tensors.items():
        if not isinstance(key, str):
            raise ValueError(f"its entry {key!r} has no name")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise ValueError(f"its entry {key} is a {type(tensor).__name__}, expected a tensor")
        tensor = tensor.detach().resolve_neg()
        narrow = tensor.dtype == torch.bfloat16  # which numpy knows through ml_dtypes only
        arrays[key] = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if narrow else tensor.numpy()
    if sum(array.nbytes for array in arrays.values()) > size:
        raise ValueError("its tensors are larger than the file; get a fresh copy")
    return arrays
