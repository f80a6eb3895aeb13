"""Atomic writes: all or nothing, and one clear sentence when the disk refuses."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from marjax import files
from marjax.files import atomic_dir, atomic_write


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def assert_refused(writer, error, message) -> None:
    """Entering `writer` must raise; its block must not run."""
    with pytest.raises(error, match=message), writer:
        pytest.fail("the block ran")


def test_atomic_write_appears_only_when_done(tmp_path):
    target = tmp_path / "grid.png"
    with atomic_write(target) as temporary:
        assert temporary.parent == tmp_path and temporary.suffix == ".png"
        temporary.write_bytes(b"new")
        assert not target.exists()
    assert target.read_bytes() == b"new" and names(tmp_path) == ["grid.png"]


def test_atomic_write_replaces_and_respects_umask(tmp_path):
    target = tmp_path / "log.txt"
    target.write_text("old")
    with atomic_write(str(target)) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    assert target.read_text() == "new" and target.stat().st_mode == ordinary.stat().st_mode


def test_atomic_write_follows_links(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "real" / "file.txt")
    with atomic_write(link) as temporary:
        temporary.write_text("through")
    assert link.is_symlink() and (tmp_path / "real" / "file.txt").read_text() == "through"


@pytest.mark.parametrize("writer", [atomic_write, atomic_dir])
def test_interrupted_block_leaves_nothing(writer, tmp_path):
    with pytest.raises(KeyboardInterrupt), writer(tmp_path / "x") as temporary:
        raise KeyboardInterrupt
    assert names(tmp_path) == [] and not temporary.exists()


def test_interrupted_block_leaves_old_content(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "a").write_text("old")
    with pytest.raises(RuntimeError, match="half way"), atomic_write(tmp_path / "file") as temporary:
        temporary.write_text("ne")
        raise RuntimeError("half way")
    with pytest.raises(RuntimeError, match="half way"), atomic_dir(tmp_path / "dir", overwrite=True) as temporary:
        (temporary / "a").write_text("ne")
        raise RuntimeError("half way")
    assert (tmp_path / "file").read_text() == "old" and (tmp_path / "dir" / "a").read_text() == "old"
    assert names(tmp_path) == ["dir", "file"]


def test_atomic_dir_appears_complete(tmp_path):
    with atomic_dir(tmp_path / "run") as temporary:
        (temporary / "nested").mkdir()
        (temporary / "nested" / "a").write_text("1")
        assert not (tmp_path / "run").exists()
    assert (tmp_path / "run" / "nested" / "a").read_text() == "1" and names(tmp_path) == ["run"]


def test_atomic_dir_overwrites_only_when_asked(tmp_path):
    target = tmp_path / "run"
    target.mkdir()
    (target / "old").touch()
    assert_refused(atomic_dir(target), FileExistsError, r"Cannot write .*run: it exists; .* ask to overwrite")
    with atomic_dir(target, overwrite=True) as temporary:
        (temporary / "new").touch()
        assert names(target) == ["old"]
    assert names(target) == ["new"] and names(tmp_path) == ["run"]


def test_failed_swap_restores_the_old_directory(tmp_path, monkeypatch):
    target = tmp_path / "run"
    target.mkdir()
    (target / "old").touch()
    rename = Path.rename

    def refuse(self, other):
        if Path(other) == target and not self.name.endswith("-old"):
            raise OSError(errno.EIO, "injected", str(self))
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="the disk reported an error"), atomic_dir(target, overwrite=True):
        pass
    assert names(target) == ["old"] and names(tmp_path) == ["run"]


@pytest.mark.parametrize("writer", [atomic_write, atomic_dir])
def test_missing_parent(writer, tmp_path):
    assert_refused(
        writer(tmp_path / "nope" / "x"),
        FileNotFoundError,
        r"Cannot write .*nope/x: .*nope does not exist; create that folder",
    )
    (tmp_path / "file").touch()
    assert_refused(
        writer(tmp_path / "file" / "x"), FileNotFoundError, r"file is not a folder; create that folder first"
    )


def test_wrong_kind_of_target(tmp_path):
    assert_refused(atomic_write(tmp_path), IsADirectoryError, r"it is a folder; give the name of a file")
    assert_refused(atomic_write(os.devnull), FileExistsError, r"/dev/null: it is not a regular file")
    (tmp_path / "file").touch()
    assert_refused(atomic_dir(tmp_path / "file", overwrite=True), NotADirectoryError, r"it exists and is not a folder")


@pytest.mark.parametrize("writer", [atomic_write, atomic_dir])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_full_disk_in_the_block(writer, code, tmp_path):
    with pytest.raises(OSError) as caught, writer(tmp_path / "x"):
        raise OSError(code, os.strerror(code))
    assert str(caught.value).startswith(f"Cannot write {tmp_path / 'x'}: ") and "write elsewhere" in str(caught.value)
    assert caught.value.errno == code and names(tmp_path) == []


@pytest.mark.parametrize("writer", [atomic_write, atomic_dir])
def test_full_disk_while_flushing(writer, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "injected")

    monkeypatch.setattr(files.os, "fsync", full)
    message = r"x: the disk is full; free some space or write elsewhere\.$"
    with pytest.raises(OSError, match=message), writer(tmp_path / "x"):
        pass
    assert names(tmp_path) == []


def test_unwritable_folder_is_reported_before_the_work(tmp_path, monkeypatch):
    def denied(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "injected", str(self))

    monkeypatch.setattr(Path, "touch", denied)
    monkeypatch.setattr(Path, "mkdir", denied)
    for writer in (atomic_write, atomic_dir):
        assert_refused(
            writer(tmp_path / "x"), PermissionError, r"x: permission denied; change the permissions of its folder"
        )


def test_errors_about_other_files_pass_unchanged(tmp_path):
    other = PermissionError(errno.EACCES, "unreadable", "/somewhere/input.png")
    with pytest.raises(PermissionError) as caught, atomic_write(tmp_path / "x"):
        raise other
    assert caught.value is other
    unidentified = OSError("cannot identify image file")
    with pytest.raises(OSError) as caught, atomic_write(tmp_path / "x"):
        raise unidentified
    assert caught.value is unidentified


def leftovers_of_a_kill(target):
    """A temporary file or directory for `target`, as a kill leaves it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
        for writer in (atomic_write, atomic_dir):
            with pytest.raises(KeyboardInterrupt), writer(target):
                raise KeyboardInterrupt


