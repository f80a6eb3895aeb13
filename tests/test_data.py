"""Image sources (IDX files, folders, arrays) and the deterministic batch stream."""

from __future__ import annotations

import gzip
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from marjax.data import ArraySource, ImageFolder, batches, center_crop, open_source
from marjax.idx import load_idx


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(directory, images, labels, prefix="train", suffix=""):
    pack = gzip.compress if suffix else bytes
    (directory / f"{prefix}-images-idx3-ubyte{suffix}").write_bytes(pack(idx_bytes(images)))
    (directory / f"{prefix}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx_bytes(labels)))


@pytest.fixture
def digits():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (12, 6, 6), dtype=np.uint8), np.arange(12, dtype=np.uint8) % 5


def make_folder(root, sizes, mode="RGB"):
    """Writes random PNGs {class: [(width, height), ...]} and returns them as arrays."""
    rng, written = np.random.default_rng(1), {}
    for name, shapes in sizes.items():
        (root / name).mkdir(parents=True)
        for number, (width, height) in enumerate(shapes):
            shape = (height, width, 3) if mode == "RGB" else (height, width)
            pixels = rng.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
            written.setdefault(name, []).append(pixels)
    return written


# --- IDX files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(("split", "prefix"), [("train", "train"), ("test", "t10k")])
def test_load_idx_reads_plain_and_gzipped_files(tmp_path, digits, suffix, split, prefix):
    write_idx(tmp_path, *digits, prefix, suffix)
    images, labels = load_idx(tmp_path, split)
    assert images.dtype == np.uint8 and labels.dtype == np.int32
    np.testing.assert_array_equal(images, digits[0][..., None])
    np.testing.assert_array_equal(labels, digits[1])


