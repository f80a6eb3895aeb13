"""Many images in one .npz, as evaluation suites read them, made over any number of runs.

NAME.npz              `arr_0` uint8 [N, H, W, 3] and `arr_1` int64 [N] labels, not compressed: the format of ADM's
                      sampling scripts and of its evaluator. Appears when all images are there.
NAME.npz.partial/     until then:
    images.npy        the images so far
    progress.json     what is made, and how far it got
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from marjax import growing
from marjax.files import atomic_write, check_room, locked
from marjax.header import checksum

SUFFIX = ".npz"
_IMAGES_FILE, _PROGRESS_FILE = "images.npy", "progress.json"


@dataclasses.dataclass
class ImageArray:
    """An array of images that `open_array` has opened.

    Attributes:
        path: the .npz file.
        shape: (N, H, W, C) of all images; C is 3, or 1 (stored as three equal channels).
        labels: [N] labels, or None.
        options: everything that determines the images, JSON values only.
        done: images stored and recorded.
        complete: whether the .npz is there.
    """

    path: Path
    shape: tuple[int, int, int, int]
    labels: np.ndarray | None
    options: Mapping[str, Any]
    done: int = 0
    complete: bool = False

    def append(self, images: np.ndarray) -> None:
        """Stores the next images, uint8 [B, H, W, C].

        Raises:
            OSError: if the disk refuses (see `marjax.files`).
        """
        rgb = np.broadcast_to(images, (*images.shape[:3], 3))
        growing.append(self.partial / _IMAGES_FILE, rgb, self.done, self.shape[0])
        self.done += len(images)
        growing.write_record(self.partial / _PROGRESS_FILE, {"options": self.options, "done": self.done})

    def finish(self) -> None:
        """Writes the .npz once all images are stored, and removes what was needed to make it.

        Raises:
            OSError: if the disk refuses (see `marjax.files`).
        """
        arrays = {"arr_0": np.load(self.partial / _IMAGES_FILE, mmap_mode="r")}
        if self.labels is not None:
            arrays["arr_1"] = np.asarray(self.labels, np.int64)
        # Made inside, where what a kill leaves of it is found again.
        inside = self.partial / self.path.name
        with atomic_write(inside) as temporary:
            np.savez(temporary, **arrays)
            with zipfile.ZipFile(temporary, "a") as archive:
                archive.comment = self._mark
        inside.replace(self.path)
        self.complete = True
        self._remove_partial()

    @property
    def partial(self) -> Path:
        """The directory of what is not complete."""
        return self.path.with_name(f"{self.path.name}.partial")

    def _remove_partial(self) -> None:
        for entry in self.partial.iterdir():
            entry.unlink()
        self.partial.rmdir()

    @property
    def _mark(self) -> bytes:
        """Comment of the archive, by which a complete file is known again."""
        return f"marjax sha256:{checksum(self.options)}".encode()

    def _find(self) -> None:
        """Finds out what is done; refuses what is of other images."""
        own = {_IMAGES_FILE, _PROGRESS_FILE, self.path.name}
        found = {entry.name for entry in self.partial.iterdir()}
        if others := [name for name in found - own if not name.startswith(".tmp-")]:
            raise ValueError(f"{self.partial} holds {min(others)}, which is not ours; choose another name.")
        if self.path.exists():
            if not _is_complete(self.path, self._mark):
                raise ValueError(
                    f"{self.path} exists and is damaged, or holds something else; choose another name or remove it."
                )
            self.done, self.complete = self.shape[0], True
            self._remove_partial()  # of a run that was killed at its very end
            return
        if (self.partial / _PROGRESS_FILE).exists():
            before = growing.read_record(self.partial / _PROGRESS_FILE)
            old, new = before["options"], self.options
            if changed := sorted(key for key in old | new if old.get(key) != new.get(key)):
                raise ValueError(
                    f"{self.partial} holds images made with other options (different: {', '.join(changed)}); give the "
                    "same options to go on with them, or another name."
                )
            self.done = before["done"]
        for leftover in self.partial.glob(".tmp-*"):  # of a run that was killed while it wrote
            leftover.unlink()
        # Once in the directory and once in the .npz.
        check_room(self.path, (2 * self.shape[0] - self.done) * 3 * math.prod(self.shape[1:3]))


@contextlib.contextmanager
def open_array(
    path: str | os.PathLike[str],
    shape: tuple[int, int, int, int],
    labels: np.ndarray | None,
    options: Mapping[str, Any],
) -> Iterator[ImageArray]:
    """Begins an array of images, or takes up one that was begun or completed, for this process alone.

    Args:
        path: the .npz file.
        shape: (N, H, W, C) of all images, C 1 or 3.
        labels: [N] labels, or None.
        options: everything that determines the images, JSON values only.

    Raises:
        ValueError: if images made with other options are there, or anything else, or another process is at it.
        OSError: if the disk refuses, or has no room.
    """
    options = json.loads(json.dumps(options))  # as they read after a round trip
    target = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)  # a link is followed
    array = ImageArray(target, shape, labels, options)
    if array.partial.is_symlink():
        raise ValueError(f"{array.partial} is a link, which cannot become a file beside it; remove it.")
    try:
        array.partial.mkdir(exist_ok=True)
    except OSError as error:
        raise type(error)(f"Cannot make the directory {array.partial}: {error.strerror}; write elsewhere.") from error
    try:
        with locked(array.partial):
            array._find()
            yield array
    finally:
        with contextlib.suppress(OSError):  # there is something in it, or it is gone
            array.partial.rmdir()


def _is_complete(path: Path, mark: bytes) -> bool:
    """Whether a file is the archive of that mark, undamaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.comment == mark and archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False
