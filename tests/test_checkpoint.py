"""Checkpoints: what is saved comes back exactly; anything else is refused with one sentence."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from marjax import checkpoint, mar, vae
from marjax.checkpoint import CheckpointError, describe, load, save, save_file
from marjax.config import VAEConfig, get_preset
from marjax.types import MARParams, cast_matrices

CONFIG = dataclasses.replace(get_preset("tiny"), class_names=tuple("abcdefghij"))


def make_params(config=CONFIG) -> MARParams:
    """Random float32 leaves in the initialisers' shapes, without compiling the initialisers."""
    rng = np.random.default_rng(0)

    def fill(init, config):
        shapes = jax.eval_shape(lambda key: init(config, key), jax.random.key(0))
        return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes)

    return MARParams(
        mar=fill(mar.init, config), vae=None if config.vae is None else fill(vae.init, config.vae), config=config
    )


PARAMS = make_params()


def with_kernel(params: MARParams, kernel) -> MARParams:
    return params.replace(mar={**params.mar, "z_proj": {**params.mar["z_proj"], "kernel": kernel}})


def assert_same(got: MARParams, expected: MARParams) -> None:
    assert got.config == expected.config
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array) and a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def refused(source) -> str:
    """The message of the one error that loading must give: a sentence that names the path."""
    with pytest.raises(CheckpointError) as caught:
        load(source)
    message = str(caught.value)
    assert os.fspath(source) in message and message.endswith(".") and "\n" not in message
    return message


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "run"
    save(PARAMS, path, preset="tiny", provenance={"steps": 3, "data": ["a", None, 0.5]})
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "model.safetensors"
    save_file(PARAMS, path, dtype="bfloat16", preset="tiny", provenance={"steps": 3})
    return path


# What is saved comes back.


def test_directory_round_trip(directory):
    assert_same(load(directory), PARAMS)
    assert sorted(os.listdir(directory)) == ["config.json", "params"]
    assert os.listdir(directory.parent) == ["run"]
    header = describe(str(directory))
    assert header.config == CONFIG and header.preset == "tiny"
    assert header.provenance == {"steps": 3, "data": ["a", None, 0.5]}
    assert header.leaves["mar/z_proj/kernel"].shape == (16, 48)


def test_file_round_trip_with_cast(file):
    assert_same(load(file), PARAMS.replace(mar=cast_matrices(PARAMS.mar, jnp.bfloat16)))
    assert describe(file).provenance == {"steps": 3}
    assert "mar/encoder_blocks/qkv/kernel" in safetensors.numpy.load_file(file)


