"""Reading and writing weight files: what is in them comes out, bit for bit; what cannot be read is one sentence."""

from __future__ import annotations

import collections
import fractions
import os
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
from convert_helpers import (
    GOLDEN,
    SMALL,
    SMALL_ARGS,
    golden_state,
    pickled,
    same_arrays,
    small_checkpoint,
    small_state,
    write_pth,
    write_small,
    zip_around,
)
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from marjax.checkpoint import CheckpointError
from marjax.torch_files import read, writing


def write(*arguments, **options):
    with writing(*arguments, **options):
        pass


def arrays(state) -> dict[str, np.ndarray]:
    return {key: np.asarray(array) for key, array in state.items()}


def refused(path, weights=None) -> str:
    """The message of the one error that reading must give: a sentence that names the path."""
    with pytest.raises(CheckpointError) as caught:
        read(path, weights)
    message = str(caught.value)
    assert message.startswith(f"Cannot read '{os.fspath(path)}': ") and message.endswith(".") and "\n" not in message
    return message


# Files of torch.save.


@pytest.mark.torch
@pytest.mark.parametrize("name", ["tiny", "tiny_p2"])
def test_golden_training_checkpoint(name):
    file = read(GOLDEN / f"{name}.pth")
    same_arrays(arrays(file.state), golden_state(name))
    assert (file.weights, file.epoch, file.ignored) == ("model_ema", 3, ("model", "epoch"))
    assert file.args["vae_embed_dim"] == 16 and file.args["num_sampling_steps"] == "10" and file.args["lr"] is None
    assert file.config is None

    raw = read(GOLDEN / f"{name}.pth", "model")
    assert (raw.weights, raw.ignored) == ("model", ("model_ema", "epoch"))
    for key, array in raw.state.items():  # as the golden files were made
        changed = array.ndim == 1 or key in ("class_emb.weight", "fake_latent", "mask_token")
        np.testing.assert_array_equal(array, golden_state(name)[key] * np.float32(0.75 if changed else 1))


@pytest.mark.torch
def test_golden_autoencoder():
    file = read(GOLDEN / "vae_small.ckpt")
    same_arrays(arrays(file.state), golden_state("vae_small"))
    assert file.state["quant_conv.weight"].dtype == np.float16
    assert (file.weights, file.args, file.epoch, file.ignored) == ("model", None, None, ())


@pytest.mark.torch
def test_what_is_not_weights_is_listed(tmp_path):
    file = read(write_pth(tmp_path / "a.pth", small_checkpoint()))
    same_arrays(arrays(file.state), small_state())
    assert file.ignored == ("model", "optimizer", "epoch", "scaler") and file.epoch == 7
    assert file.args == SMALL_ARGS


@pytest.mark.torch
def test_flat_file_with_parameters_and_strides(tmp_path):
    import torch

    state = {key: torch.from_numpy(np.array(array)) for key, array in small_state().items()}
    state["class_emb.weight"] = torch.nn.Parameter(state["class_emb.weight"])
    state["z_proj.weight"] = state["z_proj.weight"].T.contiguous().T  # another memory layout
    torch.save(collections.OrderedDict(state), tmp_path / "a.pth")
    file = read(tmp_path / "a.pth")
    same_arrays(arrays(file.state), small_state())
    assert (file.weights, file.args, file.ignored) == (None, None, ())
    assert "it holds one set of weights, so there is no model to choose" in refused(tmp_path / "a.pth", "model")


@pytest.mark.torch
def test_narrow_tensors(tmp_path):
    import torch

    values = np.array([[1.5, -2.0], [3.140625, 0.0]], np.float32)
    for dtype, expected in ((torch.float16, np.float16), (torch.bfloat16, ml_dtypes.bfloat16)):
        torch.save({"model": {"w": torch.from_numpy(values).to(dtype)}}, tmp_path / "a.pth")
        same_arrays(arrays(read(tmp_path / "a.pth").state), {"w": values.astype(expected)})


