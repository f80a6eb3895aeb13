"""From a folder of images to cached latents, once, for training (reference `main_cache.py`).

    1. the directory is claimed: what is encoded is written to `progress.json`, or must be what is there already
    2. batches of images and their mirror images are encoded, appended to the moments, flushed to disk, and only then
       counted in `progress.json`
    3. the header is written last, which makes the cache complete

A run that was killed at any time is gone on with by the same call, and gives the same bytes. Images are known by name:
one that was replaced under its name after it was encoded is not encoded again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, shard_map
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marjax import codec, growing, vae
from marjax.checkpoint import tree_fingerprint
from marjax.config import VAEConfig
from marjax.data import ImageFolder
from marjax.files import atomic_write, locked
from marjax.latents import (
    CHECKSUMS_FILE,
    HEADER_FILE,
    LABELS_FILE,
    MOMENTS_FILE,
    PROGRESS_FILE,
    STORED_DTYPES,
    Encoding,
    LatentHeader,
    is_cache,
    read_header,
)
from marjax.types import DTYPES, Array, PyTree, cast_matrices
from marjax.vae import LatentStatistics


def encode_folder(
    source: ImageFolder,
    config: VAEConfig,
    params: PyTree,
    out: str | Path,
    *,
    batch_size: int = 64,
    compute_dtype: str = "float32",
    dtype: str = "float32",
    scale: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> LatentHeader:
    """Writes the cached latents of a folder of images, or goes on with those in `out`.

    Args:
        source: the images.
        config: configuration of the autoencoder.
        params: its weights, `vae.init`'s tree.
        out: directory of the cache; made if missing.
        batch_size: images encoded at once, over all local devices. (On resuming it may change; the same gives the
            same bits.)
        compute_dtype: of the autoencoder's products, "float32" or "bfloat16".
        dtype: of the stored moments, "float32" or "float16", which takes half the space.
        scale: what latents are to be multiplied by, usually `config.scale`; None for 1 / their standard deviation.
        progress: called with the number of images done so far, once at the start and then after each batch.

    Returns:
        The header of the complete cache.

    Raises:
        ValueError: if an argument is out of range, a file is no image, the moments do not fit `dtype`, or `out` holds
            another cache or something else, or is in use by another process.
        OSError: if the disk refuses (see `marjax.files`).
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be a positive integer.")
    for name, value, choices in (("compute_dtype", compute_dtype, DTYPES), ("dtype", dtype, STORED_DTYPES)):
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}.")
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale} must be a positive finite number, or None.")
    if source.img_size % config.stride:
        raise ValueError(f"img_size={source.img_size} must be a multiple of {config.stride}, the autoencoder's stride.")
    encoding = Encoding(
        **{"num_images": len(source), "img_size": source.img_size, "class_names": source.class_names},
        files=hashlib.sha256("\n".join(source.files).encode()).hexdigest(),
        **{"vae": config, "vae_fingerprint": tree_fingerprint(params)},
        **{"compute_dtype": compute_dtype, "dtype": dtype, "scale": scale},
    )
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"Cannot make the directory {out}: {error.strerror}; give another.") from error
    with locked(out):
        cache = _Cache.claim(out, encoding)
        if cache.done < len(source):
            params = cast_matrices(params, DTYPES[compute_dtype])
            cache = _fill(cache, source, params, batch_size, progress or (lambda done: None))
        return cache.finish(source.labels)


def _fill(
    cache: _Cache, source: ImageFolder, params: PyTree, batch_size: int, progress: Callable[[int], None]
) -> _Cache:
    """Encodes and stores what is missing. Images of the next batch are read while the devices encode this one."""
    devices, total = jax.local_devices(), len(source)
    size = math.ceil(min(batch_size, total) / len(devices)) * len(devices)
    encode, pending = _make_encoder(cache.encoding.vae, params, devices), None
    progress(cache.done)
    for start in range(cache.done, total, size):
        # The last batch is filled up with copies of its last image, so that every batch has one shape.
        images, _ = source.get(np.minimum(np.arange(start, start + size), total - 1))
        encoded = encode(images)
        if pending is not None:
            cache = cache.append(np.asarray(pending), source)
            progress(cache.done)
        pending = encoded
    cache = cache.append(np.asarray(pending), source)
    progress(cache.done)
    return cache