def test_file_keeps_dtypes_unless_told(tmp_path):
    mixed = with_kernel(PARAMS, PARAMS.mar["z_proj"]["kernel"].astype(jnp.bfloat16))
    save_file(mixed, tmp_path / "a.safetensors")
    assert_same(load(tmp_path / "a.safetensors"), mixed)
    save_file(mixed, tmp_path / "a.safetensors", dtype="float32", overwrite=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(load(tmp_path / "a.safetensors"))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("kernels", ["float32", "bfloat16"])
def test_both_forms_with_autoencoder(kernels, tmp_path):
    params = make_params(dataclasses.replace(CONFIG, vae=VAEConfig(ch=32, ch_mult=(1, 1, 1, 2), num_res_blocks=1)))
    params = params.replace(
        mar=cast_matrices(params.mar, jnp.dtype(kernels)), vae=cast_matrices(params.vae, jnp.dtype(kernels))
    )
    save(params, tmp_path / "run")
    save_file(params, tmp_path / "run.safetensors")
    assert_same(load(tmp_path / "run"), params)
    assert_same(load(tmp_path / "run.safetensors"), params)


def test_latent_model_without_its_autoencoder(tmp_path):
    params = PARAMS.replace(config=dataclasses.replace(CONFIG, vae=VAEConfig(ch_mult=(1, 1, 1, 1))))
    save_file(params, tmp_path / "latent.safetensors")
    assert_same(load(tmp_path / "latent.safetensors"), params)


def test_equal_models_give_equal_files(file, tmp_path):
    again = tmp_path / "again.safetensors"
    save_file(PARAMS, again, dtype="bfloat16", preset="tiny", provenance={"steps": 3})
    assert again.read_bytes() == file.read_bytes()


def test_shipped_name(file, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.resources, "files", lambda package: tmp_path / package)
    assets = tmp_path / "marjax" / "assets"
    assets.mkdir(parents=True)
    (assets / "fashion_mnist.safetensors").write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert_same(load("fashion_mnist"), load(file))
    assert "no such path" in refused("./fashion_mnist")  # written as a path, it is a path
    with pytest.raises(CheckpointError, match=r"the shipped model of that name; use \./fashion_mnist\.$"):
        save(PARAMS, "fashion_mnist")


def test_process_output_stays_clean(tmp_path):
    """Saving and loading neither warn nor log, and orbax is imported for directories only."""
    script = """
import sys
from marjax import checkpoint
params = checkpoint.load(sys.argv[1])
assert "orbax" not in sys.modules and "orbax.checkpoint" not in sys.modules
checkpoint.save(params, sys.argv[2])
checkpoint.load(sys.argv[2])
"""
    save_file(PARAMS, tmp_path / "a.safetensors")
    arguments = [sys.executable, "-W", "error", "-c", script, str(tmp_path / "a.safetensors"), str(tmp_path / "b")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# What must not be saved.


def test_existing_checkpoint_is_replaced_only_when_asked(tmp_path):
    save_file(PARAMS, tmp_path / "a.safetensors")
    save(PARAMS, tmp_path / "run")
    other = PARAMS.replace(config=dataclasses.replace(CONFIG, cfg=1.5))
    with pytest.raises(FileExistsError, match=r"run: it exists; choose another name or ask to overwrite it"):
        save(other, tmp_path / "run")
    with pytest.raises(FileExistsError, match=r"a\.safetensors: it exists; choose another name"):
        save_file(other, tmp_path / "a.safetensors")
    save(other, tmp_path / "run", overwrite=True)
    save_file(other, tmp_path / "a.safetensors", overwrite=True)
    assert load(tmp_path / "run").config.cfg == load(tmp_path / "a.safetensors").config.cfg == 1.5
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "run"]


def test_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save(PARAMS, tmp_path / "run")

    def fail(directory, arrays):
        (directory / "partial").mkdir(parents=True)
        raise RuntimeError("injected")

    monkeypatch.setattr(checkpoint, "_write_arrays", fail)
    with pytest.raises(RuntimeError, match="injected"):
        save(PARAMS.replace(config=dataclasses.replace(CONFIG, cfg=1.5)), tmp_path / "run", overwrite=True)
    assert_same(load(tmp_path / "run"), PARAMS)
    assert os.listdir(tmp_path) == ["run"]


def test_foreign_directory_is_never_overwritten(tmp_path):
    save(PARAMS, tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match=r"overwriting would delete notes\.txt, which is in it; choose another"):
        save(PARAMS, tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "notes.txt").exists()


def test_full_disk(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"run: the disk is full; free some space or write elsewhere\.$"):
        save(PARAMS, tmp_path / "run")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.mar, r"Cannot save a dict; give a marjax\.MARParams\.$"),
        (
            lambda p: with_kernel(p, p.mar["z_proj"]["kernel"].at[0, 0].set(jnp.nan)),
            r"NaN or infinite values in mar/z_proj/kernel; use an earlier checkpoint\.$",
        ),
        (
            lambda p: with_kernel(p, p.mar["z_proj"]["kernel"].astype(jnp.float16)),
            r"mar/z_proj/kernel has dtype float16, expected float32 or bfloat16",
        ),
        (
            lambda p: p.replace(mar={**p.mar, "mask_token": p.mar["mask_token"].astype(jnp.bfloat16)}),
            r"mar/mask_token has dtype bfloat16, expected float32;",
        ),
        (lambda p: p.replace(vae={"kernel": jnp.ones(2)}), r"vae/kernel is not part of the model"),
    ],
)
@pytest.mark.parametrize(("writer", "name"), [(save, "run"), (save_file, "a.safetensors")])
def test_unfit_params(change, message, writer, name, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        writer(change(PARAMS), tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_every_unfit_leaf_is_listed_at_once(tmp_path):
    tree = {name: leaf for name, leaf in PARAMS.mar.items() if name not in ("fake_latent", "decoder_norm")}
    tree |= {"class_emb": tree["class_emb"][1:], "surplus": jnp.ones(1)}
    with pytest.raises(CheckpointError) as caught:
        save(PARAMS.replace(mar=tree), tmp_path / "run")
    for part in (
        "mar/fake_latent is missing",
        "mar/decoder_norm/bias is missing",
        "mar/decoder_norm/scale is missing",
        "mar/surplus is not part of the model",
        "mar/class_emb has shape (9, 48), expected (10, 48)",
    ):
        assert part in str(caught.value)


def test_unfit_arguments(tmp_path):
    with pytest.raises(CheckpointError, match=r"the name must end in \.safetensors; use save for a directory"):
        save_file(PARAMS, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"save makes a directory; use save_file for a \.safetensors file"):
        save(PARAMS, tmp_path / "run.safetensors")
    with pytest.raises(CheckpointError, match=r"Cannot save as dtype='float16'; expected None or one of float32"):
        save_file(PARAMS, tmp_path / "a.safetensors", dtype="float16")
    with pytest.raises(CheckpointError, match=r"provenance must hold JSON values only \(.*array.*\); convert"):
        save(PARAMS, tmp_path / "run", provenance={"loss": np.ones(2)})
    with pytest.raises(CheckpointError, match=r"provenance must hold JSON values only"):
        save(PARAMS, tmp_path / "run", provenance={"loss": float("nan")})
    with pytest.raises(ValueError, match=r"Unknown preset 'mar_gigantic'; expected one of mar_base"):
        save(PARAMS, tmp_path / "run", preset="mar_gigantic")
    with pytest.raises(FileNotFoundError, match=r"nope does not exist; create that folder first"):
        save(PARAMS, tmp_path / "nope" / "run")
    assert os.listdir(tmp_path) == []


# What must not be loaded.


def test_no_checkpoint_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no such path; give a checkpoint directory" in refused("imagenet")
    assert "'mar_base': it is a preset, of which no weights ship; give" in refused("mar_base")
    assert "the name of a shipped model (fashion_mnist)" in refused(tmp_path / "nope")
    assert "no such path" in refused("")
    (tmp_path / "weights.pth").touch()
    assert "neither a checkpoint directory nor a .safetensors file; convert" in refused(tmp_path / "weights.pth")
    assert "neither a checkpoint directory" in refused(os.devnull)
    assert "config.json cannot be read (No such file or directory); give a directory" in refused(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "the path is unusable" in refused(tmp_path / "loop")
    assert "the path is unusable" in refused("nul\0byte")
    assert "the path is unusable" in refused(tmp_path / "weights.pth" / "inside")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header is not readable JSON"),
        (b"{", "its header is not readable JSON"),
        (b"\xff\xfe\xfd", "its header is not readable JSON"),
        (b"[" * 100_000, "its header is not readable JSON"),
        (b"[]", "its header was not written by marjax"),
        (b'{"model_type": "vit", "format": "pt"}', "its header was not written by marjax"),
        (b'{"format": "marjax", "format_version": 7}', "it has format_version 7, expected 1; read it with the marjax"),
        (b'{"format": "marjax"}', "it has format_version None, expected 1"),
        (b'{"format": "marjax", "format_version": 1}', "its header does not match its checksum"),
    ],
)
def test_foreign_or_damaged_header(content, message, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    assert message in refused(tmp_path)


def test_edited_header(directory, tmp_path):
    values = json.loads((directory / "config.json").read_bytes())
    values["config"]["cfg"] = 9.0
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "damaged or edited" in refused(tmp_path)


def test_foreign_safetensors(tmp_path):
    path = tmp_path / "vit.safetensors"
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, path)
    assert "it was not written by marjax; convert PyTorch weights with `marjax convert`" in refused(path)
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, path, {"marjax": "{}"})
    assert "its header was not written by marjax" in refused(path)


