"""The directory of a training run: what it holds, who may write to it, and how it goes on after an interruption.

config.json     what must stay as it is for the run to go on
metrics.jsonl   one line per logged interval
state/          the newest two resumable states, by step number
ema/, raw/      models that `marjax.load` reads
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util

from marjax import checkpoint
from marjax.files import atomic_write, check_room, locked, tensorstore_errors
from marjax.types import MARParams, PyTree

_CONFIG_FILE, _METRICS_FILE = "config.json", "metrics.jsonl"
_PARTS = {"model", "train", "data"}  # of config.json, since the first version


def check(path: Path, document: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuses a directory that holds another run, or anything else; writes nothing.

    Args:
        path: the directory, which may be missing.
        document: what must stay as it is: JSON values in dictionaries.
        defaults: values of `document` that runs of earlier versions, which did not record them, had.

    Raises:
        ValueError: if the directory cannot be used for this run.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is not a directory; give another output directory.")
    file = path / _CONFIG_FILE
    before = None
    if file.is_file():
        try:
            before = json.loads(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}); restore it, or give another output directory.") from error
    elif not path.is_dir() or not any(path.iterdir()):
        return
    if not (isinstance(before, dict) and before.keys() >= _PARTS):
        raise ValueError(f"{path} is not empty and holds no training run; give another output directory.")
    old, standard, new = (traverse_util.flatten_dict(tree, sep=".") for tree in (before, defaults, document))
    old = {name: value for name, value in standard.items() if name in new} | old
    # A run without a state has nothing to lose: it ended before its first checkpoint.
    changed = [name for name in new | old if old.get(name) != new.get(name)] if _has_state(path) else []
    if changed:
        raise ValueError(
            f"{path} holds a run with another configuration (different: {', '.join(changed)}); "
            "give the same options to resume it, or another output directory."
        )


@contextlib.contextmanager
def open_run(path: Path, document: Mapping[str, Any]) -> Iterator[Run]:
    """Opens a directory that `check` has accepted, for this process alone.

    Raises:
        ValueError: if another process has it open.
        OSError: if the disk refuses.
    """
    import orbax.checkpoint as ocp

    path.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with locked(path):
        for leftover in path.glob(".tmp-*"):  # of a run that was killed while it wrote
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        if not _has_state(path):
            with atomic_write(path / _CONFIG_FILE) as temporary:
                temporary.write_text(json.dumps(document, indent=1))
        with ocp.CheckpointManager((path / checkpoint.RUN_STATE).absolute(), options=options) as manager:
            yield Run(path, manager)


def _has_state(path: Path) -> bool:
    folder = path / checkpoint.RUN_STATE
    return folder.is_dir() and any(entry.name.isdecimal() for entry in folder.iterdir())


class Run:
    """An open run directory.

    Attributes:
        path: the directory.
    """

    def __init__(self, path: Path, manager: Any):
        self.path, self._manager = path, manager

    def restore(self, like: PyTree) -> PyTree:
        """The newest state, or `like` (whose structure it has) if there is none yet.

        Raises:
            ValueError: if it is damaged.
        """
        import orbax.checkpoint as ocp

        step = self._manager.latest_step()
        if step is None:
            return like
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        except Exception as error:  # whatever orbax, tensorstore and JSON say about damaged files
            damaged, reason = self.path / checkpoint.RUN_STATE / str(step), str(error).partition("\n")[0]
            raise ValueError(
                f"{damaged} is damaged ({reason}); remove it to go on from the checkpoint before, or start another run."
            ) from error

    def save(self, step: int, state: PyTree) -> None:
        """Writes a resumable state.

        Raises:
            OSError: if there is no room for it.
        """
        import orbax.checkpoint as ocp

        # From the host: orbax would cut arrays that several devices hold into slices, and compile that per shape.
        arrays = jax.device_get(state)
        check_room(self.path / checkpoint.RUN_STATE, sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)))
        with tensorstore_errors(self.path / checkpoint.RUN_STATE):
            self._manager.save(step, args=ocp.args.StandardSave(arrays))
            self._manager.wait_until_finished()

    def export(self, name: str, model: MARParams, provenance: Mapping[str, Any]) -> None:
        """Replaces the model `name`, one of `checkpoint.RUN_MODELS`."""
        checkpoint.save(model, self.path / name, provenance=provenance, overwrite=True)

    def drop_metrics_after(self, step: int) -> None:
        """Drops the metrics of steps that will be repeated, and a last line that a kill has cut.

        Raises:
            ValueError: if the file holds anything else.
        """
        file = self.path / _METRICS_FILE
        if not file.exists():
            return
        lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        try:
            kept = [line for line in lines if json.loads(line)["step"] <= step]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file} is damaged ({error!r}); move it away to go on without it.") from error
        with atomic_write(file) as temporary:
            temporary.write_text("".join(kept))

    def write_metrics(self, line: Mapping[str, float]) -> None:
        """Appends a line of metrics; `line` has its step."""
        with (self.path / _METRICS_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")
