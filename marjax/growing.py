"""Arrays that grow on disk over several runs, and the record of how far they are.

    1. `append` puts rows behind those that are recorded, cutting off what an interrupted run left there, and flushes
    2. only then does `write_record` count them

The arrays are .npy files from the first byte on, which NumPy reads once they are complete.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from marjax.files import atomic_write, extend
from marjax.header import checksum

NPY_HEADER = 128  # bytes before the data


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """What an array's .npy file starts with: NumPy's format, version 1.0, always `NPY_HEADER` bytes long."""
    text = repr({"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": shape})
    length = NPY_HEADER - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", length) + text.ljust(length - 1).encode() + b"\n"


def append(path: Path, rows: np.ndarray, done: int, total: int) -> None:
    """Stores the rows [done, done + len(rows)) of an array, and flushes them to disk.

    Args:
        path: its .npy file; made where nothing is done.
        rows: [B, ...], little-endian.
        done: rows recorded so far; what lies behind them is cut off.
        total: rows of the complete array.

    Raises:
        ValueError: if the file has fewer rows.
        OSError: as for `marjax.files.atomic_write`.
    """
    header = npy_header(rows.dtype, (total, *rows.shape[1:]))
    content = rows.tobytes() if done else header + rows.tobytes()
    extend(path, content, NPY_HEADER + done * rows[0].nbytes if done else 0)


def write_record(path: Path, values: Mapping[str, Any]) -> None:
    """Replaces a record: JSON values, with a checksum of themselves."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps({**values, "checksum": checksum(values)}), encoding="utf-8")


def read_record(path: Path) -> dict[str, Any]:
    """What `write_record` wrote.

    Raises:
        ValueError: if it is damaged.
    """
    try:
        values = dict(json.loads(path.read_bytes()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a JSON object ({error}); remove its folder, or write elsewhere.") from error
    recorded = values.pop("checksum", None)
    if recorded != checksum(values):
        raise ValueError(
            f"{path} does not match its checksum, so it was damaged or edited; remove its folder, or write elsewhere."
        )
    return values