def test_leftovers_of_killed_writers_are_removed_by_the_next(tmp_path):
    leftovers_of_a_kill(tmp_path / "model")
    leftovers_of_a_kill(tmp_path / "other")
    assert len(names(tmp_path)) == 4
    with atomic_write(tmp_path / "model") as ours:  # what is being written stays
        files.remove_leftovers(tmp_path / "model")
        assert ours.exists() and len(names(tmp_path)) == 3
    (tmp_path / "model").unlink()
    leftovers_of_a_kill(tmp_path / "model")
    with atomic_dir(tmp_path / "model"):
        assert len(names(tmp_path)) == 3
    files.remove_leftovers(tmp_path / "other")
    assert names(tmp_path) == ["model"]


def test_the_only_copy_of_an_old_directory_is_no_leftover(tmp_path):
    with atomic_dir(tmp_path / "model") as temporary:
        (temporary / "w").write_text("old")
    real = Path.rename

    def second_fails(path, target):
        if ".tmp-" in path.name:
            raise KeyboardInterrupt
        return real(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", second_fails)
        patch.setattr(Path, "exists", lambda path: True)  # so that it is not renamed back
        with pytest.raises(KeyboardInterrupt), atomic_dir(tmp_path / "model", overwrite=True):
            pass
    (old,) = tmp_path.glob("*-old")
    files.remove_leftovers(tmp_path / "model")
    assert (old / "w").read_text() == "old" and not (tmp_path / "model").exists()
    with atomic_dir(tmp_path / "model"):
        pass
    files.remove_leftovers(tmp_path / "model")
    assert names(tmp_path) == ["model"]


def test_a_folder_that_takes_no_files(tmp_path, monkeypatch):
    """As those of /proc."""

    def missing(path):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "touch", missing)
    message = r"Cannot write .*x.png: its folder takes no files; write elsewhere\.$"
    assert_refused(atomic_write(tmp_path / "x.png"), FileNotFoundError, message)


def test_check_room_refuses_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000) if path == tmp_path else usage)
    files.check_room(tmp_path / "run", 1000)
    with pytest.raises(OSError, match=r"Cannot write .*run: the disk is full; free some space or write") as refused:
        files.check_room(tmp_path / "run", 1001)
    assert refused.value.errno == errno.ENOSPC
