"""Image sources for training and evaluation, and the one deterministic stream of batches drawn from them.

A source holds uint8 images and int32 labels; `open_source` decides by looking whether a path holds MNIST-family IDX
files or one directory of images per class. Images stay uint8 here: the mapping to [-1, 1] belongs to the model's codec.
"""

from __future__ import annotations

import dataclasses
import gzip
import math
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

IDX_SPLITS = {"train": "train", "test": "t10k"}  # split -> first part of the standard file names
IDX_UINT8 = 0x08  # type code of unsigned bytes, the only one MNIST-family files use
IMAGE_EXTENSIONS = frozenset((".bmp", ".jpeg", ".jpg", ".png", ".webp"))
IMAGE_MODES = {1: "L", 3: "RGB"}  # channels -> Pillow's name for 8-bit pixels


class ImageSource(Protocol):
    """What training and evaluation ask of a data set."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class; labels index it."""

    @property
    def num_classes(self) -> int:
        """Number of classes; labels lie in [0, num_classes)."""

    def __len__(self) -> int:
        """Number of images."""

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads images [B, H, W, C] uint8 and labels [B] int32 at int `indices` [B]."""


@dataclasses.dataclass(frozen=True, eq=False)
class ArraySource:
    """Images held in memory.

    Attributes:
        images: [N, H, W, C] uint8.
        labels: [N] integers in [0, len(class_names)); kept as int32.
        class_names: name of each class.

    Raises:
        ValueError: if shapes, types or label range do not fit.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]

    def __post_init__(self):
        images, labels, classes = self.images, self.labels, len(self.class_names)
        if images.dtype != np.uint8 or images.ndim != 4 or not len(images):
            raise ValueError(f"images must be uint8 [N, H, W, C] with N >= 1, got {images.dtype} {images.shape}.")
        if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(
                f"labels must be integers [{len(images)}], one per image, got {labels.dtype} {labels.shape}."
            )
        if labels.min() < 0 or labels.max() >= classes:
            raise ValueError(f"labels span [{labels.min()}, {labels.max()}], expected [0, {classes}) for class_names.")
        object.__setattr__(self, "labels", labels.astype(np.int32))

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.images)

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reads images [B, H, W, C] uint8 and labels [B] int32 at int `indices` [B]."""
        return self.images[indices], self.labels[indices]


class ImageFolder:
    """One directory of images per class, decoded when asked for and centre-cropped as in ADM.

    As in the reference, orientation tags (EXIF) are not applied, and an alpha channel is dropped.

    Directory names in sorted order give `class_names` and the labels. Files whose extension is not in
    `IMAGE_EXTENSIONS` are not images and are ignored.
    """

    def __init__(self, path: str | Path, img_size: int, channels: int = 3):
        """Lists the images; decodes none.

        Args:
            path: directory that holds one directory per class.
            img_size: side in pixels images are cropped to.
            channels: 3 reads RGB, 1 reads grey.

        Raises:
            FileNotFoundError: if `path` is no directory.
            ValueError: on a bad size or channel count, if there is no class directory, or one without images.
        """
        path = Path(path)
        if img_size < 1:
            raise ValueError(f"img_size={img_size} must be a positive integer.")
        if channels not in IMAGE_MODES:
            raise ValueError(f"channels={channels} must be 1 (grey) or 3 (RGB) for a folder of images.")
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a directory; expected one directory of images per class.")
        directories = _class_directories(path)
        if not directories:
            raise ValueError(f"{path} has no class directories; expected one directory of images per class.")
        files = [_image_files(directory) for directory in directories]
        empty = [directory.name for directory, found in zip(directories, files, strict=True) if not found]
        if empty:
            raise ValueError(
                f"{path}: no images in class directories {', '.join(empty[:5])}{', ...' if empty[5:] else ''}; "
                f"expected files ending in {', '.join(sorted(IMAGE_EXTENSIONS))}. Add images or remove the directories."
            )
        self.class_names = tuple(directory.name for directory in directories)
        self._img_size, self._mode = img_size, IMAGE_MODES[channels]
        self._files = [file for found in files for file in found]
        self._labels = np.repeat(np.arange(len(files), dtype=np.int32), [len(found) for found in files])

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self._files)

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Decodes images [B, img_size, img_size, C] uint8 and reads labels [B] int32 at int `indices` [B].

        Raises:
            ValueError: if a file cannot be decoded; the message names it.
        """
        with ThreadPoolExecutor() as pool:  # Pillow decodes and resizes outside the interpreter lock
            images = list(pool.map(self._decode, [self._files[index] for index in indices]))
        return np.stack(images), self._labels[indices]

    def _decode(self, file: Path) -> np.ndarray:
        from PIL import Image

        try:
            with Image.open(file) as image:
                if image.mode[0] in "IF":
                    raise OSError(f"mode {image.mode}: more than 8 bits per channel, which conversion would cut off")
                pixels = center_crop(image.convert(self._mode), self._img_size)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(
                f"{file} cannot be decoded as an image ({error}); replace it, or remove it before a run begins."
            ) from error
        return pixels[:, :, None] if pixels.ndim == 2 else pixels


