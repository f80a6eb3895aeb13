"""Grids by hand, PNGs read back, and directories that know what is in them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from marjax import images
from marjax.images import BACKGROUND, PADDING, ImageDirectory, file_name, is_complete, make_grid, to_uint8, write_png

SHAPE = (8, 6, 3)


def random_images(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_to_uint8_rounds_and_clips():
    values = np.array([-0.1, 0.0, 0.4 / 255, 0.6 / 255, 0.5, 1.0, 1.2])
    assert to_uint8(values).tolist() == [0, 0, 0, 1, 128, 255, 255]
    assert to_uint8(values).dtype == np.uint8


def test_grid_places_cells_row_by_row():
    cells = random_images(5, 90, 100, 3)
    grid = make_grid(cells, columns=3)
    assert grid.shape == (2 * 90 + 3 * PADDING, 3 * 100 + 4 * PADDING, 3)
    covered = np.zeros(grid.shape, bool)
    for index, cell in enumerate(cells):
        y, x = PADDING + index // 3 * (90 + PADDING), PADDING + index % 3 * (100 + PADDING)
        assert np.array_equal(grid[y : y + 90, x : x + 100], cell)
        covered[y : y + 90, x : x + 100] = True
    assert (grid[~covered] == BACKGROUND).all()


@pytest.mark.parametrize(("side", "factor"), [(8, 11), (28, 3), (83, 2), (84, 1), (256, 1)])
def test_grid_enlarges_small_images_by_a_whole_factor(side, factor):
    cells = random_images(1, side, side, 1)
    grid = make_grid(cells)
    cell = grid[PADDING:-PADDING, PADDING:-PADDING]
    assert cell.shape == (side * factor, side * factor, 1)
    assert np.array_equal(cell, np.kron(cells[0, :, :, 0], np.ones((factor, factor), np.uint8))[..., None])


@pytest.mark.parametrize(
    ("count", "rows_columns"),
    [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (5, (2, 3)), (7, (3, 3)), (10, (2, 5)), (16, (4, 4)), (1000, (25, 40))],
)
def test_default_arrangement(count, rows_columns):
    height, width, _ = make_grid(np.zeros((count, 84, 84, 1), np.uint8)).shape
    assert ((height - PADDING) // (84 + PADDING), (width - PADDING) // (84 + PADDING)) == rows_columns


@pytest.mark.parametrize(
    ("cells", "columns", "message"),
    [
        (np.zeros((0, 8, 8, 1), np.uint8), None, r"N >= 1, got uint8 \(0, 8, 8, 1\)"),
        (np.zeros((8, 8, 1), np.uint8), None, r"got uint8 \(8, 8, 1\)"),
        (np.zeros((1, 8, 8, 1)), None, "got float64"),
        (np.zeros((1, 8, 8, 1), np.uint8), 0, "columns=0 must be at least 1"),
    ],
)
def test_grid_refuses(cells, columns, message):
    with pytest.raises(ValueError, match=message):
        make_grid(cells, columns)


@pytest.mark.parametrize("channels", [1, 3])
def test_png_holds_the_pixels(tmp_path, channels):
    image = random_images(8, 6, channels)
    write_png(tmp_path / "image.png", image)
    with Image.open(tmp_path / "image.png") as file:
        assert file.format == "PNG"
        assert np.array_equal(np.asarray(file).reshape(image.shape), image)
    assert is_complete(tmp_path / "image.png", image.shape)
    assert [path.name for path in tmp_path.iterdir()] == ["image.png"]


def test_png_of_other_channels_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Images of 4 channels .* expected 1 \(grey\) or 3 \(RGB\)"):
        write_png(tmp_path / "image.png", random_images(8, 6, 4))
    assert not list(tmp_path.iterdir())


def test_incomplete_images_are_recognised(tmp_path):
    path = tmp_path / "image.png"
    assert not is_complete(path, SHAPE)
    write_png(path, random_images(*SHAPE))
    content = path.read_bytes()
    assert not is_complete(path, (6, 8, 3)) and not is_complete(path, (8, 6, 1))
    for length in (0, 4, 40, len(content) // 2, len(content) - 20):
        path.write_bytes(content[:length])
        assert not is_complete(path, SHAPE), length
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    assert not is_complete(path, SHAPE)
    path.write_bytes(content)
    assert is_complete(path, SHAPE)


@pytest.mark.parametrize(
    ("index", "class_name", "expected"),
    [
        (12, "sneaker", "000012_sneaker.png"),
        (0, "ankle boot", "000000_ankle-boot.png"),
        (1234567, "../a/b", "1234567_..-a-b.png"),
        (3, "t-shirt", "000003_t-shirt.png"),
    ],
)
def test_file_name(index, class_name, expected):
    assert file_name(index, class_name) == expected


def test_directory_remembers_images_and_options(tmp_path):
    path, options = tmp_path / "new" / "samples", {"seed": 0, "labels": (0, 1, 1)}

    def opened(**changes):
        return ImageDirectory(path, ["bag", "coat", "coat"], SHAPE, {**options, **changes})

    directory = opened()
    assert directory.missing().tolist() == [0, 1, 2]
    assert not list(path.iterdir())  # nothing is claimed yet, so other options are welcome
    assert opened(seed=1).missing().tolist() == [0, 1, 2]
    directory.write(1, random_images(*SHAPE))
    assert {file.name for file in path.iterdir()} == {images.OPTIONS_FILE, "000001_coat.png"}
    assert json.loads((path / images.OPTIONS_FILE).read_text()) == {"seed": 0, "labels": [0, 1, 1]}

    assert opened().missing().tolist() == [0, 2]
    with pytest.raises(ValueError, match=r"samples holds .* other options \(different: more, seed\); give the same"):
        opened(seed=1, more=2)
    (path / "000001_coat.png").write_bytes(b"")
    assert opened().missing().tolist() == [0, 1, 2]


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_directory_with_a_damaged_record_is_refused(tmp_path, content):
    (tmp_path / images.OPTIONS_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"options\.json is not a JSON object .* give another directory"):
        ImageDirectory(tmp_path, ["bag"], SHAPE, {})


def test_directory_of_other_things_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty and holds no options\.json"):
        ImageDirectory(tmp_path, ["bag"], SHAPE, {})
    with pytest.raises(FileExistsError, match=r"Cannot make the directory .*notes\.txt: File exists; give another"):
        ImageDirectory(tmp_path / "notes.txt", ["bag"], SHAPE, {})
    with pytest.raises(ValueError, match="4 channels"):
        ImageDirectory(tmp_path / "new", ["bag"], (8, 8, 4), {})
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_nan_is_not_black():
    with pytest.raises(ValueError, match="Images hold NaN"):
        images.to_uint8(np.array([0.5, np.nan]))
