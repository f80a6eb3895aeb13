"""MNIST-family IDX files: images and labels of unsigned bytes, gzipped or not."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

IDX_SPLITS = {"train": "train", "test": "t10k"}  # split -> first part of the standard file names
IDX_UINT8 = 0x08  # type code of unsigned bytes, the only one MNIST-family files use


def load_idx(path_or_dir: str | Path, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Reads images and labels from MNIST-family IDX files, gzipped or not.

    Args:
        path_or_dir: a directory with the standard names (`train-images-idx3-ubyte`, `t10k-labels-idx1-ubyte.gz`, ...),
            or one images file, whose labels file lies beside it (and then `split` is not used).
        split: "train" or "test".

    Returns:
        Images uint8 [N, H, W, C] and labels int32 [N].

    Raises:
        FileNotFoundError: if a file is missing; the message lists the names looked for.
        ValueError: on an unknown split, or a damaged or foreign file; the message names path, expected and got.
    """
    path = Path(path_or_dir)
    if path.is_dir():
        if split not in IDX_SPLITS:
            raise ValueError(f"split={split!r} must be one of {', '.join(IDX_SPLITS)} for IDX files.")
        images_path = _existing(path / f"{IDX_SPLITS[split]}-images-idx3-ubyte")
    else:
        images_path = _existing(path)
    plain_name = images_path.name.removesuffix(".gz")
    if "images-idx3" not in plain_name:
        raise ValueError(f"{images_path}: expected an images file named like train-images-idx3-ubyte[.gz].")
    labels_path = _existing(images_path.with_name(plain_name.replace("images-idx3", "labels-idx1")))
    images, labels = _read_idx(images_path, ndims=(3, 4)), _read_idx(labels_path, ndims=(1,))
    if len(images) != len(labels):
        raise ValueError(f"{labels_path}: expected {len(images)} labels, as many as images, got {len(labels)}.")
    return images.reshape(*images.shape[:3], -1), labels.astype(np.int32)


def _existing(path: Path) -> Path:
    """`path`, or its gzipped or plain twin, whichever exists."""
    twin = path.with_suffix("") if path.suffix == ".gz" else path.with_name(path.name + ".gz")
    for candidate in (path, twin):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"Neither {path} nor {twin.name} exists there.")


def _read_idx(path: Path, ndims: tuple[int, ...]) -> np.ndarray:
    """Reads one IDX file of unsigned bytes: two zero bytes, type, number of dimensions, big-endian sizes, data."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path}: expected a whole gzip file, got a damaged one ({error}).") from error
    magics = [bytes((0, 0, IDX_UINT8, ndim)) for ndim in ndims]
    if data[:4] not in magics:
        expected = " or ".join(magic.hex() for magic in magics)
        raise ValueError(f"{path}: expected an IDX file starting with {expected}, got {data[:4].hex() or 'no data'}.")
    header = 4 + 4 * data[3]
    if len(data) < header:
        raise ValueError(f"{path}: expected an IDX header of {header} bytes, got a file of {len(data)}.")
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", count=data[3], offset=4))
    if len(data) != header + math.prod(shape):
        raise ValueError(f"{path}: expected {header + math.prod(shape)} bytes for shape {shape}, got {len(data)}.")
    if not math.prod(shape):
        raise ValueError(f"{path}: expected at least one image or label, got shape {shape}.")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)