def test_load_idx_takes_an_images_file_and_a_colour_axis(tmp_path, digits):
    colour = np.stack([digits[0], digits[0] // 2, digits[0] // 3], axis=-1)
    write_idx(tmp_path, colour, digits[1], "mine", ".gz")
    (tmp_path / "mine-labels-idx1-ubyte").write_bytes(
        gzip.decompress((tmp_path / "mine-labels-idx1-ubyte.gz").read_bytes())
    )
    (tmp_path / "mine-labels-idx1-ubyte.gz").unlink()
    images, labels = load_idx(tmp_path / "mine-images-idx3-ubyte.gz")
    np.testing.assert_array_equal(images, colour)
    np.testing.assert_array_equal(labels, digits[1])


def broken_idx(images, labels):
    whole = idx_bytes(images)
    return {
        "truncated": (
            whole[:-1],
            idx_bytes(labels),
            r"train-images.*expected 448 bytes for shape \(12, 6, 6\), got 447",
        ),
        "too long": (whole + b"\0", idx_bytes(labels), r"train-images.*expected 448 bytes .* got 449"),
        "short header": (whole[:9], idx_bytes(labels), r"train-images.*expected an IDX header of 16 bytes, got .* 9"),
        "floats": (b"\0\0\x0d\x03" + whole[4:], idx_bytes(labels), r"expected .* 00000803 or 00000804, got 00000d03"),
        "foreign": (b"\x89PNG", idx_bytes(labels), r"expected an IDX file .* got 89504e47"),
        "empty": (b"", idx_bytes(labels), r"expected an IDX file .* got no data"),
        "no images": (idx_bytes(images[:0]), idx_bytes(labels[:0]), r"expected at least one image or label, got shape"),
        "labels are images": (whole, whole, r"train-labels.*expected an IDX file starting with 00000801, got 00000803"),
        "count": (whole, idx_bytes(labels[:-1]), r"train-labels.*expected 12 labels, as many as images, got 11"),
        "half gzip": (gzip.compress(whole)[:40], idx_bytes(labels), r"train-images.*expected a whole gzip file"),
        "bad gzip": (b"\x1f\x8b" + whole, idx_bytes(labels), r"train-images.*expected a whole gzip file"),
    }


@pytest.mark.parametrize("case", broken_idx(np.zeros((1, 1, 1)), np.zeros(1)))
def test_load_idx_refuses_broken_files(tmp_path, digits, case):
    image_bytes, label_bytes, message = broken_idx(*digits)[case]
    (tmp_path / "train-images-idx3-ubyte").write_bytes(image_bytes)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(label_bytes)
    with pytest.raises(ValueError, match=message):
        load_idx(tmp_path)


def test_load_idx_names_missing_files_and_unknown_splits(tmp_path, digits):
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte nor train-images-idx3-ubyte\.gz"):
        load_idx(tmp_path)
    write_idx(tmp_path, *digits)
    with pytest.raises(ValueError, match="split='val' must be one of train, test"):
        load_idx(tmp_path, "val")
    with pytest.raises(ValueError, match="expected an images file named like train-images-idx3-ubyte"):
        load_idx(tmp_path / "train-labels-idx1-ubyte")
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="train-labels-idx1-ubyte nor"):
        load_idx(tmp_path)


# --- Folders -----------------------------------------------------------------------------------------------------


def test_image_folder_labels_follow_sorted_class_names(tmp_path):
    written = make_folder(tmp_path, {"b": [(8, 8)], "a": [(8, 8), (8, 8)], "c": [(8, 8)]})
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    folder = ImageFolder(tmp_path, img_size=8)
    assert folder.class_names == ("a", "b", "c") and folder.num_classes == 3 and len(folder) == 4
    images, labels = folder.get(np.array([3, 0, 2, 1]))
    assert images.dtype == np.uint8 and labels.dtype == np.int32
    np.testing.assert_array_equal(labels, [2, 0, 1, 0])
    np.testing.assert_array_equal(images, [written["c"][0], written["a"][0], written["b"][0], written["a"][1]])


def test_center_crop_halves_with_a_box_filter():
    pixels = np.random.default_rng(2).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    crop = center_crop(Image.fromarray(pixels), 16)
    # Two halvings are one 4 x 4 mean, up to four roundings of at most 1/2.
    means = pixels.reshape(16, 4, 24, 4, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(crop, means[:, 4:20], atol=2.0)


@pytest.mark.parametrize(
    ("width", "height", "halvings", "resized", "box"),
    [
        (70, 50, 1, (28, 20), (4, 0, 24, 20)),
        (50, 70, 1, (20, 28), (0, 4, 20, 24)),
        (30, 39, 0, (20, 26), (0, 3, 20, 23)),
        (9, 13, 0, (20, 29), (0, 4, 20, 24)),
        (40, 160, 1, (20, 80), (0, 30, 20, 50)),
    ],
)
def test_center_crop_matches_sizes_worked_by_hand(width, height, halvings, resized, box):
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8))
    expected = image.reduce(2) if halvings else image
    expected = np.asarray(expected.resize(resized, Image.Resampling.BICUBIC).crop(box), np.int32)
    # `reduce` rounds its mean once where two box passes round twice; noise shifted by a pixel would differ by > 100.
    np.testing.assert_allclose(center_crop(image, 20), expected, atol=2 * halvings)


def test_image_folder_converts_to_the_channels_asked_for(tmp_path):
    written = make_folder(tmp_path, {"a": [(8, 8)]}, mode="L")
    grey, _ = ImageFolder(tmp_path, 8, channels=1).get(np.array([0]))
    colour, _ = ImageFolder(tmp_path, 8).get(np.array([0]))
    np.testing.assert_array_equal(grey[0, :, :, 0], written["a"][0])
    np.testing.assert_array_equal(colour[0], np.repeat(written["a"][0][:, :, None], 3, axis=2))


