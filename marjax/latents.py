"""Cached latents: what an autoencoder made of every image of a folder and of its mirror image, on disk.

A cache is a directory of

    latents.json     the header, written last: a directory without it is incomplete, and is not read
    moments.npy      [N, 2, h, w, 2c] float32 or float16: of each image, then of its mirror image, the mean and the log
                     variance of the latents, in the halves of the last axis
    labels.npy       [N] int32
    checksums.npy    [N, 2] uint32, the CRC-32 of each [h, w, 2c] of the moments
    progress.json    only while the cache is being written (`marjax/encode.py`): what is encoded, and how far it got

Moments are mapped, never read as a whole: a batch reads its own rows and checks them. Everything else is checked when
the cache is opened.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from marjax.config import VAEConfig
from marjax.growing import NPY_HEADER, npy_header
from marjax.header import checksum
from marjax.version import __version__

FORMAT, FORMAT_VERSION = "marjax-latents", 1
HEADER_FILE, PROGRESS_FILE = "latents.json", "progress.json"
MOMENTS_FILE, LABELS_FILE, CHECKSUMS_FILE = "moments.npy", "labels.npy", "checksums.npy"
STORED_DTYPES = ("float32", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """What the content of a cache follows from: images, autoencoder, precision.

    Attributes:
        num_images: images (N); each is encoded twice, the second time mirrored left to right.
        img_size: side of the images in pixels.
        files: SHA-256 of the images' names, in order.
        class_names: name of each class; labels index it.
        vae: configuration of the autoencoder.
        vae_fingerprint: SHA-256 of its weights.
        compute_dtype: of the autoencoder's products, "float32" or "bfloat16".
        dtype: of the stored moments, "float32" or "float16".
        scale: what latents are to be multiplied by; None for 1 / their standard deviation.
    """

    num_images: int
    img_size: int
    files: str
    class_names: tuple[str, ...]
    vae: VAEConfig
    vae_fingerprint: str
    compute_dtype: str
    dtype: str
    scale: float | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the moments, [N, 2, h, w, 2c]."""
        side = self.img_size // self.vae.stride
        return self.num_images, 2, side, side, 2 * self.vae.embed_dim

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `from_dict` inverts it."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Encoding:
        """Inverts `to_dict`."""
        vae = VAEConfig(**{**values["vae"], "ch_mult": tuple(values["vae"]["ch_mult"])})
        return cls(**{**values, "class_names": tuple(values["class_names"]), "vae": vae})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentHeader:
    """What a complete cache says about itself.

    Attributes:
        encoding: what it was made of.
        std: standard deviation of the latents before they are scaled.
        digests: SHA-256 of each file but the moments.
        marjax_version: version of the package that finished it.
    """

    encoding: Encoding
    std: float
    digests: Mapping[str, str]
    marjax_version: str = __version__

    @property
    def scale(self) -> float:
        """What latents are multiplied by before they are tokens."""
        return 1.0 / self.std if self.encoding.scale is None else self.encoding.scale

    def to_json(self) -> str:
        """JSON text that carries a checksum of itself; it spells out shape and scale for other readers."""
        values = {
            **{"format": FORMAT, "format_version": FORMAT_VERSION, "marjax_version": self.marjax_version},
            **{"encoding": self.encoding.to_dict(), "shape": list(self.encoding.shape), "scale": self.scale},
            **{"std": self.std, "digests": dict(self.digests)},
        }
        return json.dumps({**values, "checksum": checksum(values)}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> LatentHeader:
        """Inverts `to_json`.

        Raises:
            ValueError: if the text is not such JSON, of another version, or altered. The message is a clause.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not readable JSON ({error})") from error
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError("is not the header of cached latents")
        if values.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"has format_version {values.get('format_version')!r}, expected {FORMAT_VERSION}")
        recorded = values.pop("checksum", None)
        if recorded != checksum(values):
            raise ValueError("does not match its checksum, so it was damaged or edited")
        encoding, version = Encoding.from_dict(values["encoding"]), values["marjax_version"]
        return cls(encoding=encoding, std=values["std"], digests=values["digests"], marjax_version=version)


class LatentSource:
    """Complete cached latents, as a source of training (see `marjax.data.Source`).

    Attributes:
        header: what the cache says about itself.
        fingerprint: SHA-256 that names its content.
        class_names: name of each class.
        vae: configuration of the autoencoder, with the scale that latents are to be multiplied by.
    """

    def __init__(self, path: str | Path):
        """Checks everything but the moments, which are checked row by row as they are read.

        Args:
            path: the cache's directory.

        Raises:
            ValueError: if the cache is incomplete, damaged, or of another version.
        """
        self._path = Path(path)
        self.header = read_header(self._path)
        encoding = self.header.encoding
        self.fingerprint = hashlib.sha256(self.header.to_json().encode()).hexdigest()
        self.class_names = encoding.class_names
        self.vae = dataclasses.replace(encoding.vae, scale=self.header.scale)
        self._labels = self._read(LABELS_FILE, np.int32, encoding.shape[:1])
        self._checksums = self._read(CHECKSUMS_FILE, np.uint32, encoding.shape[:2])
        self._moments = self._map(encoding.shape, np.dtype(encoding.dtype))

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def img_size(self) -> int:
        """Side in pixels of the images that were encoded."""
        return self.header.encoding.img_size

    def __len__(self) -> int:
        return len(self._labels)

    def get(self, indices: np.ndarray, mirrored: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Reads moments and labels.

        Args:
            indices: [B] int.
            mirrored: [B] bool, True to read those of the mirror image; None for none.

        Returns:
            Moments [B, h, w, 2c] in the stored dtype and labels [B] int32.

        Raises:
            ValueError: if moments are damaged.
        """
        sides = np.zeros(len(indices), int) if mirrored is None else mirrored.astype(int)
        with ThreadPoolExecutor() as pool:  # reading a page that is not in memory yet takes milliseconds
            rows = list(pool.map(self._row, indices.tolist(), sides.tolist()))
        return np.stack(rows), self._labels[indices]

    def _row(self, index: int, side: int) -> np.ndarray:
        row = np.array(self._moments[index, side])
        if zlib.crc32(row) != self._checksums[index, side]:
            raise ValueError(f"{self._path / MOMENTS_FILE} is damaged at image {index}; encode the images again.")
        return row

    def _read(self, name: str, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        file = self._path / name
        content = file.read_bytes() if file.is_file() else b""
        if hashlib.sha256(content).hexdigest() != self.header.digests.get(name):
            raise ValueError(f"{file} is damaged or missing; encode the images again.")
        return np.frombuffer(content, dtype, offset=NPY_HEADER).reshape(shape)

    def _map(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        file, start = self._path / MOMENTS_FILE, npy_header(dtype, shape)
        expected = len(start) + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        size = file.stat().st_size if file.is_file() else 0
        if size != expected:
            raise ValueError(f"{file} has {size} bytes, expected {expected}; encode the images again.")
        with file.open("rb") as opened:
            if opened.read(len(start)) != start:
                raise ValueError(f"{file} does not start as it was written, so it is damaged; encode the images again.")
        return np.memmap(file, dtype, mode="r", offset=len(start), shape=shape)


def is_cache(path: Path) -> bool:
    """Whether a directory holds cached latents, complete or not."""
    return any((path / name).is_file() for name in (HEADER_FILE, PROGRESS_FILE))


def read_header(path: Path) -> LatentHeader:
    """Reads the header of a complete cache.

    Raises:
        ValueError: if the cache is incomplete, or its header damaged or of another version.
    """
    file = path / HEADER_FILE
    if not file.is_file():
        raise ValueError(
            f"{path} holds no complete cache of latents; run the `marjax encode` command that started it again, which "
            "goes on where it stopped."
        )
    try:
        return LatentHeader.from_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} {error}; encode the images again.") from error
