"""The command line as a whole: spelling, help, exit codes, cache, time; and `marjax info`."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_helpers import ROOT, TINY, random_model

from marjax import cli, compilation
from marjax.checkpoint import CheckpointError, describe, save
from marjax.cli_options import dashed
from marjax.compilation import Stopwatch
from marjax.config import MARConfig
from marjax.train import NonFiniteLossError, TrainConfig


def test_both_spellings():
    assert dashed(["sample", "--num_iter=8", "--out", "a_b", "--cfg_schedule", "x", "-x_y", "--", "--my_file"]) == [
        *("sample", "--num-iter=8", "--out", "a_b", "--cfg-schedule", "x", "-x_y", "--", "--my_file")
    ]
    assert dashed(["--labels=a_b"]) == ["--labels=a_b"]


def test_version_and_help(marjax):
    from marjax import __version__

    assert marjax("--version") == (0, f"marjax {__version__}\n", "")
    for command in ((), ("sample",), ("encode",), ("train",), ("eval",), ("convert",), ("info",)):
        code, out, err = marjax(*command, "--help")
        assert (code, err) == (0, "") and "usage: marjax" in out
        assert "examples:" in out or command == ("info",)


def test_every_field_is_an_option_of_train(marjax):
    text = " ".join(marjax("train", "--help")[1].split())
    train = TrainConfig()
    fields = [*dataclasses.fields(train), *dataclasses.fields(train.objective), *dataclasses.fields(train.optimizer)]
    for field in fields:
        if field.name not in ("objective", "optimizer") or field.type == "str":
            assert f"--{field.name.replace('_', '-')}" in text
    for field in dataclasses.fields(MARConfig):
        assert (f"--{field.name.replace('_', '-')} " in text) == (field.name != "vae")
    assert "decay of the exponential moving average of the weights, in [0, 1) (default: 0.9999)" in text
    assert "image side in pixels (default: the preset's)" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: COMMAND; `marjax --help` lists the options"),
        (("paint",), "invalid choice: 'paint'"),
        (("sample", "--frobnicate"), "unrecognized arguments: --frobnicate"),
        (("sample", "--num", "3"), "unrecognized arguments: --num 3"),
        (("sample", "--seed", "-1"), "--seed: '-1' must be an integer from 0 to 2**32 - 1; `marjax sample --help`"),
        (("sample", "--seed", "4294967296"), "--seed: '4294967296' must be an integer from 0 to"),
        (("sample", "--batch-size", "0"), "--batch-size: '0' must be a positive integer below 2**31"),
        (("sample", "--per-class", "2.5"), "--per-class: '2.5' must be a positive integer"),
        (("sample", "--cfg", "high"), "--cfg: invalid float value: 'high'"),
        (("sample", "--cfg-schedule", "cosine"), "--cfg-schedule: invalid choice: 'cosine'"),
        (("sample", "--dtype", "float16"), "--dtype: invalid choice: 'float16'"),
        (("train", "--out", "run"), "required: --data"),
        (("train", "--data", "d", "--out", "r", "--seed", "x"), "--seed: 'x' must be an integer"),
        (("train", "--data", "d", "--out", "r", "--preset", "a", "--init-from", "b"), "not allowed with"),
        (("eval",), "required: --data"),
    ],
)
def test_bad_command_lines(refused, words, message):
    assert message in refused(*words)


def test_info_lists_what_there_is(marjax, monkeypatch, model):
    header = describe(model)
    monkeypatch.setattr(cli.checkpoint, "describe", lambda name: header)
    code, out, err = marjax("info")
    assert (code, err) == (0, "")
    assert "  mar_base       256 x 256 pixels, 1000 classes, 256 tokens, 208M parameters\n" in out
    assert out.splitlines()[-2:] == [
        "Shipped models:",
        "  fashion_mnist  8 x 8 pixels, 3 classes, 16 tokens, 0.0357M parameters",
    ]


def test_info_names_a_shipped_model_that_cannot_be_used(marjax, monkeypatch):
    def broken(name):
        raise CheckpointError(f"Cannot load '{name}': it is damaged.")

    monkeypatch.setattr(cli.checkpoint, "describe", broken)
    code, out, _ = marjax("info")
    assert code == 0 and "  fashion_mnist  unusable: Cannot load 'fashion_mnist': it is damaged.\n" in out


def test_info_describes_a_model(marjax, model):
    code, out, err = marjax("info", model)
    assert (code, err) == (0, "")
    count = sum(leaf.size for leaf in jax.tree.leaves(random_model(TINY)))
    lines = out.splitlines()
    assert lines[:2] == [f"{model}: 8 x 8 pixels, 3 classes, 16 tokens", f"parameters: {count:,} (matrices in float32)"]
    assert {'  class_names: ["sneaker", "bag", "ankle boot"]', "  vae: null", "  data: none"} <= set(lines)
    assert lines[-1] == f"checksums: {len(describe(model).digests)} verified"


def test_info_of_a_damaged_model(marjax, tmp_path):
    save(random_model(TINY), tmp_path / "model")
    damaged = max((tmp_path / "model" / "params").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    code, out, err = marjax("info", tmp_path / "model")
    assert code == 2 and "parameters: " in out and "checksums" not in out
    assert err.count("\n") == 1 and "is damaged or missing; get a fresh copy." in err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (NonFiniteLossError("The loss became nan\nat step 3."), 1, "The loss became nan at step 3."),
        (KeyboardInterrupt(), 130, "interrupted."),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.\nand more"),
            *(1, "RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes. Too little memory; lower --batch-size."),
        ),
        (CheckpointError("Cannot load it."), 2, "Cannot load it."),
        (PermissionError(13, "Permission denied", "file"), 2, "[Errno 13] Permission denied: 'file'"),
        (TypeError("labels must be integers."), 2, "labels must be integers."),
    ],
)
def test_exit_codes(marjax, monkeypatch, error, code, sentence):
    def fail(*args):
        raise error

    monkeypatch.setattr(cli, "_list_models", fail)
    assert marjax("info") == (code, "", f"marjax: {sentence}\n")


def test_bad_input_with_its_traceback_on_demand(marjax, monkeypatch):
    monkeypatch.setenv("MARJAX_TRACEBACK", "1")
    with pytest.raises(CheckpointError, match="no such path"):
        marjax("info", "nowhere")


def test_a_reader_that_has_seen_enough_ends_the_command(model):
    command = [sys.executable, "-m", "marjax", "info", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == cli.BROKEN_PIPE


def test_unexpected_errors_keep_their_traceback(marjax, monkeypatch):
    def fail():
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "_list_models", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        marjax("info")


def test_cache_directory(monkeypatch, tmp_path):
    assert compilation.cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("MARJAX_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert compilation.cache_dir() == Path("/xdg/marjax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert compilation.cache_dir() == Path("/home/someone/.cache/marjax")


def test_cache_is_switched_on(tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)
    compilation.use_persistent_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache")
    assert jax.config.jax_persistent_cache_min_compile_time_secs < 1.0
    assert not list((tmp_path / "cache").iterdir())


def test_the_users_own_cache_is_respected(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    compilation.use_persistent_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_a_warning(marjax, model, monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MARJAX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, out, err = marjax("info", model)
    assert code == 0 and "checksums" in out and jax.config.jax_compilation_cache_dir is None
    assert err.startswith("marjax: warning: compiled programs cannot be kept") and err.count("\n") == 1
    assert "set MARJAX_CACHE_DIR to a folder that can be written to." in err


def test_as_a_process(model):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    for words, code, out, err in (
        (["info", model], 0, f"{model}: 8 x 8 pixels", ""),
        (["sample", "--seed", "x"], 2, "", "marjax: argument --seed: 'x' must be"),
    ):
        command = [sys.executable, "-m", "marjax", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == code and done.stdout.startswith(out) and done.stderr.startswith(err)
        assert bool(done.stdout) == bool(out) and done.stderr.count("\n") == bool(err)


def test_stopwatch_counts_compilation_apart():
    function, watch = jax.jit(lambda x: jnp.sin(x) @ x), Stopwatch()
    x = np.ones((8, 8), np.float32)
    with watch:
        function(x).block_until_ready()
    first = watch.compile_seconds
    assert 0 < first < watch.seconds and watch.work_seconds == watch.seconds - first
    with watch:
        function(x).block_until_ready()
    assert watch.compile_seconds == first
    jax.jit(lambda x: x + 2)(x)  # outside
    assert watch.compile_seconds == first


def test_stopwatch_counts_overlapping_reports_once():
    watch, report = Stopwatch(), jax.monitoring.record_event_time_span
    with watch:
        report("/jax/core/compile/inner", 11.0, 12.0)
        report("/jax/core/compile/inner", 13.0, 14.0)
        report("/jax/core/compile/outer", 10.0, 15.0)
        report("/jax/core/compile/next", 16.0, 17.5)
        report("/jax/elsewhere", 20.0, 30.0)
    assert watch.compile_seconds == 6.5
