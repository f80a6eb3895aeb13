"""Runs on cached latents: exact resumption, mirrored halves, the autoencoder in the models, and refusals.

The loss is a cheap stand-in (`tests/test_train_step.py` has the real one), so that a run takes no time to compile.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY_VAE, fake_encoder, make_images, random_vae

from marjax import encode, objective
from marjax.checkpoint import load
from marjax.config import MARConfig
from marjax.data import ArraySource, ImageFolder, batches
from marjax.encode import encode_folder
from marjax.latents import LatentSource
from marjax.objective import Objective
from marjax.optimizer import OptimizerConfig
from marjax.train import train
from marjax.train_step import TrainConfig, init_state, make_step

training = importlib.import_module("marjax.train")  # the package's attribute of that name is the function

CONFIG = MARConfig(
    **{"img_size": 8, "vae_stride": 2, "patch_size": 2, "vae_embed_dim": 4, "class_num": 2, "buffer_size": 2},
    **{"encoder_embed_dim": 32, "encoder_depth": 1, "encoder_num_heads": 2, "diffloss_d": 1, "diffloss_w": 32},
    **{"decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2},
    vae=TINY_VAE,
)
RECIPE = TrainConfig(
    **{"epochs": 2.4, "batch_size": 2, "seed": 5, "ema_rate": 0.9, "flip": True, "log_every": 1, "save_every": 6},
    dtype="float32",
    objective=Objective(attn_dropout=0.0, proj_dropout=0.0),
    optimizer=OptimizerConfig(lr=2e-3, warmup_epochs=0.8),
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return ImageFolder(make_images(tmp_path_factory.mktemp("images"), {"cat": 3, "dog": 2}), 8)


@pytest.fixture(scope="module")
def cache(images, tmp_path_factory):
    """A complete cache of five images; not to be written to."""
    out = tmp_path_factory.mktemp("latents")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_make_encoder", fake_encoder)
        encode_folder(images, TINY_VAE, random_vae(), out, scale=TINY_VAE.scale)
    return out


@pytest.fixture
def source(cache):
    return LatentSource(cache)


@pytest.fixture(scope="module", autouse=True)
def cheap():
    """A loss that depends on tokens, labels and draws, with a gradient in one leaf; one step for all equal recipes."""

    def loss(params, config, target, tokens, labels, draws, *, key):
        wanted = jnp.mean(tokens * (1 + labels[:, None, None]) + draws.noise[0], axis=(0, 1))
        value = jnp.mean((params["z_proj"]["bias"][:16] - wanted) ** 2)
        return value, {"mse": value, "vb": jnp.float32(0)}

    steps = {}

    def make_once(config, recipe, *rest):
        key = config, dataclasses.replace(recipe, epochs=1, save_every=1)
        return steps.setdefault(key, make_step(config, recipe, *rest))

    def zeros(config, recipe, tx):
        shapes = jax.eval_shape(functools.partial(init_state, config, recipe, tx))
        return jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), shapes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "loss", loss)
        patch.setattr(training, "make_step", make_once)
        patch.setattr(training, "init_state", zeros)
        yield


def lines(out):
    read = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("images_per_s", "eta_s")} for line in read]


def assert_same(got, expected):
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, other, strict=True)


def test_resumption_is_exact(source, tmp_path):
    expected = train(CONFIG, RECIPE, source, tmp_path / "unbroken")
    assert len(lines(tmp_path / "unbroken")) == 6 and expected.vae is None and expected.config == CONFIG

    def stop(line):
        if line["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(CONFIG, dataclasses.replace(RECIPE, save_every=2), source, tmp_path / "run", progress=stop)
    model = train(CONFIG, RECIPE, source, tmp_path / "run")
    assert lines(tmp_path / "run") == lines(tmp_path / "unbroken")
    assert_same(model, expected)
    still = train(CONFIG, dataclasses.replace(RECIPE, flip=False), source, tmp_path / "still")
    assert not np.array_equal(still.mar["z_proj"]["bias"], model.mar["z_proj"]["bias"])


def test_the_stream_picks_mirrored_moments(source, cache):
    moments = np.load(cache / "moments.npy")
    stream, plain = batches(source, 4, 5, flip=True), batches(source, 4, 5)
    sides = []
    for step in range(10):
        (got, labels), (unflipped, same_labels) = next(stream), next(plain)
        np.testing.assert_array_equal(labels, same_labels)
        for row, kept in zip(got, unflipped, strict=True):
            image = next(index for index in range(5) if np.array_equal(moments[index, 0], kept))
            sides.append(next(side for side in (0, 1) if np.array_equal(moments[image, side], row)))
        # The draws are those that mirror images of pixel-space models.
        assert sides[-4:] == (np.random.default_rng([5, step, 1]).random(4) < 0.5).astype(int).tolist()
    assert 10 < sum(sides) < 30


def test_models_with_their_autoencoder(source, tmp_path):
    model = train(CONFIG, RECIPE, source, tmp_path / "run", vae=random_vae())
    for got in (model, load(tmp_path / "run" / "ema"), load(tmp_path / "run" / "raw")):
        assert_same(got.vae, random_vae())
    # A run does not lose it on the way.
    with pytest.raises(ValueError, match=r"\(different: start.vae\); give the same options"):
        train(CONFIG, RECIPE, source, tmp_path / "run")


def test_other_latents_are_refused(source, images, tmp_path, monkeypatch):
    train(CONFIG, RECIPE, source, tmp_path / "run")
    monkeypatch.setattr(encode, "_make_encoder", fake_encoder)
    encode_folder(images, TINY_VAE, random_vae(), tmp_path / "half", scale=TINY_VAE.scale, dtype="float16")
    with pytest.raises(ValueError, match=r"\(different: data.latents\); give the same options"):
        train(CONFIG, RECIPE, LatentSource(tmp_path / "half"), tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vae": None}, "The latents were made by the autoencoder VAEConfig.*, the model's is None; give the model"),
        ({"vae": dataclasses.replace(TINY_VAE, scale=0.25)}, r"scale=0.5\), the model's is VAEConfig.*scale=0.25\)"),
        ({"img_size": 16}, r"The data's moments are \(4, 4, 8\), the model expects \(8, 8, 8\)"),
        ({"class_num": 1}, "The data has 2 classes, the model class_num=1"),
    ],
)
def test_latents_that_do_not_fit(config, message, source, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(CONFIG, **config), RECIPE, source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_autoencoders_that_do_not_fit(source, tmp_path):
    other = jax.tree.map(lambda leaf: leaf + 1, random_vae())
    with pytest.raises(ValueError, match="The autoencoder to store is not the one that the latents come from"):
        train(CONFIG, RECIPE, source, tmp_path / "run", vae=other)
    pixels = ArraySource(np.zeros((4, 8, 8, 3), np.uint8), np.arange(4) % 2, ("a", "b"))
    small = dataclasses.replace(CONFIG, vae=None, vae_stride=1, vae_embed_dim=3)
    with pytest.raises(ValueError, match="An autoencoder is stored with latent models only; leave it out"):
        train(small, RECIPE, pixels, tmp_path / "run", vae=other)
    with pytest.raises(ValueError, match="needs cached latents, which `marjax encode` writes; only pixel-space models"):
        train(CONFIG, RECIPE, pixels, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_must_divide_over_devices_and_parts(source, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: 3 * jax.devices()[:1])
    recipe = dataclasses.replace(RECIPE, batch_size=6, accum_iter=3)
    with pytest.raises(ValueError, match="batch_size=6 must be a multiple of the 3 local devices times accum_iter=3"):
        train(CONFIG, recipe, source, tmp_path / "run")


def test_a_run_from_before_accumulation_is_resumed(source, tmp_path):
    train(CONFIG, dataclasses.replace(RECIPE, epochs=1.2), source, tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    document = json.loads(file.read_text())
    del document["train"]["accum_iter"]
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"\(different: train.accum_iter\)"):
        train(CONFIG, dataclasses.replace(RECIPE, accum_iter=2), source, tmp_path / "run")
    train(CONFIG, RECIPE, source, tmp_path / "run")
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
