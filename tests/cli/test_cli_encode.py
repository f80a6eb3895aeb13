"""`marjax encode` in-process: options, resumption, what training takes from the latents, and bad input."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import TINY, random_model
from helpers import TINY_VAE, fake_encoder, make_images, random_vae
from PIL import Image

from marjax import cli_train, encode
from marjax.checkpoint import save
from marjax.latents import LatentSource

LATENT = dataclasses.replace(TINY, vae_stride=2, vae_embed_dim=4, class_num=2, class_names=(), vae=TINY_VAE)
LATENT_OPTIONS = ("--preset", "tiny", "--img-size", 8, "--vae-stride", 2, "--vae-embed-dim", 4, "--class-num", 2)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(encode, "_make_encoder", fake_encoder)


@pytest.fixture
def photos(tmp_path):
    return make_images(tmp_path / "photos", {"cat": 3, "dog": 2}, size=9)


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    """A checkpoint that carries one."""
    path = tmp_path_factory.mktemp("models") / "latent"
    save(random_model(LATENT).replace(vae=random_vae()), path)
    return str(path)


@pytest.fixture
def latents(marjax, photos, autoencoder):
    assert marjax("encode", "--data", photos, "--model", autoencoder, "--out", "latents", "--img-size", 8)[0] == 0
    return Path("latents")


@pytest.fixture
def trained(monkeypatch):
    """Replaces training, and lists the arguments it was called with."""
    recorded = []

    def fake(config, recipe, source, out, **options):
        recorded.append({"config": config, "recipe": recipe, "source": source, **options})
        Path(out).mkdir()
        save(random_model(LATENT), Path(out, "ema"), provenance={"step": 1})

    monkeypatch.setattr(cli_train, "train", fake)
    return recorded


def test_encode_and_again(marjax, refused, photos, autoencoder):
    command = ("encode", "--data", photos, "--model", autoencoder, "--out", "latents", "--img_size", 8)
    code, out, err = marjax(*command, "--batch-size", 2)
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert first.startswith("latents: 5 images encoded, 0 kept (") and "images/s, compilation" in first
    assert second.startswith("moments: 5 x 2 x 4 x 4 x 8 in float32; latents: standard deviation ")
    assert second.endswith("; scale: 0.5")
    code, again, err = marjax(*command)
    assert (code, err) == (0, "") and again == f"latents: all 5 images were encoded already\n{second}\n"
    assert "(different: dtype); give the same options" in refused(*command, "--save-dtype", "float16")


def test_options(marjax, photos, autoencoder):
    for part, name in (("train", "bird"), ("val", "fish")):
        make_images(photos / part, {name: 2})
    command = ("encode", "--data", photos, "--model", autoencoder, "--img-size", 6)
    narrow = ("--dtype", "bfloat16", "--save-dtype", "float16", "--scale", "estimate")
    code, out, _ = marjax(*command, "--out", "a", *narrow)
    assert code == 0 and "moments: 2 x 2 x 3 x 3 x 8 in float16" in out
    header = LatentSource("a").header
    made = header.encoding
    assert (made.compute_dtype, made.dtype, made.scale, made.class_names) == ("bfloat16", "float16", None, ("bird",))
    assert header.scale == 1 / header.std
    assert out.rstrip().endswith(f"1/std = {header.scale:.4g}; scale: {header.scale:.4g}")
    assert marjax(*command, "--out", "b", "--scale", 0.25, "--split", "val")[0] == 0
    header = LatentSource("b").header
    assert header.scale == 0.25 and header.encoding.class_names == ("fish",)


def test_training_takes_autoencoder_and_names_from_the_latents(marjax, latents, autoencoder, trained):
    command = ("train", "--data", latents, "--out", "run", *LATENT_OPTIONS, "--accum-iter", 2, "--batch-size", 4)
    assert marjax(*command, "--flip", "--vae_path", autoencoder)[0] == 0
    (call,) = trained
    assert call["config"].vae == TINY_VAE and call["config"].class_names == ("cat", "dog")
    assert isinstance(call["source"], LatentSource) and (call["recipe"].accum_iter, call["recipe"].flip) == (2, True)
    np.testing.assert_array_equal(call["vae"]["quant_conv"]["bias"], random_vae()["quant_conv"]["bias"])


def test_training_keeps_the_autoencoder_of_the_model_it_starts_from(marjax, latents, autoencoder, trained):
    assert marjax("train", "--data", latents, "--out", "run", "--init-from", autoencoder)[0] == 0
    np.testing.assert_array_equal(trained[0]["vae"]["quant_conv"]["bias"], random_vae()["quant_conv"]["bias"])


def test_training_on_latents_does_not_take_after_a_pixel_model(marjax, latents, trained):
    shape = ("--img-size", 8, "--vae-stride", 2, "--vae-embed-dim", 4, "--class-num", 2)
    assert marjax("train", "--data", latents, "--out", "run", *shape)[0] == 0
    config = trained[0]["config"]
    assert not config.clip_denoised and config.encoder_embed_dim == 768  # MAR-B's


def test_training_goes_on_with_the_scale_of_a_model(marjax, latents, trained):
    """Which `train` refuses, if the latents have another."""
    other = dataclasses.replace(LATENT, vae=dataclasses.replace(TINY_VAE, scale=2.0))
    save(random_model(other), "other")
    assert marjax("train", "--data", latents, "--out", "run", "--init-from", "other")[0] == 0
    assert trained[0]["config"].vae == other.vae


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--img-size 7", "img_size=7 must be a multiple of 2, the autoencoder's stride."),
        ("--img-size 0", "--img-size: '0' must be a positive integer"),
        ("--scale big", "--scale: 'big' must be a number or `estimate`"),
        ("--scale -1", "scale=-1.0 must be a positive finite number"),
        ("--model fashion_mnist", "fashion_mnist carries no autoencoder; give a checkpoint that does."),
        ("--model missing", "Cannot load 'missing': no such path"),
        ("--data missing", "missing does not exist"),
        ("--out photos", "photos lies inside the images' directory; it would become a class of them."),
        ("--out latent.txt", "Cannot make the directory latent.txt: File exists; give another."),
        ("--save-dtype bfloat16", "--save-dtype: invalid choice: 'bfloat16'"),
    ],
)
def test_bad_input(refused, photos, autoencoder, words, message):
    Path("latent.txt").touch()
    command = ("encode", "--data", photos, "--model", autoencoder, "--out", "latents", "--img-size", 8)
    assert message in refused(*command, *words.split())
    assert not Path("latents").exists()


def test_an_image_that_cannot_be_read(marjax, refused, photos, autoencoder):
    (photos / "dog" / "1.png").write_bytes(b"no image")
    command = ("encode", "--data", photos, "--model", autoencoder, "--out", "latents", "--img-size", 8)
    assert "dog/1.png cannot be decoded as an image" in refused(*command, "--batch-size", 1)
    assert "latents holds no complete cache of latents" in refused("train", "--data", "latents", "--out", "run")
    Image.new("RGB", (8, 8)).save(photos / "dog" / "1.png")
    code, out, _ = marjax(*command)
    assert code == 0 and out.startswith("latents: 2 images encoded, 3 kept")


def test_latents_where_images_are_needed(refused, latents, autoencoder, data):
    size = ("--img-size", 8)
    message = "latents is no directory of one directory of images per class"
    assert message in refused("encode", "--data", latents, "--model", autoencoder, "--out", "more", *size)
    assert "holds latents of 8 x 8 images, the model expects 28 x 28" in refused("eval", "--data", latents)
    assert "holds latents of 8 x 8 images, the model expects 256 x 256" in refused(
        "train", "--data", latents, "--out", "run", "--preset", "mar_base"
    )
    assert "img_size=8 must be a multiple of vae_stride * patch_size = 16 * 1." in refused(
        "train", "--data", latents, "--out", "run", *size
    )


def test_a_latent_model_without_its_autoencoder_makes_no_images(refused):
    save(random_model(LATENT), "bare")
    Image.new("RGB", (8, 8)).save("x.png")
    message = "bare makes latents and carries no autoencoder; convert it with --vae, or train it with --vae-path."
    for words in (("sample", "--out", "dir"), ("inpaint", "--image", "x.png", "--mask", "x.png")):
        assert message in refused(words[0], "--model", "bare", *words[1:])
    assert not Path("dir").exists()
