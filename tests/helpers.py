"""Golden models, and the step from the reference's image order to our generation order."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from marjax import convert
from marjax.config import MARConfig
from marjax.types import MARParams

GOLDEN = Path(__file__).parent / "golden"

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
