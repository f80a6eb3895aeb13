"""Cached latents: right values, exact resumption, and nothing incomplete, foreign or damaged that is read."""

from __future__ import annotations

import dataclasses
import errno
import json
import resource
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY_VAE, fake_encoder, make_images, random_vae

from marjax import codec, encode, growing, vae
from marjax.data import ImageFolder, open_source
from marjax.encode import encode_folder
from marjax.files import atomic_write, extend
from marjax.header import checksum
from marjax.latents import LatentSource

FILES = ["checksums.npy", "labels.npy", "latents.json", "moments.npy"]
BATCH = 2  # of five images: two whole batches and a rest


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Five images of 8 x 8 pixels, three of one class and two of the other."""
    return ImageFolder(make_images(tmp_path_factory.mktemp("images"), {"cat": 3, "dog": 2}), 8)


@pytest.fixture(scope="module", autouse=True)
def fake():
    """Nothing is compiled, but where a test asks for the real encoder."""
    with pytest.MonkeyPatch.context() as patch:
        real = encode._make_encoder
        patch.setattr(encode, "_make_encoder", fake_encoder)
        yield real


@pytest.fixture(scope="module")
def cache(source, tmp_path_factory):
    """A complete cache; not to be written to."""
    out = tmp_path_factory.mktemp("latents") / "cache"
    run(source, out)
    return out


def run(source, out, **options):
    options = {"batch_size": BATCH, "scale": TINY_VAE.scale, **options}
    return encode_folder(source, TINY_VAE, random_vae(), out, **options)


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


# --- Values ------------------------------------------------------------------------------------------------------


def test_moments_of_images_and_mirror_images(source, fake, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "_make_encoder", fake)
    header = run(source, tmp_path / "cache")
    images, labels = source.get(np.arange(5))
    pixels = jnp.concatenate([codec.encode_pixels(images), codec.encode_pixels(images[:, :, ::-1])])
    mean, logvar = jax.jit(vae.encode, static_argnums=1)(random_vae(), TINY_VAE, pixels)
    expected = np.concatenate([mean, logvar], axis=-1)

    latents = LatentSource(tmp_path / "cache")
    assert len(latents) == 5 and latents.num_classes == 2 and latents.class_names == ("cat", "dog")
    order, mirrored = np.array([4, 0, 3, 1]), np.array([True, False, False, True])
    for choice, rows in ((None, order), (mirrored, order + 5 * mirrored)):
        moments, got_labels = latents.get(order, choice)
        assert moments.dtype == np.float32 and got_labels.dtype == np.int32
        np.testing.assert_allclose(moments, expected[rows], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got_labels, labels[order])
    assert not np.allclose(expected[:5], expected[5:], atol=1e-2)

    std = np.sqrt(np.mean(np.square(mean) + np.exp(logvar)) - np.mean(mean) ** 2)
    assert header.std == pytest.approx(std, rel=1e-5)
    assert header.scale == 0.5 and latents.vae == TINY_VAE and latents.img_size == 8


def test_files_are_plain_numpy(cache, source):
    assert sorted(path.name for path in cache.iterdir()) == FILES
    moments = np.load(cache / "moments.npy", mmap_mode="r")
    assert moments.shape == (5, 2, 4, 4, 8) and moments.dtype == np.float32
    images, labels = source.get(np.arange(5))
    np.testing.assert_array_equal(moments, fake_encoder(TINY_VAE, None, None)(images))
    np.testing.assert_array_equal(np.load(cache / "labels.npy"), labels)
    sums = np.load(cache / "checksums.npy")
    assert sums.shape == (5, 2) and sums[3, 1] == zlib.crc32(moments[3, 1].tobytes())
    header = json.loads((cache / "latents.json").read_text())
    assert header["shape"] == [5, 2, 4, 4, 8] and header["scale"] == 0.5 and header["encoding"]["num_images"] == 5


def test_half_precision(source, cache, tmp_path, monkeypatch):
    seen = []

    def encoder(config, params, devices):
        seen.append({leaf.dtype.name for leaf in jax.tree.leaves(params)})
        return fake_encoder(config, params, devices)

    monkeypatch.setattr(encode, "_make_encoder", encoder)
    run(source, tmp_path / "cache", dtype="float16", compute_dtype="bfloat16")
    assert seen == [{"bfloat16", "float32"}]
    wide, narrow = (np.load(path / "moments.npy") for path in (cache, tmp_path / "cache"))
    np.testing.assert_array_equal(narrow, wide.astype(np.float16), strict=True)
    assert LatentSource(tmp_path / "cache").get(np.arange(2))[0].dtype == np.float16


def test_estimated_scale(source, cache, tmp_path):
    header = run(source, tmp_path / "cache", scale=None)
    assert header.scale == 1 / header.std
    moments = np.load(cache / "moments.npy").astype(np.float64)
    mean, logvar = np.split(moments, 2, axis=-1)
    assert header.std**2 == pytest.approx(np.mean(mean**2 + np.exp(logvar)) - np.mean(mean) ** 2)
    assert LatentSource(tmp_path / "cache").vae == dataclasses.replace(TINY_VAE, scale=header.scale)


def test_moments_that_are_not_finite(source, tmp_path, monkeypatch):
    def encoder(*arguments):
        def encoded(images):
            moments = fake_encoder(*arguments)(images)
            moments[1, 0, 2, 1, 3] = 1e6  # of images 1 and 3
            return moments

        return encoded

    monkeypatch.setattr(encode, "_make_encoder", encoder)
    with pytest.raises(ValueError, match=r"^The latents of cat/1.png are not finite in float16; store them in float32"):
        run(source, tmp_path / "cache", dtype="float16")
    run(source, tmp_path / "cache")  # nothing was stored, so that another precision is no conflict


# --- Resumption --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill: nothing may catch it."""