def center_crop(image: Image.Image, size: int) -> np.ndarray:
    """ADM's centre crop, which the reference trains on (`util/crop.py`, from openai/guided-diffusion).

    1. Halve with a box filter while the shorter side is at least twice `size`.
    2. Resize bicubically so that the shorter side is `size`.
    3. Cut the central `size` x `size` square.

    Args:
        image: any 8-bit image.
        size: side of the result in pixels.

    Returns:
        uint8 [size, size, C], or [size, size] for a grey image.
    """
    from PIL import Image

    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = size / min(image.size)
    width, height = round(image.width * scale), round(image.height * scale)
    pixels = np.asarray(image.resize((width, height), resample=Image.Resampling.BICUBIC))
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[top : top + size, left : left + size]


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


def open_source(path: str | Path, *, split: str, img_size: int, channels: int) -> ImageSource:
    """Opens a directory of IDX files or of class directories, and checks that it suits the model.

    IDX files are used as they are, so their size must be the model's; images of a folder are cropped to it. Class
    directories are looked for in `path/split` if that holds directories, else in `path` itself, which then is the
    data of every split.

    Args:
        path: the directory.
        split: "train", "test", or for folders any name.
        img_size: the model's image side in pixels.
        channels: the model's image channels.

    Returns:
        An `ArraySource` or an `ImageFolder`.

    Raises:
        FileNotFoundError: if `path` is missing or holds neither kind of data.
        ValueError: if the images do not suit the model, or on the causes named at `load_idx` and `ImageFolder`.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a directory of IDX files or of class directories.")
    if path.is_file() or any(path.glob("*-images-idx3-ubyte*")):
        images, labels = load_idx(path, split)
        if images.shape[1:] != (img_size, img_size, channels):
            got = " x ".join(map(str, images.shape[1:]))
            raise ValueError(
                f"{path}: images are {got}, the model expects {img_size} x {img_size} x {channels}; use a model with "
                "these dimensions, or convert the images to a directory per class, which is resized when read."
            )
        return ArraySource(images, labels, tuple(map(str, range(int(labels.max(initial=0)) + 1))))
    if not _class_directories(path):
        raise FileNotFoundError(
            f"{path} holds neither IDX files (train-images-idx3-ubyte[.gz], ...) nor one directory of images per class."
        )
    inner = path / split
    return ImageFolder(inner if inner.is_dir() and _class_directories(inner) else path, img_size, channels)


def batches(
    source: ImageSource, batch_size: int, seed: int, start_step: int = 0, *, flip: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless batches; batch `step` is a function of (seed, step) alone, so training resumes exactly.

    Epoch e is the permutation drawn from `default_rng([seed, e])`; batch `step` takes the positions
    [step * batch_size, (step + 1) * batch_size) of the epochs laid end to end, so a batch may straddle epochs.

    Args:
        source: where images come from.
        batch_size: images per batch (B).
        seed: non-negative.
        start_step: the step of the first batch.
        flip: mirror each image left to right with probability 1/2.

    Returns:
        An iterator over images uint8 [B, H, W, C] and labels int32 [B].

    Raises:
        ValueError: on an empty source or numbers out of range.
    """
    if not len(source):
        raise ValueError("The image source is empty; expected at least one image.")
    for name, value, low in (("batch_size", batch_size, 1), ("seed", seed, 0), ("start_step", start_step, 0)):
        if value < low:
            raise ValueError(f"{name}={value} must be an integer >= {low}.")
    return _batches(source, batch_size, seed, start_step, flip)


def _batches(
    source: ImageSource, batch_size: int, seed: int, step: int, flip: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    size, epoch, order = len(source), -1, np.empty(0, np.int64)
    while True:
        parts, position, end = [], step * batch_size, (step + 1) * batch_size
        while position < end:
            if position // size != epoch:
                epoch = position // size
                order = np.random.default_rng([seed, epoch]).permutation(size)
            offset = position - epoch * size
            parts.append(order[offset : offset + end - position])
            position += len(parts[-1])
        images, labels = source.get(np.concatenate(parts))
        if flip:
            # The third word sets this stream apart from the permutations (seeds are padded with zeros).
            mirrored = np.random.default_rng([seed, step, 1]).random(batch_size) < 0.5
            images = np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)
        yield images, labels
        step += 1


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


def _class_directories(path: Path) -> list[Path]:
    """Visible sub-directories in sorted order."""
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _image_files(directory: Path) -> list[Path]:
    """Visible images in sorted order."""
    files = (file for file in directory.iterdir() if not file.name.startswith("."))
    return sorted(file for file in files if file.suffix.lower() in IMAGE_EXTENSIONS and file.is_file())