def test_image_folder_refuses_bad_input(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing is not a directory"):
        ImageFolder(tmp_path / "missing", 8)
    with pytest.raises(ValueError, match="has no class directories"):
        ImageFolder(tmp_path, 8)
    make_folder(tmp_path, {"a": [(8, 8)]})
    (tmp_path / "hollow").mkdir()
    with pytest.raises(ValueError, match=r"no images in class directories hollow; expected files ending in \.bmp"):
        ImageFolder(tmp_path, 8)
    with pytest.raises(ValueError, match="img_size=0 must be a positive integer"):
        ImageFolder(tmp_path, 0)
    with pytest.raises(ValueError, match="channels=4 must be 1"):
        ImageFolder(tmp_path, 8, channels=4)


@pytest.mark.parametrize("damage", [lambda data: b"not an image", lambda data: data[:60]])
def test_image_folder_names_a_corrupt_file_when_it_is_read(tmp_path, damage):
    make_folder(tmp_path, {"a": [(8, 8), (8, 8)]})
    (tmp_path / "a" / "1.png").write_bytes(damage((tmp_path / "a" / "1.png").read_bytes()))
    folder = ImageFolder(tmp_path, 8)
    assert folder.get(np.array([0]))[0].shape == (1, 8, 8, 3)
    with pytest.raises(ValueError, match=r"1\.png cannot be decoded as an image"):
        folder.get(np.array([0, 1]))


def test_image_folder_refuses_more_than_8_bits(tmp_path):
    make_folder(tmp_path, {"a": [(8, 8)]})
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(tmp_path / "a" / "0.png")
    with pytest.raises(ValueError, match=r"0\.png cannot be decoded as an image \(mode I.*more than 8 bits"):
        ImageFolder(tmp_path, 8).get(np.array([0]))


def test_image_folder_ignores_hidden_files(tmp_path):
    make_folder(tmp_path, {"a": [(8, 8)]})
    (tmp_path / "a" / "._0.png").write_bytes(b"what macOS leaves")
    assert len(ImageFolder(tmp_path, 8)) == 1


# --- Arrays and the choice of source -------------------------------------------------------------------------------


def test_array_source_refuses_bad_arrays():
    images, labels = np.zeros((3, 4, 4, 1), np.uint8), np.array([0, 1, 1])
    source = ArraySource(images, labels, ("x", "y"))
    assert len(source) == 3 and source.num_classes == 2 and source.labels.dtype == np.int32
    with pytest.raises(ValueError, match=r"images must be uint8 \[N, H, W, C\].*float32"):
        ArraySource(images.astype(np.float32), labels, ("x", "y"))
    with pytest.raises(ValueError, match=r"labels must be integers \[3\].*\(2,\)"):
        ArraySource(images, labels[:2], ("x", "y"))
    with pytest.raises(ValueError, match=r"labels span \[0, 1\], expected \[0, 1\)"):
        ArraySource(images, labels, ("x",))


def test_open_source_finds_idx_files(tmp_path, digits):
    write_idx(tmp_path, *digits, prefix="t10k", suffix=".gz")
    source = open_source(tmp_path, split="test", img_size=6, channels=1)
    assert isinstance(source, ArraySource) and source.class_names == ("0", "1", "2", "3", "4")
    images, labels = source.get(np.array([7, 2]))
    np.testing.assert_array_equal(images, digits[0][[7, 2], :, :, None])
    np.testing.assert_array_equal(labels, [2, 2])
    with pytest.raises(ValueError, match="images are 6 x 6 x 1, the model expects 8 x 8 x 1"):
        open_source(tmp_path, split="test", img_size=8, channels=1)
    with pytest.raises(ValueError, match="images are 6 x 6 x 1, the model expects 6 x 6 x 3"):
        open_source(tmp_path, split="test", img_size=6, channels=3)
    with pytest.raises(FileNotFoundError, match="train-images"):
        open_source(tmp_path, split="train", img_size=6, channels=1)


def test_open_source_finds_folders_with_and_without_splits(tmp_path):
    make_folder(tmp_path / "split", {"train/a": [(9, 8)], "train/b": [(9, 8)], "test/a": [(8, 9)] * 3})
    make_folder(tmp_path / "plain", {"x": [(8, 8)] * 2})
    train = open_source(tmp_path / "split", split="train", img_size=8, channels=3)
    assert isinstance(train, ImageFolder) and train.class_names == ("a", "b") and len(train) == 2
    assert len(open_source(tmp_path / "split", split="test", img_size=8, channels=3)) == 3
    assert open_source(tmp_path / "plain", split="test", img_size=4, channels=1).get(np.arange(2))[0].shape == (
        2,
        4,
        4,
        1,
    )
    with pytest.raises(ValueError, match="no images in class directories test, train"):
        open_source(tmp_path / "split", split="val", img_size=8, channels=3)


def test_open_source_says_what_it_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        open_source(tmp_path / "nowhere", split="train", img_size=8, channels=3)
    with pytest.raises(FileNotFoundError, match=r"holds neither IDX files .* nor one directory of images per class"):
        open_source(tmp_path, split="train", img_size=8, channels=3)


# --- Batches -----------------------------------------------------------------------------------------------------


def counting_source(size):
    """Images and labels that are their own index; rows are asymmetric so that a mirrored image shows."""
    images = np.zeros((size, 1, 2, 1), np.uint8)
    images[:, 0, 0, 0] = np.arange(size) + 1
    return ArraySource(images, np.arange(size), tuple(map(str, range(size))))


def take(stream, count):
    images, labels = zip(*itertools.islice(stream, count), strict=True)
    return np.stack(images), np.stack(labels)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 12), st.integers(0, 2**32), st.booleans())