def _make_encoder(config: VAEConfig, params: PyTree, devices: list[jax.Device]) -> Callable[[np.ndarray], Array]:
    """The compiled function: images uint8 [B, H, W, 3] -> moments float32 [B, 2, h, w, 2c], split over the devices."""

    def encode(params: PyTree, images: Array) -> Array:
        pixels = codec.encode_pixels(images)
        both = jnp.stack([pixels, pixels[:, :, ::-1]])
        moments = lax.map(lambda x: jnp.concatenate(vae.encode(params, config, x), axis=-1), both)
        return jnp.moveaxis(moments, 0, 1)

    mesh, everywhere, split = Mesh(np.array(devices), ("batch",)), PartitionSpec(), PartitionSpec("batch")
    compiled = jax.jit(shard_map(encode, mesh=mesh, in_specs=(everywhere, split), out_specs=split, check_vma=False))
    params = jax.device_put(params, NamedSharding(mesh, everywhere))
    return lambda images: compiled(params, jax.device_put(images, NamedSharding(mesh, split)))


@dataclasses.dataclass(frozen=True)
class _Cache:
    """A cache of which the first `done` images are on disk.

    Attributes:
        path: its directory.
        encoding: what it is made of.
        done: images stored and recorded.
        statistics: of their latents.
    """

    path: Path
    encoding: Encoding
    done: int = 0
    statistics: LatentStatistics = LatentStatistics()

    @classmethod
    def claim(cls, path: Path, encoding: Encoding) -> _Cache:
        """Starts a cache, or takes up the one in `path`.

        Raises:
            ValueError: if `path` holds another cache, or something else.
        """
        if not is_cache(path) and any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise ValueError(f"{path} is not empty and holds no cached latents; give another directory.")
        cache = cls(path, encoding)
        if (path / HEADER_FILE).is_file():
            cache._check(read_header(path).encoding.to_dict())
            cache = dataclasses.replace(cache, done=encoding.num_images)
        elif (path / PROGRESS_FILE).is_file():
            before = growing.read_record(path / PROGRESS_FILE)
            if before["done"]:  # else nothing would be lost
                cache._check(before["encoding"])
                statistics = LatentStatistics(**before["statistics"])
                cache = dataclasses.replace(cache, done=before["done"], statistics=statistics)
        for leftover in path.glob(".tmp-*"):  # of a run that was killed while it wrote
            leftover.unlink()
        if not cache.done:
            cache._record()
        return cache

    def append(self, moments: np.ndarray, source: ImageFolder) -> _Cache:
        """Stores the moments of the next images, float32 [B, 2, h, w, 2c]; those beyond the last image are dropped.

        Raises:
            ValueError: if they are not finite.
        """
        moments = moments[: self.encoding.num_images - self.done]
        statistics = self.statistics.add(*np.split(moments, 2, axis=-1))
        with np.errstate(over="ignore"):  # infinite values are reported below
            stored = moments.astype(self.encoding.dtype)
        finite = np.isfinite(stored).all(axis=(1, 2, 3, 4))
        if not finite.all():
            name = source.files[self.done + int(np.argmin(finite))]
            raise ValueError(
                f"The latents of {name} are not finite in {self.encoding.dtype}; store them in float32, or check the "
                "autoencoder's weights."
            )
        sums = np.array([[zlib.crc32(side) for side in image] for image in stored], np.uint32)
        for name, array in ((MOMENTS_FILE, stored), (CHECKSUMS_FILE, sums)):
            growing.append(self.path / name, array, self.done, self.encoding.num_images)
        after = dataclasses.replace(self, done=self.done + len(stored), statistics=statistics)
        after._record()
        return after

    def finish(self, labels: np.ndarray) -> LatentHeader:
        """Completes the cache, if it is not complete."""
        file = self.path / HEADER_FILE
        if not file.is_file():
            with atomic_write(self.path / LABELS_FILE) as temporary:
                temporary.write_bytes(growing.npy_header(labels.dtype, labels.shape) + labels.tobytes())
            files = (self.path / name for name in (LABELS_FILE, CHECKSUMS_FILE))
            digests = {part.name: hashlib.sha256(part.read_bytes()).hexdigest() for part in files}
            header = LatentHeader(encoding=self.encoding, std=self.statistics.std, digests=digests)
            with atomic_write(file) as temporary:
                temporary.write_text(header.to_json(), encoding="utf-8")
        (self.path / PROGRESS_FILE).unlink(missing_ok=True)
        return read_header(self.path)

    def _record(self) -> None:
        values = {"encoding": self.encoding.to_dict(), "done": self.done}
        values["statistics"] = dataclasses.asdict(self.statistics)
        growing.write_record(self.path / PROGRESS_FILE, values)

    def _check(self, before: dict[str, Any]) -> None:
        now = self.encoding.to_dict()
        if changed := [name for name in now | before if now.get(name) != before.get(name)]:
            raise ValueError(
                f"{self.path} holds latents of another encoding (different: {', '.join(changed)}); give the same "
                "options and images to go on with it, or another directory."
            )
