"""`marjax sample` and `marjax eval` in-process: what they write and print, and how they refuse bad input."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cli_helpers import FAST, FAST_OPTIONS, ROOT, TINY, random_model, read
from helpers import write_idx

from marjax import cli_sample, metrics
from marjax.checkpoint import load, save
from marjax.images import OPTIONS_FILE, to_uint8
from marjax.sample import sample


def test_sample_grid(marjax, model, tmp_path):
    code, out, err = marjax("sample", "--model", model, "--seed", 3, *FAST)
    assert (code, err) == (0, "")
    assert out.startswith("grid.png: 3 images (") and "images/s, compilation" in out
    expected = to_uint8(sample(random_model(TINY), jax.random.key(3), [0, 1, 2], **FAST_OPTIONS))
    grid = read(tmp_path / "grid.png")
    assert grid.shape == (88 + 2 * 4, 3 * 88 + 4 * 4)  # one row, cells enlarged 11 times
    cells = [grid[4 : 4 + 88, 4 + 92 * column :][:, :88] for column in range(3)]
    assert np.array_equal([cell[::11, ::11] for cell in cells], expected[..., 0])
    assert {path.name for path in tmp_path.iterdir()} <= {"grid.png", "cache"}


def test_sample_grid_has_a_row_per_class(marjax, model, calls, tmp_path):
    words = ("--labels", "Bag, 0", "--per-class", 4, "--out", "g.PNG", "--batch-size", 3)
    assert marjax("sample", "--model", model, *words)[0] == 0
    assert read(tmp_path / "g.PNG").shape == (2 * 92 + 4, 4 * 92 + 4)
    # The last batch is filled up, so that there is one shape.
    assert [call["labels"].tolist() for call in calls] == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert [call["indices"].tolist() for call in calls] == [[0, 1, 2], [3, 4, 5], [6, 7, 7]]


def test_sample_passes_its_options_on(marjax, model, calls):
    words = shlex.split(
        "--labels 2 --seed 7 --cfg 3 --cfg_schedule constant --num_iter 5 --num-sampling-steps ddim25 "
        "--temperature=0.9 --accel none --dtype bfloat16"
    )
    assert marjax("sample", "--model", model, *words)[0] == 0
    (call,) = calls
    assert call.pop("indices").tolist() == [0] and call.pop("labels").tolist() == [2]
    assert call == {
        **{"seed": [0, 7], "batch_size": 1, "accel": "none", "num_iter": 5, "dtype": "bfloat16", "cfg": 3.0},
        **{"cfg_schedule": "constant", "temperature": 0.9, "num_sampling_steps": "ddim25"},
    }


def test_sample_defaults_are_the_models(marjax, tmp_path, calls):
    config = dataclasses.replace(TINY, cfg=2.0, cfg_schedule="constant", temperature=0.9)
    save(random_model(TINY).replace(config=config), tmp_path / "model")
    assert marjax("sample", "--model", tmp_path / "model")[0] == 0
    assert marjax("sample", "--model", tmp_path / "model", "--unconditional", 3, "--out", "u")[0] == 0
    for call, labels, cfg in zip(calls, ([0, 1, 2], None), (2.0, 1.0), strict=True):
        assert (call["labels"] if labels is None else call["labels"].tolist()) == labels
        assert {name: call[name] for name in ("cfg", "cfg_schedule", "temperature", "num_sampling_steps")} == {
            **{"cfg": cfg, "cfg_schedule": "constant", "temperature": 0.9, "num_sampling_steps": "4"}
        }
        assert call["num_iter"] == 16  # one per token, as there are fewer than 64
        assert call["dtype"] == ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    names = {path.name for path in (tmp_path / "u").iterdir()}
    assert names == {OPTIONS_FILE, *(f"00000{index}_unconditional.png" for index in range(3))}


def test_sample_shows_its_progress_on_a_terminal(marjax, model, calls, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert marjax("sample", "--model", model)[0] == 0
    assert "3/3 images" in terminal.getvalue() and "images/s, compilation" in terminal.getvalue()


def test_sample_directory_resumes(marjax, model, tmp_path, monkeypatch):
    command = ("sample", "--model", model, "--per-class", 2, *FAST)
    assert marjax(*command, "--out", "whole")[1].startswith("whole: 6 images written, 0 kept (")
    assert {path.name for path in Path("whole").iterdir()} == {
        *("000000_sneaker.png", "000001_sneaker.png", "000002_bag.png", "000003_bag.png"),
        *("000004_ankle-boot.png", "000005_ankle-boot.png", OPTIONS_FILE),
    }
    assert read("whole/000005_ankle-boot.png").shape == (8, 8)

    assert marjax(*command, "--out", "broken/")[0] == 0
    Path("broken/000001_sneaker.png").unlink()
    Path("broken/000003_bag.png").write_bytes(Path("broken/000003_bag.png").read_bytes()[:50])
    Path("broken/000004_ankle-boot.png").unlink()
    kept = {path: path.stat().st_mtime_ns for path in Path("broken").iterdir() if not path.name.startswith("000003")}
    sampled = []
    monkeypatch.setattr(
        cli_sample, "sample", lambda *args, **options: sampled.append(options["indices"]) or sample(*args, **options)
    )
    assert marjax(*command, "--out", "broken/")[1].startswith("broken/: 3 images written, 3 kept (")
    assert [indices.tolist() for indices in sampled] == [[1, 3], [4, 4]]
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    for path in Path("whole").iterdir():
        assert path.read_bytes() == Path("broken", path.name).read_bytes()

    assert marjax(*command, "--out", "whole")[1] == "whole: all 6 images were there already\n"
    assert len(sampled) == 2


def test_sample_directory_keeps_what_was_done_before_an_interruption(marjax, model, calls, monkeypatch):
    fake = cli_sample.sample

    def interrupted(*args, **options):
        if len(calls) == 1:
            raise KeyboardInterrupt
        return fake(*args, **options)

    monkeypatch.setattr(cli_sample, "sample", interrupted)
    assert marjax("sample", "--model", model, "--out", "samples", *FAST) == (130, "", "marjax: interrupted.\n")
    assert {path.name for path in Path("samples").iterdir()} == {"000000_sneaker.png", "000001_bag.png", OPTIONS_FILE}


def test_sample_directory_refuses_other_options(marjax, refused, model, calls, tmp_path):
    command = ("sample", "--model", model, "--out", "samples")
    assert marjax(*command)[0] == 0
    assert "(different: cfg, seed)" in refused(*command, "--seed", 1, "--cfg", 2)
    assert "(different: count, labels)" in refused(*command, "--per-class", 2)
    other = dataclasses.replace(TINY, cfg=4.0)
    save(random_model(TINY).replace(config=other), tmp_path / "other")
    assert "(different: model)" in refused(*command, "--model", tmp_path / "other", "--cfg", 1)
    assert "is not empty and holds no options.json" in refused("sample", "--model", model, "--out", tmp_path)
    assert len(calls) == 1


def test_sample_directory_knows_an_acceleration_in_other_words(marjax, refused, model, calls):
    command = ("sample", "--model", model, "--out", "samples", "--accel")
    assert marjax(*command, "none:condition=on")[0] == 0
    assert "were there already" in marjax(*command, "none: head=off, condition = on")[1]
    assert "(different: accel)" in refused(*command, "none:condition=on,warmup=2")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--labels boot", "Unknown label 'boot'; expected a number from 0 to 2 or one of sneaker, bag, ankle boot."),
        ("--labels 3", "Unknown label '3'"),
        ("--per-class 2000000000", "--per-class 2000000000 of 3 labels: expected fewer than 2**31 images."),
        ("--labels sneaker,,bag", "Unknown label ''"),
        ("--unconditional 2 --labels 1", "--unconditional excludes --labels and --per-class"),
        ("--unconditional 2 --cfg 3", "cfg=3.0 needs labels"),
        ("--weights raw", "--weights raw is for a training run's directory, which"),
        ("--cfg nan", "cfg=nan must be finite and >= 0."),
        ("--temperature -1", "temperature=-1.0 must be finite and >= 0."),
        ("--num-iter 17", "num_iter=17 must be an integer in [1, 16], the sequence length."),
        ("--num-sampling-steps many", "num_sampling_steps='many': expected a count such as 100"),
        ("--accel warp", "Unknown accel 'warp'; expected one of none"),
        ("--out no/grid.png", "does not exist; create that folder first."),
        ("--out file/grid.png", "is not a folder; create that folder first."),
        ("--out folder.png", "Cannot write folder.png: it is a folder; give the name of a file."),
        ("--out grid.jpg", "--out grid.jpg: images are written as PNG; give a .png file or a directory."),
        ("--out file", "Cannot make the directory file: File exists; give another."),
        ("--out file/samples", "Cannot make the directory file/samples: Not a directory; give another."),
        ("--model missing", "Cannot load 'missing': no such path"),
        ("--model file", "Cannot load 'file': it is neither a checkpoint directory nor a .safetensors file"),
    ],
)
@pytest.mark.parametrize("out", ["grid.png", "samples"])
def test_sample_bad_input(refused, model, tmp_path, words, message, out):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    assert message in refused("sample", "--model", model, "--out", out, *words.split())
    left = {path for path in tmp_path.rglob("*") if path.parent.name != "cache"}
    assert {path.name for path in left} <= {"file", "folder.png", "cache", "samples"}


def test_sample_refuses_images_that_are_no_pictures(refused, tmp_path):
    save(random_model(dataclasses.replace(TINY, vae_embed_dim=4)), tmp_path / "model")
    assert "Images of 4 channels cannot be written as PNG" in refused("sample", "--model", tmp_path / "model")


@pytest.fixture(scope="module")
def fashion(tmp_path_factory):
    """A random model of 28 x 28 images, and a small test split of Fashion-MNIST."""
    folder = tmp_path_factory.mktemp("fashion")
    with np.load(ROOT / "tests" / "data" / "fashion_mnist_test64.npz") as file:
        write_idx(folder / "data", "t10k", file["images"][..., 0], file["labels"])
    config = dataclasses.replace(TINY, img_size=28, patch_size=14, class_num=10, class_names=())
    save(random_model(config), folder / "model")
    return folder


def test_eval(marjax, fashion, monkeypatch):
    evaluate, evaluated = metrics.evaluate, []

    def recorded(*args):
        evaluated.append((*args, evaluate(*args)))
        return evaluated[-1][-1]

    monkeypatch.setattr(metrics, "evaluate", recorded)
    command = ("eval", "--model", fashion / "model", "--data", fashion / "data", "--num-images", 14, "--seed", 5)
    code, out, err = marjax(*command, "--num-iter", 1, "--batch-size", 7, "--dtype", "float32")
    assert (code, err) == (0, "")
    *table, note, last = out.splitlines()
    assert note == "note: of 14 images, the Fréchet distance is too large; compare equal numbers only"
    document = json.loads(last)
    assert [line[:18].rstrip() for line in table] == [
        *("frechet distance", "class accuracy", "precision", "recall", "num images", "speed")
    ]
    ((images, labels, real_images, _, k, scores),) = evaluated
    assert np.array_equal(labels, np.arange(14) % 10) and k == 3
    expected = sample(load(fashion / "model"), jax.random.key(5), labels, num_iter=1, batch_size=7)
    assert np.array_equal(images, to_uint8(expected))
    with np.load(ROOT / "tests" / "data" / "fashion_mnist_test64.npz") as file:
        assert np.array_equal(real_images, file["images"])
    assert {name: document[name] for name in scores} == scores
    assert table[0].split()[-1] == f"{scores['frechet_distance']:.4f}"
    assert document["seconds_per_image"] > 0 and document["compile_seconds"] >= 0
    settings = {
        **{"num_images": 14, "num_real_images": 64, "seed": 5, "batch_size": 7, "num_iter": 1, "accel": "none"},
        **{"dtype": "float32", "cfg": 1.0, "cfg_schedule": "linear", "temperature": 1.0, "num_sampling_steps": "4"},
        **{"model": str(fashion / "model"), "data": str(fashion / "data"), "extractor": "fashion_mnist", "k": 3},
    }
    assert {name: document[name] for name in settings} == settings
    assert {"device", "num_devices", "jax", "marjax"} <= document.keys()


def test_eval_bad_input(refused, fashion, model, data, calls):
    command = ("eval", "--model", fashion / "model", "--data", fashion / "data")
    assert (
        "The model generates 8 x 8 x 1 images of 3 classes, but only the fashion_mnist feature extractor ships, "
        "for 28 x 28 x 1 images of 10 classes"
    ) in refused(*command, "--model", model)
    assert "--num-images 3 and 64 test images: the metrics need at least 4" in refused(*command, "--num-images", 3)
    assert "t10k-images-idx3-ubyte.gz exists there" in refused(*command, "--data", data)
    assert "missing does not exist" in refused(*command, "--data", "missing")
    assert "Cannot load 'missing'" in refused(*command, "--model", "missing")
    assert not calls