@pytest.mark.torch
def test_registered_globals_neither_count_nor_get_lost(tmp_path):
    import torch

    torch.save({"model": {"w": torch.zeros(1)}, "args": fractions.Fraction}, tmp_path / "a.pth")
    torch.serialization.add_safe_globals([fractions.Fraction])
    try:
        torch.load(tmp_path / "a.pth", weights_only=True)  # as the user of torch allowed
        before = set(torch.serialization.get_safe_globals())
        assert "it refers to fractions.Fraction, where only tensors" in refused(tmp_path / "a.pth")
        assert set(torch.serialization.get_safe_globals()) == before
        read(write_pth(tmp_path / "b.pth", small_checkpoint()))
        assert set(torch.serialization.get_safe_globals()) == before
    finally:
        torch.serialization.clear_safe_globals()


def test_without_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert 'needs PyTorch; run pip install "marjax[convert]".' in refused(GOLDEN / "tiny.pth")
    same_arrays(arrays(read(GOLDEN / "tiny.safetensors").state), golden_state("tiny"))


@pytest.mark.torch
def test_torch_whose_safe_mode_is_not_safe(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.1+cpu"))
    message = refused(GOLDEN / "tiny.pth")
    assert 'the safe mode of torch 2.9.1+cpu is not safe, 2.10 or newer is needed; run pip install -U "mar' in message


@pytest.mark.torch
@pytest.mark.parametrize(
    ("content", "weights", "message"),
    [
        ([1, 2], None, "it holds a list, expected a dictionary of weights"),
        ({1: 2}, None, "it holds a dict, expected a dictionary of weights"),
        ({}, None, "it has no model_ema or model or state_dict, only nothing"),
        ({"epoch": 3, "net": {}}, None, "it has no model_ema or model or state_dict, only epoch, net"),
        ({"model": {"w": np.ones(1)}}, "model_ema", "it has no model_ema, only model; leave --weights out"),
        ({"model": {"w": np.ones(1), "n": 3}}, None, "its entry n is a int, expected a tensor"),
        ({"w": np.ones(1), "inner": {"v": np.ones(1)}}, None, "its entry inner is a dict, expected a tensor"),
    ],
)
def test_contents_that_are_something_else(tmp_path, content, weights, message):
    assert message in refused(write_pth(tmp_path / "a.pth", content), weights)


@pytest.mark.torch
def test_tensors_larger_than_their_file(tmp_path):
    import torch

    torch.save({"model": {"w": torch.zeros(1).expand(10**9)}}, tmp_path / "a.pth")
    assert "its tensors are larger than the file" in refused(tmp_path / "a.pth")


@pytest.mark.torch
def test_archives_that_torch_does_not_write(tmp_path):
    import torch

    torch.save({"model": {}}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert "neither a safetensors file nor a zip archive as torch.save has written since" in refused(
        tmp_path / "old.pth"
    )

    with zipfile.ZipFile(tmp_path / "deflated.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickled({"model": {}}))
    assert "its records are compressed" in refused(tmp_path / "deflated.pth")

    with zipfile.ZipFile(tmp_path / "double.pth", "w") as archive:
        archive.writestr("archive/data.pkl", pickled({"model": {}}))
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("archive/data.pkl", pickled({"model": {}}))
    assert "it has two records of one name" in refused(tmp_path / "double.pth")

    with zipfile.ZipFile(tmp_path / "other.pth", "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "torch cannot read it safely (RuntimeError" in refused(tmp_path / "other.pth")

    zip_around(tmp_path / "cut.pth", pickled({"model": {}})[:-3])
    assert "its pickle is damaged (" in refused(tmp_path / "cut.pth")

    zip_around(tmp_path / "script.pth", pickled({"model": {}}))
    with zipfile.ZipFile(tmp_path / "script.pth", "a") as archive:
        archive.writestr("archive/constants.pkl", pickled(()))  # the mark of TorchScript, which is code
    assert "torch cannot read it safely (RuntimeError: Cannot use" in refused(tmp_path / "script.pth")


# Safetensors.


def test_flat_safetensors(tmp_path):
    state = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(3, dtype=np.float16),
        "c": np.arange(4, dtype=ml_dtypes.bfloat16).reshape(2, 1, 2),
        "empty": np.zeros((0, 2), np.float32),
        "scalar": np.array(2.5, np.float32),
    }
    save_file(state, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = read(str(tmp_path / "a.safetensors"))
    same_arrays(arrays(file.state), state)
    assert file.shapes == {key: array.shape for key, array in state.items()}
    assert (file.weights, file.args, file.epoch, file.config, file.ignored) == (None, None, None, None, ())
    assert "it holds one set of weights" in refused(tmp_path / "a.safetensors", "model")


def test_the_content_decides_and_not_the_name(tmp_path):
    (tmp_path / "a.pth").write_bytes(write_small(tmp_path / "a.safetensors").read_bytes())
    same_arrays(arrays(read(tmp_path / "a.pth").state), small_state())


def test_write_and_read(tmp_path):
    state = {key: array.T.copy().T for key, array in small_state().items()}  # other memory layouts
    state["fake_latent"] = state["fake_latent"].astype(ml_dtypes.bfloat16)
    write(tmp_path / "a.safetensors", state, SMALL)
    file = read(tmp_path / "a.safetensors")
    same_arrays(arrays(file.state), state)
    same_arrays(load_file(tmp_path / "a.safetensors"), state)
    assert file.config == SMALL
    with safe_open(tmp_path / "a.safetensors", "numpy") as opened:
        assert opened.metadata()["format"] == "pt"
    with pytest.raises(FileExistsError, match=r"a\.safetensors: it exists; choose another name"):
        write(tmp_path / "a.safetensors", state, SMALL)
    before = (tmp_path / "a.safetensors").read_bytes()
    write(tmp_path / "a.safetensors", state, SMALL, overwrite=True)
    assert (tmp_path / "a.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.torch
def test_torch_reads_what_is_written(tmp_path):
    from safetensors.torch import load_file as load_tensors

    write(tmp_path / "a.safetensors", small_state(), SMALL)
    loaded = {key: tensor.numpy() for key, tensor in load_tensors(tmp_path / "a.safetensors").items()}
    same_arrays(loaded, small_state())


def with_header(path, change) -> None:
    """Rewrites the header of a safetensors file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = change(content[8:end].decode()).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


def test_headers_that_say_something_else(tmp_path):
    path = tmp_path / "a.safetensors"
    write(path, {"w": np.ones(4, np.float32)}, SMALL)
    with_header(path, lambda text: text.replace('"w":', '"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"w":'))
    assert "its header lists a name twice" in refused(path)

    write(path, {"w": np.ones(4, np.float32)}, SMALL, overwrite=True)
    with_header(path, lambda text: text.replace('"shape":[4]', '"shape":[5]'))
    assert "it is not a complete safetensors file" in refused(path)

    for damage in (("img_size", "img_sise"), ('\\"class_num\\": 3', '\\"class_num\\": 0'), ('{\\"img', '[\\"img')):
        write(path, {"w": np.ones(4, np.float32)}, SMALL, overwrite=True)
        with_header(path, lambda text, damage=damage: text.replace(*damage))
        assert "the configuration in its metadata is damaged" in refused(path)

    save_file({"w": np.ones(4, ml_dtypes.float8_e5m2)}, path)
    assert "it has arrays of dtype F8_E5M2, expected F32, F16 or BF16" in refused(path)


# Not files of either kind.


def test_what_is_no_weight_file(tmp_path):
    assert "no such file" in refused(tmp_path / "nope.pth")
    assert "no such file" in refused("")
    assert "it is not a regular file" in refused(tmp_path)
    assert "it is not a regular file" in refused(os.devnull)
    (tmp_path / "loop.pth").symlink_to(tmp_path / "loop.pth")
    assert "the path is unusable" in refused(tmp_path / "loop.pth")
    assert "the path is unusable" in refused("nul\0byte.pth")
    (tmp_path / "empty.pth").touch()
    assert "it is empty" in refused(tmp_path / "empty.pth")
    assert "the path is unusable" in refused(tmp_path / "empty.pth" / "inside.pth")
    os.mkfifo(tmp_path / "pipe.pth")  # opening it would wait for ever
    assert "it is not a regular file" in refused(tmp_path / "pipe.pth")
    for name, content in (("a.pth", b"hello"), ("b.ckpt", b"\x80\x02}."), ("c.pt", b"\0" * 100)):
        (tmp_path / name).write_bytes(content)
        assert "it is neither a safetensors file nor a zip archive" in refused(tmp_path / name)
    (tmp_path / "d.safetensors").write_bytes(b"hello")
    assert "it is not a complete safetensors file" in refused(tmp_path / "d.safetensors")