def writes(monkeypatch, kill_at: int, how: str):
    """Counts the writes to disk, and ends the run in the middle of one of them."""
    count, real_extend, real_write = [], extend, atomic_write

    def dies(name):
        count.append(name)
        return len(count) - 1 == kill_at

    def fake_extend(path, data, start):
        fatal = dies(path.name)
        if fatal and how == "before":
            raise Killed
        real_extend(path, data[: len(data) // 2] if fatal and how == "within" else data, start)
        if fatal:
            raise Killed

    class FakeWrite:
        def __init__(self, path):
            self.fatal, self.path, self.inner = dies(path.name), path, real_write(path)

        def __enter__(self):
            if self.fatal and how == "before":
                raise Killed
            if self.fatal and how == "within":
                self.path.with_name(".tmp-0123456789ab.json").write_text("half")
                raise Killed
            return self.inner.__enter__()

        def __exit__(self, *error):
            self.inner.__exit__(*error)
            if self.fatal:
                raise Killed

    monkeypatch.setattr(growing, "extend", fake_extend)
    for module in (growing, encode):
        monkeypatch.setattr(module, "atomic_write", FakeWrite)
    return count


@pytest.mark.parametrize("how", ["before", "within", "after"])
def test_killed_at_any_write_and_run_again(source, cache, how, tmp_path):
    expected, moment = content(cache), 0
    while True:
        out = tmp_path / str(moment)
        with pytest.MonkeyPatch.context() as patch:
            count = writes(patch, moment, how)
            try:
                run(source, out)
            except Killed:
                pass
            else:
                break
        if count[moment] == "latents.json" and how == "after":
            LatentSource(out)
        else:
            with pytest.raises(ValueError, match="holds no complete cache of latents"):
                LatentSource(out)
        run(source, out)
        assert content(out) == expected, (moment, count)
        moment += 1
    assert moment == 12, "a record at the start, three for each batch, labels and header"


def test_what_is_done_is_not_done_again(source, cache, tmp_path, monkeypatch):
    asked, done = [], []
    get = ImageFolder.get
    monkeypatch.setattr(ImageFolder, "get", lambda self, indices, *rest: asked.append(indices) or get(self, indices))

    def stop(count):
        done.append(count)
        if count == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "cache", progress=stop)
    asked.clear()
    run(source, tmp_path / "cache", progress=done.append, batch_size=8)
    assert [indices.tolist() for indices in asked] == [[4] * 5]
    assert done == [0, 2, 4, 4, 5]
    assert content(tmp_path / "cache") == content(cache)

    asked.clear(), done.clear()
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert run(source, cache, progress=done.append) == LatentSource(cache).header
    assert not asked and not done
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before


def test_a_full_disk_and_room_again(source, cache, tmp_path, monkeypatch):
    out = tmp_path / "cache"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    row = 2 * 4 * 4 * 8 * 4
    with pytest.raises(OSError, match=r"^Cannot write .*moments.npy: the file is too large") as caught:
        resource.setrlimit(resource.RLIMIT_FSIZE, (128 + 3 * row, limits[1]))
        try:
            run(source, out)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    run(source, out)
    assert content(out) == content(cache)


def test_a_cache_belongs_to_one_process(source, tmp_path):
    def second(done):
        with pytest.raises(ValueError, match=r"cache is in use by another process; let it end"):
            run(source, tmp_path / "cache")

    run(source, tmp_path / "cache", progress=second)


# --- Refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"scale": None}, "scale"),
        ({"scale": 0.25, "compute_dtype": "bfloat16"}, "compute_dtype, scale"),
    ],
)
def test_another_encoding(source, change, names, complete, tmp_path):
    begin(source, tmp_path, complete)
    before = content(tmp_path)
    with pytest.raises(ValueError, match=rf"another encoding \(different: {names}\); give the same options"):
        run(source, tmp_path, **change)
    assert content(tmp_path) == before


