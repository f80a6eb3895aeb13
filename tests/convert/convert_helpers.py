"""Weight files to convert: the golden ones, and such as are made here."""

from __future__ import annotations

import argparse
import functools
import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from marjax import convert
from marjax.config import MARConfig

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"

# No preset has these shapes, and nothing about them is ambiguous that does not have to be: 16 values per token.
SMALL = MARConfig(
    **{"img_size": 16, "vae_stride": 4, "patch_size": 1, "vae_embed_dim": 16, "class_num": 3, "buffer_size": 2},
    **{"encoder_embed_dim": 24, "encoder_depth": 2, "encoder_num_heads": 3, "diffloss_d": 1, "diffloss_w": 8},
    **{"decoder_embed_dim": 16, "decoder_depth": 1, "decoder_num_heads": 2},
)
# What the reference's training script would have been called with.
SMALL_ARGS = {
    **{"model": "my_mar", "img_size": 16, "vae_stride": 4, "patch_size": 1, "vae_embed_dim": 16, "class_num": 3},
    **{"buffer_size": 2, "diffloss_d": 1, "diffloss_w": 8, "num_sampling_steps": "20", "cfg": 1.0, "lr": None},
}
HEADS = {"encoder_num_heads": 3, "decoder_num_heads": 2}


@functools.cache
def golden_state(name: str) -> dict[str, np.ndarray]:
    """A golden state dict as the reference has it; do not write to it."""
    return load_file(GOLDEN / f"{name}.safetensors")


def shapes_of(config: MARConfig) -> dict[str, tuple[int, ...]]:
    """Key -> shape of a model in the reference's layout."""
    return convert.torch_shapes(convert.mar_template(config), convert.mar_source)


def random_state(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """Small random values, quickly drawn."""
    rng = np.random.default_rng(seed)
    return {key: rng.random(shape, np.float32) * np.float32(0.1) - np.float32(0.05) for key, shape in shapes.items()}


@functools.cache
def small_state() -> dict[str, np.ndarray]:
    """A state dict of SMALL; do not write to it."""
    return random_state(shapes_of(SMALL))


def write_small(path: Path, **changes: np.ndarray | None) -> Path:
    """SMALL as flat safetensors; keys replaced, added, or (with None) left out."""
    state = {key: array for key, array in {**small_state(), **changes}.items() if array is not None}
    save_file({key: np.ascontiguousarray(array) for key, array in state.items()}, path)
    return path


def write_pth(path: Path, content: object) -> Path:
    """`torch.save`, of numpy arrays as tensors."""
    import torch

    def tensors(value):
        if isinstance(value, np.ndarray):
            return torch.from_numpy(np.array(value))
        return {key: tensors(part) for key, part in value.items()} if isinstance(value, dict) else value

    torch.save(tensors(content), path)
    return path


def small_checkpoint(**args) -> dict[str, object]:
    """A training checkpoint of SMALL as the reference saves it; `model` differs from `model_ema`."""
    state = small_state()
    return {
        "model": {key: array * np.float32(0.75) for key, array in state.items()},
        "model_ema": state,
        "optimizer": {"state": {0: {"step": np.ones(1, np.float32)}}, "param_groups": [{"lr": 1e-4, "params": [0]}]},
        "epoch": 7,
        "scaler": {"scale": 65536.0},
        "args": argparse.Namespace(**{**SMALL_ARGS, **args}),
    }


def zip_around(path: Path, data: bytes, name: str = "archive/data.pkl") -> Path:
    """The zip format of `torch.save` around a pickle of one's own."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(name, data)
        archive.writestr("archive/version", "3\n")
    return path


def pickled(value: object, protocol: int = 2) -> bytes:
    """A pickle by Python's own, unsafe, pickler."""
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol).dump(value)
    return buffer.getvalue()


def same_arrays(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Asserts that two state dicts are equal, bit for bit."""
    assert got.keys() == expected.keys()
    for key, array in got.items():
        assert array.dtype == expected[key].dtype, key
        assert array.shape == expected[key].shape and array.tobytes() == expected[key].tobytes(), key
