"""A tiny model, recipes, data to train it with, functions that read and compare runs, and runs in a child process."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from marjax import mar
from marjax.checkpoint import load
from marjax.config import MARConfig
from marjax.data import ArraySource
from marjax.objective import Objective
from marjax.optimizer import OptimizerConfig
from marjax.train import TrainConfig, train
from marjax.types import MARParams, cast_matrices

ROOT = Path(__file__).parents[2]
CONFIG = MARConfig(
    **{"img_size": 8, "vae_stride": 1, "patch_size": 2, "vae_embed_dim": 1, "class_num": 3, "buffer_size": 2},
    **{"encoder_embed_dim": 32, "encoder_depth": 1, "encoder_num_heads": 2, "diffloss_d": 1, "diffloss_w": 32},
    **{"decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2},
)
SOURCE = ArraySource(
    np.random.default_rng(0).integers(0, 256, (10, 8, 8, 1), dtype=np.uint8), np.arange(10) % 3, ("a", "b", "c")
)
STEPS = 6
# Batches straddle epochs, which have 2.5 steps. Dropout, and bfloat16, have a test of their own: they compile slowly.
RECIPE = TrainConfig(
    **{"epochs": 2.4, "batch_size": 4, "seed": 5, "ema_rate": 0.9, "flip": True, "log_every": 1, "save_every": STEPS},
    dtype="float32",
    objective=Objective(attn_dropout=0.0, proj_dropout=0.0),
    optimizer=OptimizerConfig(lr=2e-3, warmup_epochs=0.8),
)
# Black images of one class, white ones of another; 60 steps.
EASY = ArraySource(np.repeat(np.uint8([0, 255]), 4 * 64).reshape(8, 8, 8, 1), np.arange(8) // 4, ("black", "white"))
EASY_RECIPE = dataclasses.replace(RECIPE, epochs=30, save_every=60)
SPEEDS = {"images_per_s", "eta_s"}  # what differs between equal runs


def lines(out, leave_out=SPEEDS):
    read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in leave_out} for line in read]


def checkpoints(out):
    return sorted(int(path.name) for path in (out / "state").iterdir())


def assert_same_weights(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, other, strict=True)


def assert_same_run(out, model, unbroken):
    """Bit for bit the unbroken run: every line of its metrics, once, and the weights."""
    expected_out, expected_model, _ = unbroken
    assert lines(out) == lines(expected_out)
    assert_same_weights(model, expected_model)
    assert_same_weights(load(out / "ema"), expected_model)
    assert_same_weights(load(out / "raw"), load(expected_out / "raw"))


def random_model(config, dtype=jnp.float32):
    shapes, rng = jax.eval_shape(functools.partial(mar.init, config), jax.random.key(0)), np.random.default_rng(1)
    tree = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.1, leaf.shape), jnp.float32), shapes)
    return MARParams(mar=cast_matrices(tree, dtype), vae=None, config=config)


def in_a_child(function, *arguments, **env):
    """Runs a function of this file in a Python of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        **env,
    }
    code = f"import sys, train_helpers; train_helpers.{function.__name__}(*sys.argv[1:])"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def child_killed_in_step_five(out):
    def kill(line):
        if line["step"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    train(CONFIG, dataclasses.replace(RECIPE, save_every=2), SOURCE, out, progress=kill)


def child_with_four_devices(out):
    train(CONFIG, dataclasses.replace(EASY_RECIPE, epochs=2), EASY, out)
    print(jax.device_count())