def test_batches_resume_exactly_and_epochs_are_permutations(size, batch_size, start, seed, flip):
    source, extra = counting_source(size), 4
    images, labels = take(batches(source, batch_size, seed, flip=flip), start + extra)
    assert labels.shape == (start + extra, batch_size) and images.shape[1:] == (batch_size, 1, 2, 1)
    again_images, again_labels = take(batches(source, batch_size, seed, start, flip=flip), extra)
    np.testing.assert_array_equal(again_images, images[start:])
    np.testing.assert_array_equal(again_labels, labels[start:])
    seen = labels.reshape(-1)
    for epoch in range(len(seen) // size):
        order = seen[epoch * size : (epoch + 1) * size]
        np.testing.assert_array_equal(order, np.random.default_rng([seed, epoch]).permutation(size))
    np.testing.assert_array_equal(images.max(axis=(2, 3, 4)), labels + 1)  # an image keeps its label


def test_batches_differ_between_seeds_and_epochs():
    source = counting_source(50)
    _, first = take(batches(source, 50, seed=0), 2)
    _, second = take(batches(source, 50, seed=1), 1)
    assert (first[0] != first[1]).any() and (first[0] != second[0]).any()


def test_flip_mirrors_about_half_of_the_images():
    source = counting_source(200)
    plain, _ = take(batches(source, 100, seed=3), 4)
    flipped, _ = take(batches(source, 100, seed=3, flip=True), 4)
    mirrored = (flipped == plain[:, :, :, ::-1]).all(axis=(2, 3, 4))
    kept = (flipped == plain).all(axis=(2, 3, 4))
    assert (mirrored ^ kept).all() and 0.35 < mirrored.mean() < 0.65
    assert (mirrored[0] != mirrored[1]).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0, "seed": 0}, "batch_size=0 must be an integer >= 1"),
        ({"batch_size": 1, "seed": -1}, "seed=-1 must be an integer >= 0"),
        ({"batch_size": 1, "seed": 0, "start_step": -2}, "start_step=-2 must be an integer >= 0"),
    ],
)
def test_batches_refuse_bad_numbers_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        batches(counting_source(2), **arguments)
