"""Golden models, the step from the reference's image order to our generation order, and tiny cached latents."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from marjax import convert, vae
from marjax.config import MARConfig, VAEConfig
from marjax.types import MARParams

GOLDEN = Path(__file__).parent / "golden"

TINY_VAE = VAEConfig(ch=32, ch_mult=(1, 1), num_res_blocks=1, embed_dim=4, scale=0.5)

# `jax.jit` for programs that run once or twice: compiles in half the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def golden_config(name: str) -> MARConfig:
    """The configuration of a golden model ("tiny" or "tiny_p2")."""
    values = json.loads((GOLDEN / "configs.json").read_text(encoding="utf-8"))["configs"][name]
    shared = ("img_size", "vae_stride", "patch_size", "vae_embed_dim", "mlp_ratio", "buffer_size", "class_num")
    stacks = {
        f"{stack}_{ours}": values[theirs]
        for stack in ("encoder", "decoder")
        for ours, theirs in (("embed_dim", "embed_dim"), ("depth", "depth"), ("num_heads", "heads"))
    }
    head = {key: values[key] for key in ("diffloss_d", "diffloss_w", "num_sampling_steps")}
    return MARConfig(**{key: values[key] for key in shared}, **stacks, **head)


@functools.cache
def golden_state(name: str) -> dict[str, np.ndarray]:
    """The reference's state dict of a golden model; do not write to it."""
    return load_file(GOLDEN / f"{name}.safetensors")


@functools.cache
def golden_params(name: str) -> MARParams:
    """The weights of a golden model."""
    return convert.from_state_dict(golden_state(name), golden_config(name))


def generation_order(mask: np.ndarray) -> np.ndarray:
    """[B, S] mask in image order, 1 where a token is unknown -> [B, S] an order with the known tokens first."""
    return np.argsort(mask, axis=1, kind="stable")


def to_generation(array: np.ndarray, order: np.ndarray, buffer_size: int = 0) -> np.ndarray:
    """[B, buffer + S, ...] rows in image order -> the same rows in generation order, buffers still first."""
    buffers = np.broadcast_to(np.arange(buffer_size), (len(order), buffer_size))
    index = np.concatenate([buffers, buffer_size + order], axis=1)
    return np.take_along_axis(array, index.reshape(*index.shape, *(1,) * (array.ndim - 2)), axis=1)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Frobenius norm of the difference over that of the expected array."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@functools.cache
def random_vae(config: VAEConfig = TINY_VAE):
    """Weights of an autoencoder, without compiling the initialiser."""
    rng, template = np.random.default_rng(0), jax.eval_shape(functools.partial(vae.init, config), jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 0.1, jnp.float32), template)


def make_images(root: Path, counts: dict[str, int], size: int = 8) -> Path:
    """A folder of random images, so many in each class."""
    rng = np.random.default_rng(1)
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def fake_encoder(config: VAEConfig, params, devices):
    """Stands in for `marjax.encode._make_encoder`: moments that follow from the pixels, without compiling anything."""

    def moments(pixels: np.ndarray) -> np.ndarray:
        batch, height, width, channels = pixels.shape
        stride = config.stride
        blocks = pixels.reshape(batch, height // stride, stride, width // stride, stride, channels).mean(axis=(2, 4))
        mean = blocks[..., :1] * np.arange(1, config.embed_dim + 1)
        return np.concatenate([mean, blocks[..., 1:2] - np.arange(config.embed_dim)], axis=-1)

    def encode(images: np.ndarray) -> np.ndarray:
        pixels = images.astype(np.float32) / 127.5 - 1
        return np.stack([moments(pixels), moments(pixels[:, :, ::-1])], axis=1).astype(np.float32)

    return encode


def write_idx(folder, split, images, labels):
    """Images uint8 [N, H, W] and labels [N] as the IDX files of a split ("train" or "t10k")."""
    folder.mkdir(exist_ok=True)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (folder / f"{split}-{name}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())
    return folder
