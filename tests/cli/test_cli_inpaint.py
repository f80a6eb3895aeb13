"""`marjax inpaint` in-process: what it writes, and how it refuses bad input."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from cli_helpers import FAST, FAST_OPTIONS, read
from PIL import Image

from marjax.checkpoint import load
from marjax.images import to_uint8
from marjax.inpaint import inpaint


@pytest.fixture
def picture(tmp_path):
    """A random picture of the tiny model's size, and a mask of its upper half: their files and values."""
    image, mask = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8), np.zeros((8, 8), bool)
    mask[:4] = True
    Image.fromarray(image).save(tmp_path / "image.png")
    Image.fromarray(np.uint8(255) * mask).save(tmp_path / "mask.png")
    return image, mask


COMMAND = ("inpaint", "--image", "image.png", "--mask", "mask.png", *FAST, "--dtype", "float32")


def test_inpaint_writes_one_picture_per_label(marjax, model, picture):
    image, mask = picture
    code, out, err = marjax(*COMMAND, "--model", model, "--labels", "bag,sneaker", "--seed", 3, "--out", "two.png")
    assert (code, err) == (0, "") and out.startswith("two.png: 2 x 50% of the picture in ")
    options = {**FAST_OPTIONS, "cfg": 1.0}
    expected = inpaint(load(model), jax.random.key(3), [1, 0], image=image[..., None], mask=mask, **options)
    assert np.array_equal(read("two.png")[4:92:11, 4:92:11], to_uint8(expected)[0, ..., 0])
    assert read("two.png").shape == (96, 188)
    first = to_uint8(expected)[0, ..., 0]
    assert np.array_equal(first[4:], image[4:]) and not np.array_equal(first[:4], image[:4])


def test_inpaint_without_a_label_is_unconditional(marjax, model, picture):
    image, mask = picture
    assert marjax(*COMMAND, "--model", model)[0] == 0
    expected = inpaint(load(model), jax.random.key(0), None, image=image[..., None], mask=mask, **FAST_OPTIONS)
    assert np.array_equal(read("inpainted.png"), to_uint8(expected)[0, ..., 0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--image", "none.png"), "none.png does not exist; give an image file"),
        (("--image", "text.png"), "text.png cannot be decoded as an image"),
        (("--mask", "large.png"), "large.png has 9 x 8 pixels; expected 8 x 8, so resize or crop it first"),
        (("--labels", "hat"), "Unknown label 'hat'"),
        (("--out", "out.jpg"), "--out out.jpg: pictures are written as PNG"),
        (("--out", "none/out.png"), "create that folder first"),
        (("--cfg", "2"), "cfg=2.0 needs labels"),
        (("--num-iter", "99"), "num_iter=99 must be an integer in [1, 16]"),
        (("--accel", "warp"), "Unknown accel 'warp'"),
        (("--model", "none"), "Cannot load 'none'"),
    ],
)
def test_inpaint_bad_input(refused, model, picture, tmp_path, words, message):
    (tmp_path / "text.png").write_text("no picture")
    Image.fromarray(np.zeros((8, 9), np.uint8)).save(tmp_path / "large.png")
    assert message in refused(*COMMAND, "--model", model, *words)
    assert not {"inpainted.png", "out.jpg"} & {path.name for path in tmp_path.iterdir()}


def test_inpaint_pictures_that_would_be_misread(refused, model, picture, tmp_path):
    Image.fromarray(np.full((8, 8), 40_000, np.uint16)).save(tmp_path / "deep.png")
    Image.new("L", (8, 8)).save(tmp_path / "black.png")
    for option in ("--image", "--mask"):
        message = refused(*COMMAND, "--model", model, option, "deep.png")
        assert "deep.png has more than 8 bits per channel; convert it to 8 bits first." in message
    message = refused(*COMMAND, "--model", model, "--mask", "black.png")
    assert "--mask black.png selects nothing; make white what is to be generated." in message
