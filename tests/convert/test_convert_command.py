"""`marjax convert` on whole files: bit for bit in both directions, a report, and nothing left behind by a failure."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from convert_helpers import (
    GOLDEN,
    ROOT,
    SMALL,
    golden_state,
    random_state,
    same_arrays,
    shapes_of,
    small_checkpoint,
    small_state,
    write_pth,
    write_small,
)
from safetensors.numpy import load_file, save_file

from marjax import checkpoint, convert, convert_vae, sample
from marjax.config import VAEConfig, get_preset
from marjax.types import MARParams, cast_matrices

GOLDEN_VAE = VAEConfig(ch=32, ch_mult=(1, 1, 1, 1, 2), num_res_blocks=2, embed_dim=16)
HEAD_OPTIONS = ("--encoder-num-heads", "3", "--decoder-num-heads", "2")
SMALL_OPTIONS = (*HEAD_OPTIONS, "--patch-size", "1", "--vae-stride", "4")


def state_of(path) -> dict[str, np.ndarray]:
    """The reference's state dict of a marjax checkpoint's MAR model."""
    return convert.to_state_dict(checkpoint.load(path))


def float32(state) -> dict[str, np.ndarray]:
    return {key: array.astype(np.float32) for key, array in state.items()}


# The golden files.


@pytest.mark.torch
def test_tiny(converted, tmp_path):
    out = converted(GOLDEN / "tiny.pth", "tiny").splitlines()
    params, header = checkpoint.load("tiny"), checkpoint.describe("tiny")
    same_arrays(convert.to_state_dict(params), golden_state("tiny"))
    assert params.config == get_preset("tiny") and params.vae is None
    assert header.preset == "tiny"
    origin = header.provenance["converted_from"]["model"]
    assert {name: origin[name] for name in ("file", "weights", "epoch")} == {
        **{"file": "tiny.pth", "weights": "model_ema", "epoch": 3}
    }
    assert out == [
        "tiny: tiny, 64 x 64 pixels, 10 classes, 64 tokens",
        "parameters: 327,328 (MAR), matrices in float32",
        f"read: model_ema of epoch 3 from {GOLDEN / 'tiny.pth'}",
        f"checksum: sha256:{checkpoint.fingerprint(params)} (tiny)",
        f"ignored: model, epoch in {GOLDEN / 'tiny.pth'}",
    ]
    assert os.listdir(tmp_path) == ["tiny"]


@pytest.mark.torch
def test_tiny_p2_needs_its_heads(converted, refused):
    message = refused(GOLDEN / "tiny_p2.pth", "p2")
    assert f"Cannot convert '{GOLDEN / 'tiny_p2.pth'}': encoder_num_heads cannot be told" in message
    assert "p2: no preset, 64 x 64 pixels" in converted(GOLDEN / "tiny_p2.pth", "p2", "--num_heads", "4")
    same_arrays(state_of("p2"), golden_state("tiny_p2"))
    config = checkpoint.describe("p2").config
    assert (config.patch_size, config.vae_embed_dim, config.encoder_num_heads, config.decoder_num_heads) == (
        2,
        16,
        4,
        4,
    )


@pytest.mark.torch
def test_raw_weights(converted):
    assert "read: model of epoch 3" in converted(GOLDEN / "tiny.pth", "raw", "--weights", "model")
    got, expected = state_of("raw"), golden_state("tiny")
    np.testing.assert_array_equal(got["z_proj.bias"], expected["z_proj.bias"] * np.float32(0.75))
    np.testing.assert_array_equal(got["z_proj.weight"], expected["z_proj.weight"])


@pytest.mark.torch
def test_autoencoder_alone(converted, marjax):
    out = converted(GOLDEN / "vae_small.ckpt", "vae")
    assert out.startswith("vae: an autoencoder, 16 channels, stride 16\nparameters: 1,234,227 (autoencoder), matrices")
    params = checkpoint.load("vae")
    assert params.mar is None and params.config.vae == GOLDEN_VAE
    same_arrays(convert_vae.to_state_dict(params.vae, GOLDEN_VAE), float32(golden_state("vae_small")))
    with pytest.raises(ValueError, match="params holds an autoencoder only, which generates nothing"):
        sample(params, jax.random.key(0), [0])
    assert marjax("info", "vae")[1].startswith("vae: an autoencoder alone\n")


@pytest.mark.torch
def test_model_with_its_autoencoder(converted, refused, monkeypatch, tmp_path):
    options = ("--vae", GOLDEN / "vae_small.ckpt", "--vae-stride", "16", "--img-size", "128")
    message = refused(GOLDEN / "tiny.pth", "both", *options[:2])
    assert "vae_stride=8 according to its args and vae_stride=16 according to the autoencoder; give --" in message
    out = converted(GOLDEN / "tiny.pth", "both", *options, "--vae-scale", "0.5")
    assert "parameters: 327,328 (MAR) + 1,234,227 (autoencoder), matrices in float32" in out
    params = checkpoint.load("both")
    assert params.config.vae == dataclasses.replace(GOLDEN_VAE, scale=0.5)
    same_arrays(convert.to_state_dict(params), golden_state("tiny"))

    # And back, to two files, which make the same model again.
    converted("both", "mar.safetensors", "--to", "safetensors", "--vae", "vae.safetensors")
    same_arrays(load_file("mar.safetensors"), golden_state("tiny"))
    same_arrays(load_file("vae.safetensors"), float32(golden_state("vae_small")))
    converted("mar.safetensors", "again", "--vae", "vae.safetensors")
    assert checkpoint.fingerprint(checkpoint.load("again")) == checkpoint.fingerprint(params)
    assert checkpoint.load("again").config == params.config
    out = converted("both", "alone.safetensors", "--to", "safetensors")
    assert "ignored: the autoencoder, which --vae FILE writes in both" in out
    for same in ("o.safetensors", "./o.safetensors"):
        message = refused("both", "o.safetensors", "--to", "safetensors", "--vae", same)
        assert "The model and its autoencoder cannot both be written to o.safetensors; give --vae another" in message
    # Together or not at all: nothing of a pair whose second file cannot be written.
    monkeypatch.setattr("marjax.convert_vae.vae_source", lambda *path: pytest.fail("no autoencoder"))
    with pytest.raises(pytest.fail.Exception):
        converted("both", "first.safetensors", "--to", "safetensors", "--vae", "second.safetensors")
    assert not list(tmp_path.glob("*first*")) and not list(tmp_path.glob(".tmp-*"))
    message = refused("mar.safetensors", "x", "--vae", "mar.safetensors")
    assert "it is a MAR model, expected MAR's autoencoder after --vae" in message


@pytest.mark.torch
def test_shipped_script():
    command = [sys.executable, str(ROOT / "tools" / "convert_torch_ckpt.py"), str(GOLDEN / "tiny.pth"), "tiny"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "MARJAX_CACHE_DIR": "cache"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("tiny: tiny, 64 x 64 pixels")
    same_arrays(state_of("tiny"), golden_state("tiny"))


# Flat safetensors, and back.


def test_flat_safetensors(converted):
    converted(GOLDEN / "tiny.safetensors", "tiny")
    same_arrays(state_of("tiny"), golden_state("tiny"))
    assert checkpoint.describe("tiny").config == get_preset("tiny")
    out = converted("tiny", "back.safetensors", "--to", "safetensors")
    same_arrays(load_file("back.safetensors"), golden_state("tiny"))
    assert "read: everything from tiny" in out and "checksum: sha256:" in out


def test_what_nobody_else_knows_comes_back(converted):
    """Class names, guidance, heads: our own files carry them, under a name that no other reader minds."""
    config = dataclasses.replace(SMALL, cfg=2.5, class_names=("cat", "dog", "owl"), clip_denoised=True)
    params = convert.from_state_dict(small_state(), config)
    checkpoint.save(params, "model")
    converted("model", "flat.safetensors", "--to", "safetensors")
    converted("flat.safetensors", "again")
    assert checkpoint.load("again").config == config
    converted("flat.safetensors", "named", "--class-names", "a,b,c", "--cfg", "3")
    assert checkpoint.load("named").config == dataclasses.replace(config, class_names=("a", "b", "c"), cfg=3.0)


def test_bfloat16(converted):
    """Matrices are rounded once, to nearest even; a file that holds them comes back bit for bit."""
    write_small("small.safetensors")
    assert "matrices in bfloat16" in converted("small.safetensors", "narrow", *SMALL_OPTIONS, "--dtype", "bfloat16")
    narrow = checkpoint.load("narrow")
    expected = cast_matrices(convert.from_state_dict(small_state(), SMALL).mar, np.dtype("bfloat16"))
    assert checkpoint.fingerprint(narrow) == checkpoint.fingerprint(MARParams(expected, None, SMALL))
    for dtype in ("float32", "bfloat16"):
        converted("narrow", f"{dtype}.safetensors", "--to", "safetensors", "--dtype", dtype)
        same_arrays(float32(load_file(f"{dtype}.safetensors")), convert.to_state_dict(narrow))
        converted(f"{dtype}.safetensors", f"from_{dtype}", "--dtype", "bfloat16")
        assert checkpoint.fingerprint(checkpoint.load(f"from_{dtype}")) == checkpoint.fingerprint(narrow)
    assert load_file("bfloat16.safetensors")["z_proj.weight"].dtype.name == "bfloat16"
    assert load_file("bfloat16.safetensors")["z_proj.bias"].dtype.name == "float32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_files_become_float32(converted, dtype):
    state = {key: array.astype(np.dtype(dtype)) for key, array in small_state().items()}
    save_file(state, "small.safetensors")
    converted("small.safetensors", "small", *SMALL_OPTIONS)
    same_arrays(state_of("small"), float32(state))


def test_one_file_instead_of_a_directory(converted):
    write_small("small.safetensors")
    converted("small.safetensors", "model.safetensors", *SMALL_OPTIONS)
    same_arrays(state_of("model.safetensors"), small_state())


def test_training_run_to_the_reference(converted, refused):
    for index, name in enumerate(("raw", "ema")):
        os.makedirs("run", exist_ok=True)
        state = random_state(shapes_of(SMALL), seed=index)
        checkpoint.save(convert.from_state_dict(state, SMALL), os.path.join("run", name))
    converted("run", "ema.safetensors", "--to", "safetensors")
    same_arrays(load_file("ema.safetensors"), random_state(shapes_of(SMALL), seed=1))
    converted("run", "raw.safetensors", "--to", "safetensors", "--weights", "model")
    same_arrays(load_file("raw.safetensors"), random_state(shapes_of(SMALL), seed=0))
    message = refused("run/ema", "x.safetensors", "--to", "safetensors", "--weights", "model")
    assert "--weights model: 'run/ema' has one set of weights; leave it out." in message


@pytest.mark.torch
def test_training_checkpoint(converted, tmp_path):
    write_pth(tmp_path / "last.pth", small_checkpoint())
    out = converted("last.pth", "small", *HEAD_OPTIONS)
    same_arrays(state_of("small"), small_state())
    assert out.endswith("ignored: model, optimizer, epoch, scaler in last.pth\n")
    assert checkpoint.describe("small").config == dataclasses.replace(SMALL, num_sampling_steps="20")


# What is refused, before anything is written.


def test_target_that_exists(converted, refused):
    write_small("small.safetensors")
    converted("small.safetensors", "small", *SMALL_OPTIONS)
    assert "Cannot write small: it exists; choose another name or give --overwrite" in refused(
        "small.safetensors", "small", *SMALL_OPTIONS
    )
    write_small("other.safetensors", **{"z_proj.bias": small_state()["z_proj.bias"] + 1})
    converted("other.safetensors", "small", *SMALL_OPTIONS, "--overwrite")
    assert state_of("small")["z_proj.bias"][0] > 0.9
    converted("small", "out.safetensors", "--to", "safetensors")
    assert "out.safetensors: it exists" in refused("small", "out.safetensors", "--to", "safetensors")
    converted("small", "out.safetensors", "--to", "safetensors", "--overwrite")
    os.mkdir("mine")
    Path("mine", "notes.txt").touch()
    assert "overwriting would delete notes.txt" in refused("small.safetensors", "mine", *SMALL_OPTIONS, "--overwrite")


def test_bad_command_lines(converted, refused):
    write_small("small.safetensors")
    convert_small = ("small.safetensors", "out")
    assert "no such file" in refused("nope.pth", "out")
    assert "it is not a regular file" in refused(".", "out")
    assert "nowhere does not exist; create that folder first" in refused("small.safetensors", "nowhere/out")
    assert "invalid choice: 'float16'" in refused(*convert_small, "--dtype", "float16")
    assert "invalid choice: 'ema'" in refused(*convert_small, "--weights", "ema")
    assert "it holds one set of weights" in refused(*convert_small, "--weights", "model")
    assert "--vae-scale belongs to an autoencoder" in refused(*convert_small, *SMALL_OPTIONS, "--vae-scale", "0.3")
    assert "class_names has 2 entries, expected class_num=3" in refused(
        *convert_small, *SMALL_OPTIONS, "--class-names", "a,b"
    )
    assert "Cannot read 'nope.ckpt'" in refused(*convert_small, *SMALL_OPTIONS, "--vae", "nope.ckpt")
    save_file(golden_state("vae_small"), "vae.safetensors")
    assert "it is an autoencoder; give the MAR model first" in refused(
        "vae.safetensors", "out", "--vae", "vae.safetensors"
    )
    assert "it is an autoencoder, to which patch_size mean nothing" in refused(
        "vae.safetensors", "out", "--patch-size", 1
    )
    assert "scale=-1.0 must be a positive finite number" in refused("vae.safetensors", "out", "--vae-scale=-1")

    converted(*convert_small, *SMALL_OPTIONS)
    to_safetensors = ("--to", "safetensors")
    assert "Cannot write flat: with --to safetensors its name must end in .safetensors." in refused(
        "out", "flat", *to_safetensors
    )
    assert "--to safetensors writes a model as it is" in refused("out", "x.safetensors", *to_safetensors, "--cfg", "2")
    assert "'out' has no autoencoder" in refused("out", "x.safetensors", *to_safetensors, "--vae", "v.safetensors")
    assert "no such path" in refused("nope", "x.safetensors", *to_safetensors)
    assert "it was not written by marjax" in refused("small.safetensors", "x.safetensors", *to_safetensors)
    checkpoint.save_file(checkpoint.load("out"), "packed.safetensors")
    assert "it is a checkpoint of marjax" in refused("packed.safetensors", "x")


def test_values_that_are_not_finite(refused):
    bias = small_state()["z_proj.bias"].copy()
    bias[3] = np.nan
    write_small("small.safetensors", **{"z_proj.bias": bias})
    assert "NaN or infinite values in mar/z_proj/bias" in refused("small.safetensors", "out", *SMALL_OPTIONS)


def test_numbers_of_another_kind(refused):
    state = {key: array.astype(np.float64) for key, array in small_state().items()}
    save_file(state, "small.safetensors")
    message = refused("small.safetensors", "out", *SMALL_OPTIONS)
    assert "has dtype float64" in message and "expected float32, float16, bfloat16." in message


@pytest.mark.torch
def test_autoencoder_of_latent_diffusion(refused, tmp_path):
    state = {**golden_state("vae_small"), "loss.logvar": np.zeros((), np.float32)}
    write_pth(tmp_path / "model.ckpt", {"state_dict": state, "global_step": 1})
    message = refused("model.ckpt", "out")
    assert "it is an autoencoder of latent-diffusion. MAR's was trained anew" in message
    write_small("small.safetensors")
    assert "latent-diffusion" in refused("small.safetensors", "out", *SMALL_OPTIONS, "--vae", "model.ckpt")


def test_full_disk_leaves_nothing(refused, monkeypatch, tmp_path):
    write_small("small.safetensors")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    message = refused("small.safetensors", "out", *SMALL_OPTIONS)
    assert "Cannot write out: the disk is full; free some space or write elsewhere." in message


def test_reference_file_on_a_full_disk(converted, refused, monkeypatch):
    write_small("small.safetensors")
    converted("small.safetensors", "small", *SMALL_OPTIONS)

    def full(array):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("marjax.torch_files.np.ascontiguousarray", full)
    message = refused("small", "out.safetensors", "--to", "safetensors")
    assert "Cannot write out.safetensors: the disk is full; free some space or write elsewhere." in message


def test_overwriting_what_is_no_checkpoint(refused, tmp_path):
    write_small("small.safetensors")
    for content in ({"params/precious.txt": "x"}, {"config.json": '{"format": "other"}'}):
        for name, text in content.items():
            (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "mine" / name).write_text(text)
        message = refused("small.safetensors", "mine", *SMALL_OPTIONS, "--overwrite")
        assert "Cannot write mine: it holds something else than a checkpoint; choose another name." in message
    for name in ("fashion_mnist", "fashion_mnist/"):
        assert "load would give the shipped model of that name" in refused("small.safetensors", name, *SMALL_OPTIONS)


@pytest.mark.parametrize("ratio", ["inf", "nan", "1e308", "-1"])
def test_ratios_that_are_none(refused, ratio):
    write_small("small.safetensors")
    message = refused("small.safetensors", "out", *SMALL_OPTIONS, f"--mlp-ratio={ratio}")
    assert "expected a positive number" in message or "must be finite and > 0" in message


@pytest.mark.torch
def test_odd_tensors_and_keys(converted, refused, tmp_path):
    import torch

    state = {key: torch.from_numpy(array.copy()) for key, array in small_state().items()}
    negated = {key: torch._neg_view(-tensor) for key, tensor in state.items()}
    torch.save({"model": negated}, tmp_path / "negated.pth")
    converted("negated.pth", "negated", *SMALL_OPTIONS)
    same_arrays(state_of("negated"), small_state())
    torch.save({"model": {**state, 3: state["z_proj.bias"]}}, tmp_path / "number.pth")
    assert "its entry 3 has no name" in refused("number.pth", "out", *SMALL_OPTIONS)
    (tmp_path / "negated.pth").rename(tmp_path / "renamed.safetensors")
    assert "it is a file of torch.save with another name; rename it to .pth" in refused(
        "renamed.safetensors", "out", *SMALL_OPTIONS
    )
