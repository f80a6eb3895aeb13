"""Writing to disk so that nothing is ever half-written.

Files and directories are built under a temporary name beside their target, flushed to disk, and renamed into place: a
reader sees the old content or the new, and an interrupted writer leaves the target as it was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_OLD = "-old"  # ends the temporary name of a directory that is being replaced
_ADVICE = {
    errno.ENOENT: "its folder takes no files; write elsewhere",
    errno.ENOSPC: "the disk is full; free some space or write elsewhere",
    errno.EDQUOT: "the disk quota is used up; free some space or write elsewhere",
    errno.EFBIG: "the file is too large for this file system; write elsewhere",
    errno.EIO: "the disk reported an error; check it or write elsewhere",
    errno.EACCES: "permission denied; change the permissions of its folder or write elsewhere",
    errno.EPERM: "the operation is not permitted; change the permissions of its folder or write elsewhere",
    errno.EROFS: "the file system is read-only; write elsewhere",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ENOTEMPTY: "a folder of that name appeared meanwhile; choose another",
}


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context manager that replaces the file `path` when its block ends, and only then.

    Args:
        path: the file to write. An existing file is replaced; a symbolic link is followed.

    Yields:
        The temporary file to write instead: empty, in the same folder, with the same suffix. If the block raises, it
        is removed and `path` stays as it was.

    Raises:
        FileNotFoundError: if the folder does not exist.
        IsADirectoryError, FileExistsError: if `path` is a folder, or something else that is not a regular file.
        OSError: (PermissionError, ...) if the disk refuses; the message names `path` and says what to do. Errors of
            the block about other files pass unchanged.
    """
    target, temporary = _beside(path)
    if target.is_dir():
        raise IsADirectoryError(f"Cannot write {path}: it is a folder; give the name of a file.")
    if target.exists() and not target.is_file():
        raise FileExistsError(f"Cannot write {path}: it is not a regular file; choose another name.")
    with _named_errors(path, target, temporary):
        try:
            temporary.touch()  # an unwritable folder is reported before the block's work, not after
            with locked(temporary):
                yield temporary
                _flush(temporary)
                temporary.replace(target)
            _flush(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_dir(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Context manager that makes the directory `path` appear, complete, when its block ends.

    Args:
        path: the directory to write.
        overwrite: replace an existing directory, with everything in it. A directory cannot be swapped in one portable
            step, so the old one is renamed aside just before the new one takes its name, and removed after that: at
            every moment at least one of the two is complete on disk. With False, an existing `path` is refused.

    Yields:
        The temporary directory to fill instead: empty, in the same parent. If the block raises, it is removed and
        `path` stays as it was.

    Raises:
        FileNotFoundError: if the parent folder does not exist.
        FileExistsError: if `path` exists and `overwrite` is False.
        NotADirectoryError: if `path` exists and is not a directory.
        OSError: as for `atomic_write`.
    """
    target, temporary = _beside(path)
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"Cannot write {path}: it exists and is not a folder; choose another name.")
    if target.exists() and not overwrite:
        raise FileExistsError(f"Cannot write {path}: it exists; choose another name or ask to overwrite it.")
    with _named_errors(path, target, temporary):
        try:
            remove_leftovers(target)
            temporary.mkdir()
            with locked(temporary):
                yield temporary
                for folder, _, files in os.walk(temporary):
                    for name in (*files, "."):
                        _flush(Path(folder, name))
                _swap(temporary, target)
            _flush(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager that has a file or directory for this process alone.

    Raises:
        ValueError: if another process has it.
    """
    in_use = f"{path} is in use by another process; let it end, or give another directory."
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise ValueError(in_use) from error  # that removed it just now
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(in_use) from error
        if not os.path.exists(path):
            raise ValueError(in_use)
        yield
    finally:
        os.close(descriptor)  # which frees the lock


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def extend(path: str | os.PathLike[str], content: bytes, start: int) -> None:
    """Makes `content` the end of a file, from byte `start` on, and flushes it to disk.

    This is how a large file grows over many runs: the caller records `start` elsewhere, after the flush, and whatever
    an interrupted writer left behind it is cut off.

    Args:
        path: the file; made if missing and `start` is 0.
        content: what follows its first `start` bytes.
        start: bytes to keep.

    Raises:
        ValueError: if the file has fewer than `start` bytes.
        OSError: as for `atomic_write`.
    """
    target = Path(path)
    if start and (size := target.stat().st_size if target.is_file() else 0) < start:
        raise ValueError(
            f"{path} has {size} bytes where {start} were written, so it was damaged; remove it, and its folder."
        )
    with _named_errors(path, target, target), target.open("r+b" if start else "wb") as file:
        file.truncate(start)
        file.seek(start)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Removes what writers of `path` that were killed left beside it; `atomic_dir` does so itself.

    What another process is writing stays, and so does an old directory whose replacement never took its name.
    """
    target = Path(os.path.realpath(path))
    for leftover in target.parent.glob(f"{_prefix(target)}*"):
        if leftover.name.endswith(_OLD) and not target.exists():
            continue
        with contextlib.suppress(OSError, ValueError), locked(leftover):  # another user's, or in use
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def check_room(path: str | os.PathLike[str], num_bytes: int) -> None:
    """Refuses to begin writing what has no room; for libraries that meet a full disk with pages of tracebacks.

    Args:
        path: what is about to be written. Its folder exists.
        num_bytes: how much.

    Raises:
        OSError: ENOSPC, if less is free.
    """
    if shutil.disk_usage(Path(path).parent).free < num_bytes:
        raise _refused(path, errno.ENOSPC)


@contextlib.contextmanager
def tensorstore_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Context manager that re-raises what tensorstore, below orbax, says about the disk as one sentence about `path`.

    Raises:
        OSError: in place of a ValueError of the block.
    """
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        raise _refused(path, int(code[1]) if code else errno.EIO) from error


def _beside(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The file that `path` means once links are followed, and a fresh name in the same folder."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        what = "is not a folder" if target.parent.exists() else "does not exist"
        raise FileNotFoundError(f"Cannot write {path}: {target.parent} {what}; create that folder first.")
    return target, target.with_name(f"{_prefix(target)}{secrets.token_hex(4)}{target.suffix}")


def _prefix(target: Path) -> str:
    """How names of temporary files for `target` begin; short, whatever the length of its own."""
    return f".tmp-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:8]}-"


def _swap(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    old = target.with_name(f"{temporary.name}{_OLD}")
    target.rename(old)
    try:
        temporary.rename(target)
    finally:
        if not target.exists():
            old.rename(target)
    shutil.rmtree(old)


def _flush(path: Path) -> None:
    """Forces a file's content, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _named_errors(path: str | os.PathLike[str], target: Path, temporary: Path) -> Iterator[None]:
    """Re-raises what the disk says about our files, or about no file in particular, as one sentence about `path`."""
    try:
        yield
    except OSError as error:
        name = str(error.filename or temporary)
        if error.errno not in _ADVICE or not (name == str(target) or name.startswith(str(temporary))):
            raise
        raise _refused(path, error.errno) from error


def _refused(path: str | os.PathLike[str], number: int) -> OSError:
    """The error of that number, as one sentence."""
    kind = type(OSError(number, ""))  # PermissionError, ...
    error = kind(f"Cannot write {path}: {_ADVICE.get(number, os.strerror(number))}.")
    error.errno = number
    return error
