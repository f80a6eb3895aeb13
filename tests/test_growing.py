"""Arrays that grow on disk: what is appended, what is cut off, and headers that NumPy reads."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from marjax.files import extend
from marjax.growing import npy_header


def test_a_full_disk_in_one_sentence(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"moments.npy: the disk is full; free some space or write elsewhere\.$"):
        extend(tmp_path / "moments.npy", b"abc", 0)


def test_extend_cuts_what_lies_behind(tmp_path):
    file = tmp_path / "data"
    extend(file, b"abcdef", 0)
    extend(file, b"xy", 2)
    assert file.read_bytes() == b"abxy"
    extend(file, b"new", 0)
    assert file.read_bytes() == b"new"
    for path, size in ((file, 3), (tmp_path / "missing", 0)):
        with pytest.raises(ValueError, match=rf"has {size} bytes where 4 were written, so it was damaged; remove it"):
            extend(path, b"z", 4)
    assert file.read_bytes() == b"new" and not (tmp_path / "missing").exists()


def test_npy_header_is_numpys(tmp_path):
    for dtype, shape in ((np.float16, (1281167, 2, 16, 16, 32)), (np.int32, (7,)), (np.uint32, (0, 2))):
        header = npy_header(np.dtype(dtype), shape)
        assert len(header) == 128
        (tmp_path / "x.npy").write_bytes(header)
        with (tmp_path / "x.npy").open("rb") as file:
            assert np.lib.format.read_magic(file) == (1, 0)
            assert np.lib.format.read_array_header_1_0(file) == (shape, False, np.dtype(dtype))
            assert file.tell() == 128
