"""Images as files: one picture, a grid, or a directory with one PNG per image that can be resumed."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marjax.data import IMAGE_MODES
from marjax.files import atomic_write

MIN_CELL = 84  # pixels: smaller images are enlarged in a grid by a whole factor until they reach it
PADDING = 4  # pixels between the cells of a grid, and around it
BACKGROUND = 255
OPTIONS_FILE = "options.json"


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Images in [0, 1], of any shape, as rounded 8-bit values in [0, 255].

    Raises:
        ValueError: if a value is NaN, which would become black.
    """
    if np.isnan(images).any():
        raise ValueError("Images hold NaN; expected values in [0, 1]. Check the model's weights.")
    return np.rint(np.clip(np.asarray(images, np.float32), 0.0, 1.0) * 255.0).astype(np.uint8)


def make_grid(images: np.ndarray, columns: int | None = None) -> np.ndarray:
    """Arranges images in rows, in order.

    Args:
        images: [N, H, W, C] uint8, N >= 1.
        columns: images per row. None: the most nearly square full rectangle, or where that would be long, the most
            nearly square arrangement, whose last row may then be short.

    Returns:
        [height, width, C] uint8: cells enlarged to at least `MIN_CELL` pixels per side, on a white background.

    Raises:
        ValueError: on other shapes or types, or on `columns` < 1.
    """
    if images.ndim != 4 or images.dtype != np.uint8 or not len(images):
        raise ValueError(f"images must be uint8 [N, H, W, C] with N >= 1, got {images.dtype} {images.shape}.")
    if columns is None:
        columns = _default_columns(len(images))
    if columns < 1:
        raise ValueError(f"columns={columns} must be at least 1.")
    factor = math.ceil(MIN_CELL / min(images.shape[1:3]))
    cells = images.repeat(factor, axis=1).repeat(factor, axis=2)  # nearest neighbour
    count, height, width, channels = cells.shape
    rows, step_y, step_x = math.ceil(count / columns), height + PADDING, width + PADDING
    grid = np.full((rows * step_y + PADDING, columns * step_x + PADDING, channels), BACKGROUND, np.uint8)
    for index, cell in enumerate(cells):
        row, column = divmod(index, columns)
        y, x = PADDING + row * step_y, PADDING + column * step_x
        grid[y : y + height, x : x + width] = cell
    return grid


def _default_columns(count: int) -> int:
    side = math.sqrt(count)
    full = next(columns for columns in range(math.ceil(side), count + 1) if count % columns == 0)
    return full if full <= 2 * side else math.ceil(side)


def check_channels(channels: int) -> None:
    """Checks that images of so many channels can be written.

    Raises:
        ValueError: if not.
    """
    if channels not in IMAGE_MODES:
        raise ValueError(f"Images of {channels} channels cannot be written as PNG; expected 1 (grey) or 3 (RGB).")


def read_image(path: str | os.PathLike[str], shape: tuple[int, int, int]) -> np.ndarray:
    """Reads a picture as uint8 [H, W, C], of the given shape: 1 channel is grey, 3 are RGB.

    Raises:
        ValueError: if it cannot be decoded or has another size.
    """
    from PIL import Image

    height, width, channels = shape
    try:
        with Image.open(path) as image:
            if image.size != (width, height):
                got = " x ".join(map(str, image.size))
                raise ValueError(f"{path} has {got} pixels; expected {width} x {height}, so resize or crop it first.")
            if image.mode[0] in "IF":  # Pillow would cut 16 bits and more off at 255
                raise ValueError(f"{path} has more than 8 bits per channel; convert it to 8 bits first.")
            return np.asarray(image.convert(IMAGE_MODES[channels])).reshape(shape)
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; give an image file.") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be decoded as an image ({error}); give another.") from error


def write_png(path: str | os.PathLike[str], image: np.ndarray) -> None:
    """Writes an image; the file appears complete, or stays as it was.

    Args:
        path: the file; an existing one is replaced.
        image: [H, W, C] uint8, C 1 or 3.

    Raises:
        ValueError: on another number of channels.
        OSError: if the disk refuses (see `marjax.files`).
    """
    from PIL import Image

    check_channels(image.shape[-1])
    pixels = image[..., 0] if image.shape[-1] == 1 else image
    with atomic_write(path) as temporary:
        Image.fromarray(pixels).save(temporary, format="PNG")


def is_complete(path: Path, shape: tuple[int, int, int]) -> bool:
    """Whether `path` is an undamaged PNG of shape (H, W, C)."""
    from PIL import Image

    height, width, channels = shape
    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.verify()  # the checksums of all its parts
            return image.size == (width, height) and image.mode == IMAGE_MODES[channels]
    except (OSError, SyntaxError, Image.DecompressionBombError):
        return False


def file_name(index: int, class_name: str) -> str:
    """Name of an image's file: `000012_ankle-boot.png`."""
    word = re.sub(r"[^\w.-]+", "-", class_name)
    return f"{index:06d}_{word}.png"


@dataclasses.dataclass(frozen=True)
class ImageDirectory:
    """A directory with one PNG per image, and a record of the options that the images were made with.

    Attributes:
        path: the directory; made if missing.
        class_names: class name of each image, for its file's name.
        shape: (H, W, C) of the images.
        options: everything that determines the images, JSON values only. A directory of other images is refused.

    Raises:
        ValueError: if `path` holds images made with other options, or anything else.
        OSError: if `path` cannot be made or read.
    """

    path: Path
    class_names: Sequence[str]
    shape: tuple[int, int, int]
    options: Mapping[str, Any]

    def __post_init__(self):
        check_channels(self.shape[-1])
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise type(error)(f"Cannot make the directory {self.path}: {error.strerror}; give another.") from error
        record = self.path / OPTIONS_FILE
        if record.exists():
            self._check_options(record)
        elif any(not entry.name.startswith(".") for entry in self.path.iterdir()):
            raise ValueError(
                f"{self.path} is not empty and holds no {OPTIONS_FILE} of earlier images; give another directory."
            )

    def missing(self) -> np.ndarray:
        """Indices of the images that are not there yet, or damaged: ascending int64 [M]."""
        names = map(file_name, range(len(self.class_names)), self.class_names)
        absent = [index for index, name in enumerate(names) if not is_complete(self.path / name, self.shape)]
        return np.array(absent, np.int64)

    def write(self, index: int, image: np.ndarray) -> None:
        """Writes image `index`, [H, W, C] uint8.

        Raises:
            OSError: if the disk refuses (see `marjax.files`).
        """
        record = self.path / OPTIONS_FILE
        if not record.exists():
            # Not before there is an image: options that prove wrong must not stand in the way of better ones.
            with atomic_write(record) as temporary:
                temporary.write_text(json.dumps(self.options) + "\n", encoding="utf-8")
        write_png(self.path / file_name(index, self.class_names[index]), image)

    def _check_options(self, record: Path) -> None:
        try:
            before = dict(json.loads(record.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{record} is not a JSON object ({error}); give another directory.") from error
        options = json.loads(json.dumps(self.options))  # as they read after a round trip
        changed = [name for name in sorted(options.keys() | before.keys()) if before.get(name) != options.get(name)]
        if changed:
            raise ValueError(
                f"{self.path} holds images made with other options (different: {', '.join(changed)}); "
                "give the same options to resume, or another directory."
            )
