"""`marjax sample --out-npz`: the array that evaluation suites read, made in any number of runs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from cli_helpers import FAST, FAST_OPTIONS, TINY, random_model

from marjax import cli_sample, growing, image_array
from marjax.checkpoint import save
from marjax.images import to_uint8
from marjax.sample import sample

WORDS = ("--per-class", 2, "--seed", 3, "--out-npz", "s.npz", *FAST)
LABELS = [0, 0, 1, 1, 2, 2]


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def expected():
    return to_uint8(sample(random_model(TINY), jax.random.key(3), LABELS, **FAST_OPTIONS))


def arrays() -> dict[str, np.ndarray]:
    with np.load("s.npz") as file:
        return dict(file)


def files() -> list[str]:
    """What is in the working directory, the compilation cache aside."""
    return sorted(path.as_posix() for path in Path().rglob("*") if path.parts[0] != "cache" and path.is_file())


def test_format(marjax, model):
    code, out, err = marjax("sample", "--model", model, *WORDS)
    assert (code, err) == (0, "") and out.startswith("s.npz: 6 images written, 0 kept (")
    made = arrays()
    assert sorted(made) == ["arr_0", "arr_1"] and made["arr_1"].dtype == np.int64
    assert made["arr_1"].tolist() == LABELS
    assert made["arr_0"].shape == (6, 8, 8, 3) and made["arr_0"].dtype == np.uint8
    for channel in range(3):  # grey
        np.testing.assert_array_equal(made["arr_0"][..., channel], expected()[..., 0])
    with zipfile.ZipFile("s.npz") as archive:  # mapped or streamed by its readers
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    assert files() == ["s.npz"] and not Path("s.npz.partial").exists()


def test_the_same_command_again_keeps_everything(marjax, model, calls):
    assert marjax("sample", "--model", model, *WORDS)[0] == 0
    before, count = Path("s.npz").read_bytes(), len(calls)
    code, out, _ = marjax("sample", "--model", model, *WORDS)
    assert (code, out) == (0, "s.npz: all 6 images were there already\n")
    assert Path("s.npz").read_bytes() == before and len(calls) == count and not Path("s.npz.partial").exists()


PLACES = {
    "sample": (cli_sample, "sample"),
    "within": (growing, "extend"),
    "record": (growing, "write_record"),
    "savez": (np, "savez"),
    "replace": (Path, "replace"),
    "rmtree": (image_array.ImageArray, "_remove_partial"),
}


@pytest.mark.parametrize(
    ("where", "at"),
    [(where, at) for where in ("sample", "within", "record") for at in range(3)]
    + [("savez", 0), ("replace", 0), ("rmtree", 0)],
)
def test_killed_anywhere_and_run_again(marjax, model, where, at):
    """Batches of 2 of 6 images; the run ends in batch `at`, or while the .npz is made."""
    module, name = PLACES[where]
    real, calls = getattr(module, name), []

    def fatal(*arguments, **options):
        if where == "replace" and arguments[1].name != "s.npz":  # an atomic write of something else
            return real(*arguments, **options)
        calls.append(arguments)
        if len(calls) <= at:
            return real(*arguments, **options)
        if where == "within":
            path, content, start = arguments
            real(path, content[: len(content) // 2], start)
        elif where == "savez":
            Path(arguments[0]).write_bytes(b"half")
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, fatal)
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)  # a kill cleans nothing up
        with pytest.raises(Killed):
            marjax("sample", "--model", model, *WORDS)
    complete = Path("s.npz").exists()
    assert complete == (where == "rmtree")
    code, out, _ = marjax("sample", "--model", model, *WORDS)
    kept = 2 * at if where in ("sample", "within", "record") else 6
    report = f"{6 - kept} images written, {kept} kept" if not complete else "all 6 images were there already"
    assert code == 0 and out.startswith(f"s.npz: {report}")
    np.testing.assert_array_equal(arrays()["arr_0"][..., 0], expected()[..., 0])
    assert files() == ["s.npz"] and not Path("s.npz.partial").exists()


def test_colour_and_unconditional(marjax, tmp_path, calls):
    save(random_model(dataclasses.replace(TINY, vae_embed_dim=3)), tmp_path / "rgb")
    assert marjax("sample", "--model", "rgb", "--unconditional", 5, "--out-npz", "s.npz", *FAST)[0] == 0
    made = arrays()
    assert sorted(made) == ["arr_0"] and made["arr_0"].shape == (5, 8, 8, 3)


def test_refusals(marjax, refused, model, calls, monkeypatch):
    assert "--out-npz s.npy: the name must end in .npz" in refused("sample", "--model", model, "--out-npz", "s.npy")
    assert "not allowed with argument" in refused("sample", "--model", model, *WORDS, "--out", "grid.png")
    Path("s.npz").write_bytes(b"mine")
    assert "s.npz exists and is damaged, or holds something else; choose" in refused("sample", "--model", model, *WORDS)
    assert Path("s.npz").read_bytes() == b"mine"
    Path("s.npz").unlink()
    assert marjax("sample", "--model", model, *WORDS)[0] == 0
    changed = ("--per-class", 2, "--seed", 4, "--out-npz", "s.npz")
    assert "s.npz exists and is damaged, or holds something else" in refused("sample", "--model", model, *changed)
    assert "Cannot make the directory nowhere/s.npz.partial: No such file or directory; write elsewhere." in refused(
        "sample", "--model", model, "--out-npz", "nowhere/s.npz"
    )
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    assert "t.npz: the disk is full" in refused("sample", "--model", model, "--out-npz", "t.npz")
    assert files() == ["s.npz"] and not Path("t.npz.partial").exists()


def test_an_array_begun_with_other_options(marjax, refused, model, calls, monkeypatch):
    real, count = growing.write_record, []

    def second_fails(path, values):
        count.append(path)
        if len(count) == 2:
            raise Killed
        real(path, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "write_record", second_fails)
        with pytest.raises(Killed):
            marjax("sample", "--model", model, *WORDS)
    message = refused("sample", "--model", model, *WORDS, "--cfg", 2, "--num-iter", 2)
    assert "s.npz.partial holds images made with other options (different: cfg, num_iter); give the same" in message
    record = Path("s.npz.partial/progress.json")
    assert json.loads(record.read_text())["done"] == 2
    record.write_text(record.read_text().replace('"done": 2', '"done": 4'))
    assert "progress.json does not match its checksum" in refused("sample", "--model", model, *WORDS)


def test_one_process_at_a_time(tmp_path):
    options = {"seed": 0}
    with image_array.open_array(tmp_path / "s.npz", (2, 8, 8, 3), None, options) as array:
        array.append(np.zeros((1, 8, 8, 3), np.uint8))
        with (
            pytest.raises(ValueError, match=r"s\.npz\.partial is in use by another process"),
            image_array.open_array(tmp_path / "s.npz", (2, 8, 8, 3), None, options),
        ):
            pytest.fail("opened twice")
    assert os.listdir(tmp_path / "s.npz.partial") != []


def test_many_classes_are_not_all_drawn_by_default(refused, marjax, tmp_path, calls):
    save(random_model(dataclasses.replace(TINY, class_num=101, class_names=())), tmp_path / "many")
    assert "The model has 101 classes; choose some with --labels, or --labels all" in refused(
        "sample", "--model", "many"
    )
    assert marjax("sample", "--model", "many", "--labels", "100", *FAST)[0] == 0
    assert marjax("sample", "--model", "many", "--per-class", 1, "--out-npz", "s.npz", *FAST)[0] == 0
    assert arrays()["arr_1"].tolist() == list(range(101))


@pytest.mark.parametrize("complete", [False, True])
def test_what_lies_in_the_way_stays(marjax, refused, model, calls, complete):
    if complete:
        assert marjax("sample", "--model", model, *WORDS)[0] == 0
    Path("s.npz.partial/sub").mkdir(parents=True)
    message = refused("sample", "--model", model, *WORDS)
    assert "s.npz.partial holds sub, which is not ours; choose another name." in message
    assert Path("s.npz.partial/sub").is_dir()


def test_a_damaged_array_is_not_complete(marjax, refused, model, calls):
    assert marjax("sample", "--model", model, *WORDS)[0] == 0
    content = bytearray(Path("s.npz").read_bytes())
    content[len(content) // 2] ^= 1
    Path("s.npz").write_bytes(content)
    assert "s.npz exists and is damaged" in refused("sample", "--model", model, *WORDS)


def test_links_are_followed(marjax, refused, model, calls):
    Path("other").mkdir()
    Path("s.npz").symlink_to("other/real.npz")
    assert marjax("sample", "--model", model, *WORDS)[0] == 0
    assert Path("s.npz").is_symlink() and Path("other/real.npz").is_file()
    Path("t.npz.partial").symlink_to("other")
    assert "t.npz.partial is a link" in refused("sample", "--model", model, "--out-npz", "t.npz")
