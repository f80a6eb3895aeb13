"""The directory of a run: what it refuses, left-overs, damage, sharing, a full disk; and what load says of it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from train_helpers import CONFIG, RECIPE, SOURCE, checkpoints, lines, random_model

from marjax.checkpoint import CheckpointError, load, save
from marjax.data import ArraySource
from marjax.optimizer import OptimizerConfig
from marjax.train import NonFiniteLossError, train


@pytest.mark.parametrize(
    ("config", "recipe", "changed"),
    [
        ({}, {"ema_rate": 0.99}, "train.ema_rate"),
        ({}, {"dtype": "bfloat16", "seed": 6}, "train.seed, train.dtype"),
        ({}, {"optimizer": OptimizerConfig(lr=1e-3, warmup_epochs=0.8)}, "train.optimizer.lr"),
        (
            {},
            {"objective": dataclasses.replace(RECIPE.objective, label_drop_prob=0.2)},
            "train.objective.label_drop_prob",
        ),
        ({"buffer_size": 3}, {}, "model.buffer_size"),
        ({"cfg": 2.0}, {"flip": False}, "model.cfg, train.flip"),
    ],
)
def test_another_recipe_is_refused(config, recipe, changed, unbroken):
    out = unbroken[0]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(ValueError, match=rf"another configuration \(different: {changed}\); give the same options"):
        train(dataclasses.replace(CONFIG, **config), dataclasses.replace(RECIPE, **recipe), SOURCE, out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_run_of_another_version_is_refused_by_field(tmp_path, unbroken):
    document = json.loads((unbroken[0] / "config.json").read_text())
    document["train"]["momentum"] = document["train"].pop("seed")
    (tmp_path / "config.json").write_text(json.dumps(document))
    (tmp_path / "state" / "1").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"\(different: train.seed, train.momentum\)"):
        train(CONFIG, RECIPE, SOURCE, tmp_path)


def test_a_run_of_an_earlier_version_goes_on(tmp_path, fake_step):
    """What it did not record had the effect of the defaults."""
    fake_step(lambda step: {})
    train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    document = json.loads(file.read_text())
    del document["start"], document["train"]["optimizer"]["eps"], document["train"]["objective"]["mask_ratio_std"]
    file.write_text(json.dumps(document))
    train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    other = dataclasses.replace(RECIPE, optimizer=dataclasses.replace(RECIPE.optimizer, eps=1e-6))
    with pytest.raises(ValueError, match=r"\(different: train.optimizer.eps\)"):
        train(CONFIG, other, SOURCE, tmp_path / "run")


def test_a_run_that_ended_before_its_first_checkpoint_gives_way(tmp_path, fake_step):
    fake_step(lambda step: {"loss": np.nan})
    with pytest.raises(NonFiniteLossError):
        train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    fake_step(lambda step: {})
    other = dataclasses.replace(RECIPE, ema_rate=0.5)
    train(CONFIG, other, SOURCE, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["ema_rate"] == 0.5
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match=r"\(different: train.ema_rate\)"):
        train(CONFIG, RECIPE, SOURCE, tmp_path / "run")


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    save(random_model(CONFIG), tmp_path / "model")  # has a config.json too
    for out, content in ((tmp_path, {"thesis.txt", "model"}), (tmp_path / "model", {"config.json", "params"})):
        with pytest.raises(ValueError, match=f"{out} is not empty and holds no training run; give another output"):
            train(CONFIG, RECIPE, SOURCE, out)
        assert {path.name for path in out.iterdir()} == content


@pytest.mark.parametrize("given", [None, 1])
def test_another_start_is_refused(given, tmp_path, fake_step):
    fake_step(lambda step: {})
    run, first = functools.partial(train, CONFIG, RECIPE, SOURCE, tmp_path / "run"), random_model(CONFIG)
    run(init_from=first)
    changed = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].add(given or 0), first.mar)
    with pytest.raises(ValueError, match=r"\(different: start.init_from\); give the same options"):
        run(init_from=given and first.replace(mar=changed))
    run(init_from=first)


@pytest.mark.parametrize("change", [{"num_images": 11}, {"class_names": ("a", "b", "d")}])
def test_other_data_are_refused(change, unbroken):
    images, names = change.get("num_images", 10), change.get("class_names", SOURCE.class_names)
    other = ArraySource(np.zeros((images, 8, 8, 1), np.uint8), np.arange(images) % 3, names)
    with pytest.raises(ValueError, match=rf"\(different: data.{next(iter(change))}\); give the same options"):
        train(CONFIG, RECIPE, other, unbroken[0])


def test_what_a_kill_left_in_the_run_is_removed(tmp_path, fake_step):
    fake_step(lambda step: {})
    train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    (tmp_path / "run" / ".tmp-0123456789ab" / "params").mkdir(parents=True)
    (tmp_path / "run" / ".tmp-0123456789ac.jsonl").write_text("{}")
    train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == kept


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b'{"model": ', r"config.json is damaged \(.*\); restore it, or give another output directory"),
        ("config.json", b"\xff\x00", r"config.json is damaged \(.*\); restore it"),
        ("config.json", b"[]", "holds no training run"),
        ("metrics.jsonl", b"\n", r"metrics.jsonl is damaged \(.*\); move it away to go on without it"),
        ("metrics.jsonl", b'{"a": 1}\n', r"metrics.jsonl is damaged \(KeyError\('step'\)\); move it away"),
        ("state/6/default/_METADATA", b"", r"state/6 is damaged \(.*\); remove it to go on from the checkpoint before"),
    ],
)
def test_damaged_runs_are_refused(file, content, message, tmp_path, fake_step):
    fake_step(lambda step: {})
    train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    (tmp_path / "run" / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_file_in_place_of_the_run(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="run is not a directory; give another output directory"):
        train(CONFIG, RECIPE, SOURCE, tmp_path / "run")


def test_a_run_belongs_to_one_process(tmp_path, fake_step):
    def second(state):
        with pytest.raises(ValueError, match="run is in use by another process; let it end"):
            train(CONFIG, RECIPE, SOURCE, tmp_path / "run")

    fake_step(lambda step: {}, after=second)
    train(CONFIG, dataclasses.replace(RECIPE, epochs=0.4), SOURCE, tmp_path / "run")


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, fake_step, monkeypatch):
    fake_step(lambda step: {})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: argparse.Namespace(free=1000))
    with pytest.raises(OSError, match=r"Cannot write .*state: the disk is full; free some space or write elsewhere"):
        train(CONFIG, RECIPE, SOURCE, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == []


def test_load_of_a_run_without_a_model(tmp_path):
    (tmp_path / "state").mkdir()
    with pytest.raises(CheckpointError, match=r"a training run without a model yet; wait for its first checkpoint\.$"):
        load(tmp_path)


def test_load_of_a_run_says_what_to_load(unbroken):
    with pytest.raises(CheckpointError, match=r"it is the directory of a training run; give .*unbroken/ema\.$"):
        load(unbroken[0])
