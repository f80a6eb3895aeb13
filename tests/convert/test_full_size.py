"""From files as large as the published ones to a picture: MAR-B and KL-16 in the reference's layout, random weights."""

from __future__ import annotations

import argparse
import ast

import jax
import numpy as np
import pytest
from convert_helpers import GOLDEN, write_pth

from marjax import checkpoint, convert, convert_vae, sample
from marjax.config import get_preset

pytestmark = [pytest.mark.slow, pytest.mark.torch]

# What the reference's training script stores for its MAR-B recipe, as far as the converter reads it, and more.
ARGS = {
    **{"model": "mar_base", "img_size": 256, "vae_path": "kl16.ckpt", "vae_embed_dim": 16, "vae_stride": 16},
    **{"patch_size": 1, "num_iter": 64, "cfg": 1.0, "cfg_schedule": "linear", "label_drop_prob": 0.1, "lr": None},
    **{"buffer_size": 64, "diffloss_d": 6, "diffloss_w": 1024, "num_sampling_steps": "100", "class_num": 1000},
    **{"diffusion_batch_mul": 4, "temperature": 1.0, "epochs": 400, "use_cached": True, "device": "cuda"},
}


def random_tensors(keys_file: str, seed: int) -> dict[str, np.ndarray]:
    """A state dict with the keys and shapes that a file lists; norms near one, the rest small."""
    rng, state = np.random.default_rng(seed), {}
    for line in (GOLDEN / keys_file).read_text(encoding="utf-8").splitlines():
        key, shape = line.split(" ", 1)
        values = rng.random(ast.literal_eval(shape), np.float32)
        values -= np.float32(0.5)
        values *= np.float32(0.05)
        is_norm = values.ndim == 1 and key.endswith(".weight")
        state[key] = values + np.float32(1) if is_norm else values
    return state


def test_from_the_published_files_to_a_picture(converted, tmp_path):
    state, vae_state = random_tensors("keys_mar_base.txt", 0), random_tensors("keys_vae_kl16.txt", 1)
    content = {
        **{"model": {key: array[..., :0] for key, array in state.items()}, "model_ema": state},
        **{"optimizer": {"state": {}, "param_groups": []}, "epoch": 399, "scaler": {"scale": 1.0}},
        "args": argparse.Namespace(**ARGS),
    }
    write_pth(tmp_path / "checkpoint-last.pth", content)
    write_pth(tmp_path / "kl16.ckpt", {"model": vae_state})
    out = converted("checkpoint-last.pth", "mar_base", "--vae", "kl16.ckpt")
    assert out.splitlines()[:2] == [
        "mar_base: mar_base, 256 x 256 pixels, 1000 classes, 256 tokens",
        "parameters: 207,924,768 (MAR) + 66,456,019 (autoencoder), matrices in float32",
    ]
    assert out.endswith("ignored: model, optimizer, epoch, scaler in checkpoint-last.pth\n")
    (tmp_path / "checkpoint-last.pth").unlink()

    params = checkpoint.load("mar_base")
    assert params.config == get_preset("mar_base") and checkpoint.describe("mar_base").preset == "mar_base"
    for got, expected in (
        (convert.to_state_dict(params), state),
        (convert_vae.to_state_dict(params.vae, params.config.vae), vae_state),
    ):
        assert got.keys() == expected.keys()
        for key, array in got.items():
            np.testing.assert_array_equal(array, expected[key], err_msg=key, strict=True)
    del got, state, vae_state, content

    images = sample(params, jax.random.key(0), [207], num_iter=4, num_sampling_steps="2")
    assert images.shape == (1, 256, 256, 3) and np.isfinite(images).all()
    assert images.min() >= 0 and images.max() <= 1