def test_arrays_of_another_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_check_leaves", lambda leaves, config: None)
    other = dataclasses.replace(CONFIG, class_num=12, class_names=())
    save_file(PARAMS.replace(config=other), tmp_path / "a.safetensors")
    save(PARAMS.replace(config=other), tmp_path / "run")
    monkeypatch.undo()
    for source in (tmp_path / "a.safetensors", tmp_path / "run"):
        assert "mar/class_emb has shape (10, 48), expected (12, 48); use the config" in refused(source)
        with pytest.raises(CheckpointError, match="arrays and configuration do not fit"):
            describe(source)


def test_values_that_are_not_finite(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_check_finite", lambda arrays: None)
    kernel = PARAMS.mar["z_proj"]["kernel"]
    save_file(with_kernel(PARAMS, kernel.at[3, 3].set(jnp.inf)), tmp_path / "a.safetensors", dtype="bfloat16")
    save(with_kernel(PARAMS, kernel.at[3, 3].set(jnp.nan)), tmp_path / "run")
    monkeypatch.undo()
    for source in (tmp_path / "a.safetensors", tmp_path / "run"):
        assert "NaN or infinite values in mar/z_proj/kernel; use an earlier checkpoint" in refused(source)


def test_arrays_that_the_header_does_not_list(file, tmp_path):
    arrays = safetensors.numpy.load_file(file)
    with safetensors.safe_open(file, framework="numpy") as opened:
        metadata = opened.metadata()
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors.numpy.save({**arrays, "surplus": np.ones(1, np.float32)}, metadata))
    assert "its arrays are not those that its header lists" in refused(path)
    dropped = {name: array for name, array in arrays.items() if name != "mar/fake_latent"}
    path.write_bytes(safetensors.numpy.save(dropped, metadata))
    assert "mar/fake_latent is damaged or missing" in refused(path)
    wider = {**arrays, "mar/z_proj/kernel": arrays["mar/z_proj/kernel"].view(ml_dtypes.bfloat16).reshape(48, 16)}
    path.write_bytes(safetensors.numpy.save(wider, metadata))
    assert "its arrays are not those that its header lists" in refused(path)


