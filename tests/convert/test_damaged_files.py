"""Two hundred damaged files: each is refused with one sentence, or reads as what it was before."""

from __future__ import annotations

import json

import numpy as np
import pytest
from convert_helpers import HEADS, SMALL, same_arrays, small_checkpoint, small_state, write_pth, write_small
from safetensors.numpy import save_file

from marjax import detection, torch_files
from marjax.checkpoint import CheckpointError

OPTIONS = ("--encoder-num-heads", "3", "--decoder-num-heads", "2", "--patch-size", "1", "--vae-stride", "4")
CLOSED = {**HEADS, "patch_size": 1, "vae_stride": 4}


def outcome(path) -> str | None:
    """What is wrong with a file; None if it reads as the state dict of SMALL, bit for bit."""
    try:
        file = torch_files.read(path)
        with torch_files.reporting(f"Cannot convert '{path}'"):
            assert detection.kind(file.state) == "mar"
            config = detection.detect_mar(file.shapes, args=file.args, options=CLOSED)
    except CheckpointError as error:
        message = str(error)
        assert message.startswith("Cannot ") and str(path) in message and message.endswith(".")
        return message
    assert config.seq_len == SMALL.seq_len
    same_arrays({key: np.asarray(array) for key, array in file.state.items()}, small_state())
    return None


@pytest.fixture(scope="module")
def pth(tmp_path_factory):
    return write_pth(tmp_path_factory.mktemp("files") / "small.pth", small_checkpoint()).read_bytes()


@pytest.fixture(scope="module")
def safetensors(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("files") / "small.safetensors").read_bytes()


def flipped(content: bytes, position: int, bit: int) -> bytes:
    damaged = bytearray(content)
    damaged[position] ^= 1 << bit
    return bytes(damaged)


@pytest.mark.torch
@pytest.mark.parametrize("seed", range(40))
def test_flipped_bit_in_a_pth(pth, tmp_path, seed):
    """Data and pickle have checksums; what has none (dates, padding) does not matter."""
    rng = np.random.default_rng(seed)
    # Half of them in the directory at the end, which is small.
    low = pth.rindex(b"PK\x01\x02") - 2000 if seed % 2 else 0
    (tmp_path / "a.pth").write_bytes(flipped(pth, int(rng.integers(low, len(pth))), int(rng.integers(8))))
    outcome(tmp_path / "a.pth")


@pytest.mark.torch
def test_flipped_bit_in_the_weights_of_a_pth(pth, tmp_path):
    data = small_state()["z_proj.weight"].tobytes()
    for position in (pth.index(data), pth.index(data) + len(data) - 1):
        (tmp_path / "a.pth").write_bytes(flipped(pth, position, 3))
        assert "does not match its checksum; get a fresh copy" in outcome(tmp_path / "a.pth")


@pytest.mark.torch
@pytest.mark.parametrize("seed", range(20))
def test_truncated_pth(pth, tmp_path, seed):
    (tmp_path / "a.pth").write_bytes(pth[: int(np.random.default_rng(seed).integers(1, len(pth)))])
    assert outcome(tmp_path / "a.pth") is not None


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bit_in_the_header_of_safetensors(safetensors, tmp_path, seed):
    rng, end = np.random.default_rng(seed), 8 + int.from_bytes(safetensors[:8], "little")
    position = int(rng.integers(8) if seed < 8 else rng.integers(8, end))
    (tmp_path / "a.safetensors").write_bytes(flipped(safetensors, position, int(rng.integers(8))))
    assert outcome(tmp_path / "a.safetensors") is not None or safetensors[position : position + 1] == b" "


@pytest.mark.parametrize("seed", range(20))
def test_truncated_safetensors(safetensors, tmp_path, seed):
    (tmp_path / "a.safetensors").write_bytes(
        safetensors[: int(np.random.default_rng(seed).integers(1, len(safetensors)))]
    )
    assert "safetensors file" in outcome(tmp_path / "a.safetensors")


@pytest.mark.parametrize("seed", range(20))
def test_swapped_keys_of_unlike_shapes(tmp_path, seed):
    rng, keys = np.random.default_rng(seed), list(small_state())
    one, other = keys[0], keys[0]
    while small_state()[one].shape == small_state()[other].shape:
        one, other = rng.choice(keys, 2)
    write_small(tmp_path / "a.safetensors", **{one: small_state()[other], other: small_state()[one]})
    assert outcome(tmp_path / "a.safetensors") is not None


@pytest.mark.parametrize("seed", range(20))
def test_wrong_shapes(tmp_path, seed):
    rng = np.random.default_rng(seed)
    key = rng.choice(list(small_state()))
    array = small_state()[key]
    change = [
        lambda: np.concatenate([array, array]),
        lambda: array[:0],
        lambda: array[None],
        lambda: array.reshape(-1)[:-1],
        lambda: array.reshape(-1, 1, 1),
    ][seed % 5]
    write_small(tmp_path / "a.safetensors", **{key: change()})
    assert outcome(tmp_path / "a.safetensors") is not None


@pytest.mark.parametrize("seed", range(20))
def test_missing_extra_and_renamed_keys(tmp_path, seed):
    key = np.random.default_rng(seed).choice(list(small_state()))
    changes = [{key: None}, {f"{key}.extra": np.ones(2, np.float32)}, {key: None, f"x{key}": small_state()[key]}][
        seed % 3
    ]
    write_small(tmp_path / "a.safetensors", **changes)
    message = outcome(tmp_path / "a.safetensors")
    assert any(text in message for text in ("missing key", "unused key", "position embeddings"))


@pytest.mark.torch
def test_damage_as_a_command(refused, pth, safetensors, tmp_path):
    """The same through the command line: exit code 2, one sentence, nothing written."""
    state = small_state()
    swapped = {"z_proj.weight": state["class_emb.weight"], "class_emb.weight": state["z_proj.weight"]}
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "flat.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (tmp_path / "cut.pth").write_bytes(pth[: len(pth) // 2])
    (tmp_path / "cut.safetensors").write_bytes(safetensors[:-1])
    (tmp_path / "empty.pth").touch()
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "loop.pth").symlink_to("loop.pth")
    write_small(tmp_path / "swapped.safetensors", **swapped)
    write_small(tmp_path / "missing.safetensors", **{"z_proj.bias": None})
    save_file({"pos_embed": np.ones(3, np.float32)}, tmp_path / "foreign.safetensors")
    for path in sorted(tmp_path.iterdir()):
        message = refused(path.name, "out", *OPTIONS)
        assert f"'{path.name}'" in message
