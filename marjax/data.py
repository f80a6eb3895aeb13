"""Sources for training and evaluation, and the one deterministic stream of batches drawn from them.

A source holds uint8 images, or the moments of cached latents, and int32 labels; `open_source` decides by looking
whether a path holds latents (`marjax/latents.py`), MNIST-family IDX files or one directory of images per class. Images
stay uint8 here: the mapping to [-1, 1] belongs to the model's codec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from marjax import latents
from marjax.idx import load_idx
from marjax.latents import LatentSource

if TYPE_CHECKING:
    from PIL import Image

IMAGE_EXTENSIONS = frozenset((".bmp", ".jpeg", ".jpg", ".png", ".webp"))
IMAGE_MODES = {1: "L", 3: "RGB"}  # channels -> Pillow's name for 8-bit pixels


class Source(Protocol):
    """What training asks of a data set."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class; labels index it."""

    @property
    def num_classes(self) -> int:
        """Number of classes; labels lie in [0, num_classes)."""

    def __len__(self) -> int:
        """Number of images."""

    def get(self, indices: np.ndarray, mirrored: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Reads images [B, H, W, C] uint8 (or moments of latents) and labels [B] int32 at int `indices` [B].

        Images are mirrored left to right where bool `mirrored` [B] is True, nowhere if it is None.
        """


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

    def get(self, indices: np.ndarray, mirrored: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Reads images [B, H, W, C] uint8 and labels [B] int32; arguments as for `Source`."""
        return _mirror(self.images[indices], mirrored), self.labels[indices]


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
        if len({name.lower() for name in self.class_names}) < len(self.class_names):
            raise ValueError(f"{path} has class directories that differ in case only; rename or join them.")
        self.img_size, self._mode = img_size, IMAGE_MODES[channels]
        self._files = [file for found in files for file in found]
        self.labels = np.repeat(np.arange(len(files), dtype=np.int32), [len(found) for found in files])

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def files(self) -> list[str]:
        """Path of each image below the directory, `class/name.png`."""
        return [f"{file.parent.name}/{file.name}" for file in self._files]

    def get(self, indices: np.ndarray, mirrored: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Decodes images [B, img_size, img_size, C] uint8, with labels [B] int32; arguments as for `Source`.

        Raises:
            ValueError: if a file cannot be decoded; the message names it.
        """
        with ThreadPoolExecutor() as pool:  # Pillow decodes and resizes outside the interpreter lock
            images = list(pool.map(self._decode, [self._files[index] for index in indices]))
        return _mirror(np.stack(images), mirrored), self.labels[indices]

    def _decode(self, file: Path) -> np.ndarray:
        from PIL import Image

        try:
            with Image.open(file) as image:
                if image.mode[0] in "IF":
                    raise OSError(f"mode {image.mode}: more than 8 bits per channel, which conversion would cut off")
                pixels = center_crop(image.convert(self._mode), self.img_size)
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


def open_source(path: str | Path, *, split: str, img_size: int, channels: int) -> Source:
    """Opens a directory of cached latents, of IDX files or of class directories, and checks that it suits the model.

    Latents and IDX files are used as they are, so their images must have the model's size; images of a folder are
    cropped to it. Class directories are looked for in `path/split` if that holds directories, else in `path` itself,
    which then is the data of every split. So are latents.

    Args:
        path: the directory.
        split: "train", "test", or for folders any name.
        img_size: the model's image side in pixels.
        channels: the model's image channels.

    Returns:
        A `LatentSource`, an `ArraySource` or an `ImageFolder`.

    Raises:
        FileNotFoundError: if `path` is missing or holds no kind of data.
        ValueError: if the images do not suit the model, or on the causes named at `LatentSource`, `load_idx` and
            `ImageFolder`.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a directory of IDX files or of class directories.")
    if latents.is_cache(path):
        source = LatentSource(path)
        if source.img_size != img_size:
            raise ValueError(
                f"{path} holds latents of {source.img_size} x {source.img_size} images, the model expects "
                f"{img_size} x {img_size}; give the model that size, or encode the images again."
            )
        return source
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
    source: Source, batch_size: int, seed: int, start_step: int = 0, *, flip: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless batches; batch `step` is a function of (seed, step) alone, so training resumes exactly.

    Epoch e is the permutation drawn from `default_rng([seed, e])`; batch `step` takes the positions
    [step * batch_size, (step + 1) * batch_size) of the epochs laid end to end, so a batch may straddle epochs.

    Args:
        source: where images, or moments of latents, come from.
        batch_size: images per batch (B).
        seed: non-negative.
        start_step: the step of the first batch.
        flip: mirror each image left to right with probability 1/2.

    Returns:
        An iterator over images (as `source` reads them) [B, H, W, C] and labels int32 [B].

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
    source: Source, batch_size: int, seed: int, step: int, flip: bool
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
        # The third word sets this stream apart from the permutations (seeds are padded with zeros).
        mirrored = np.random.default_rng([seed, step, 1]).random(batch_size) < 0.5 if flip else None
        yield source.get(np.concatenate(parts), mirrored)
        step += 1


def _mirror(images: np.ndarray, mirrored: np.ndarray | None) -> np.ndarray:
    if mirrored is None:
        return images
    return np.where(mirrored[:, None, None, None], images[:, :, ::-1], images)


def _class_directories(path: Path) -> list[Path]:
    """Visible sub-directories in sorted order."""
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _image_files(directory: Path) -> list[Path]:
    """Visible images in sorted order."""
    files = (file for file in directory.iterdir() if not file.name.startswith("."))
    return sorted(file for file in files if file.suffix.lower() in IMAGE_EXTENSIONS and file.is_file())