def test_damage_to_any_file_of_a_directory(directory, capfd):
    parts = [part for part in sorted(directory.rglob("*")) if part.is_file()]
    assert len(parts) > 3
    for part in parts:
        content = part.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if content else b"x"
        expected = "header" if part.name == "config.json" else part.relative_to(directory).as_posix()
        part.write_bytes(flipped)
        assert expected in refused(directory)
        part.unlink()
        assert part.name in refused(directory)
        part.write_bytes(content)
    assert_same(load(directory), PARAMS)
    assert capfd.readouterr() == ("", "")


@settings(max_examples=60)
@given(st.data())
def test_damage_to_a_file(file, data):
    content = file.read_bytes()
    # Half of the flips fall into the header, a small part of the file.
    header_end = 8 + int.from_bytes(content[:8], "little")
    position = data.draw(st.integers(0, header_end - 1) | st.integers(header_end, len(content) - 1))
    flipped = bytearray(content)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    damaged = file.with_name("damaged.safetensors")
    damaged.write_bytes(bytes(flipped) if data.draw(st.booleans()) else content[:position])
    refused(damaged)


def test_directory_from_elsewhere_with_relative_path(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    assert_same(load("run"), PARAMS)
    assert_same(load(Path("run")), PARAMS)


def test_unreadable_array_file(directory, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "_digest_file", denied)
    assert "Permission denied" in refused(directory)