def test_another_autoencoder_or_other_images(source, tmp_path):
    begin(source, tmp_path, complete=False)
    config = dataclasses.replace(TINY_VAE, scale=1.0)
    weights = {**random_vae(), "quant_conv": jax.tree.map(lambda leaf: leaf + 1, random_vae()["quant_conv"])}
    with pytest.raises(ValueError, match=r"\(different: vae, vae_fingerprint\)"):
        encode_folder(source, config, weights, tmp_path, scale=TINY_VAE.scale)
    root = make_images(tmp_path / "images", {"cat": 2, "dog": 3})
    with pytest.raises(ValueError, match=r"\(different: files\)"):
        run(ImageFolder(root, 8), tmp_path)
    with pytest.raises(ValueError, match=r"\(different: img_size, files\)"):
        run(ImageFolder(root, 6), tmp_path)


def begin(source, out, complete):
    def stop(count):
        if count == 2 and not complete:
            raise KeyboardInterrupt

    try:
        run(source, out, progress=stop)
    except KeyboardInterrupt:
        assert not complete


def test_a_directory_of_something_else(source, tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="is not empty and holds no cached latents; give another directory"):
        run(source, tmp_path)
    assert content(tmp_path) == {"thesis.txt": b"all of it"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be a positive integer"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' must be one of float32, float16"),
        ({"compute_dtype": "float16"}, "compute_dtype='float16' must be one of float32, bfloat16"),
        ({"scale": 0.0}, "scale=0.0 must be a positive finite number, or None"),
        ({"scale": float("nan")}, "scale=nan must be a positive finite number"),
    ],
)
def test_bad_arguments(source, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(source, tmp_path / "cache", **options)
    with pytest.raises(ValueError, match="img_size=7 must be a multiple of 2, the autoencoder's stride"):
        run(ImageFolder(next(iter(source._files)).parents[1], 7), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_every_flipped_byte_is_found(cache, source, tmp_path):
    """Of every file: some bytes of the data, all of the header."""
    for name, original in content(cache).items():
        positions = (
            range(len(original)) if name == "latents.json" else [*range(0, 128, 9), *range(128, len(original), 97)]
        )
        for position in positions:
            damaged = bytearray(original)
            damaged[position] ^= 1 << position % 8
            assert_refused({**content(cache), name: bytes(damaged)}, tmp_path, name)
        for other in (original[:-1], original + b"\0", b""):
            assert_refused({**content(cache), name: other}, tmp_path, name)
        assert_refused({key: value for key, value in content(cache).items() if key != name}, tmp_path, name)


def assert_refused(files, path, name):
    for file in path.iterdir():
        file.unlink()
    for file, data in files.items():
        (path / file).write_bytes(data)
    with pytest.raises(ValueError, match=r"(encode the images again|which goes on where it stopped)\.$") as caught:
        latents = LatentSource(path)
        latents.get(np.arange(5))
        latents.get(np.arange(5), np.ones(5, bool))
    assert name in str(caught.value) or "no complete cache" in str(caught.value)


def test_damage_to_what_is_resumed(source, tmp_path):
    begin(source, tmp_path, complete=False)
    progress = (tmp_path / "progress.json").read_text()
    for text, message in (
        (progress.replace('"done": 2', '"done": 4'), "does not match its checksum"),
        (progress[:-1], "is not a JSON object"),
        ("[]", "does not match its checksum"),
    ):
        (tmp_path / "progress.json").write_text(text)
        with pytest.raises(ValueError, match=f"progress.json {message}"):
            run(source, tmp_path)
    (tmp_path / "progress.json").write_text(progress)
    with (tmp_path / "moments.npy").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(ValueError, match=r"moments.npy has 200 bytes where 2176 were written, so it was damaged"):
        run(source, tmp_path)


def test_another_version(cache, tmp_path):
    values = json.loads((cache / "latents.json").read_text())
    del values["checksum"]
    values["format_version"] = 2
    (tmp_path / "latents.json").write_text(json.dumps({**values, "checksum": checksum(values)}))
    with pytest.raises(ValueError, match=r"latents.json has format_version 2, expected 1; encode the images again"):
        LatentSource(tmp_path)


# --- As a source -------------------------------------------------------------------------------------------------


def test_open_source_finds_latents(cache, source, tmp_path):
    found = open_source(cache, split="train", img_size=8, channels=3)
    assert isinstance(found, LatentSource) and len(found) == 5
    assert found.fingerprint == LatentSource(cache).fingerprint
    with pytest.raises(ValueError, match=r"holds latents of 8 x 8 images, the model expects 16 x 16; give the model"):
        open_source(cache, split="train", img_size=16, channels=3)
    begin(source, tmp_path, complete=False)
    with pytest.raises(ValueError, match=r"holds no complete cache of latents; run the `marjax encode` command"):
        open_source(tmp_path, split="train", img_size=8, channels=3)
