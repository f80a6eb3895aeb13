"""Metrics against closed forms and hand-made sets, and the shipped classifier."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from safetensors.numpy import load_file, save_file
from scipy.spatial.distance import cdist

from marjax import metrics
from marjax.metrics import (
    FeatureExtractor,
    class_accuracy,
    evaluate,
    frechet_distance,
    load_feature_extractor,
    precision_recall,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def extractor():
    return load_feature_extractor("fashion_mnist")


@pytest.fixture(scope="module")
def sample():
    """The first 64 Fashion-MNIST test images (MIT licence, Zalando SE): uint8 [64, 28, 28, 1] and labels [64]."""
    with np.load(ROOT / "tests" / "data" / "fashion_mnist_test64.npz") as file:
        return file["images"], file["labels"]


def standardised(rows, columns, seed):
    """Points whose sample mean is zero and whose sample covariance is the identity, exactly up to rounding."""
    points = np.random.default_rng(seed).normal(size=(rows, columns))
    points -= points.mean(axis=0)
    return points @ np.linalg.inv(np.linalg.cholesky(np.cov(points, rowvar=False))).T


# --- Fréchet distance --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(50, 8), (5, 16), (2, 1)])
def test_frechet_distance_of_a_set_to_itself_is_zero(rows, columns):
    feats = np.random.default_rng(0).normal(size=(rows, columns))
    assert 0.0 <= frechet_distance(feats, feats.copy()) < 1e-7


def test_frechet_distance_closed_form_for_shift_and_diagonal_covariance():
    shift, scale_a, scale_b = np.array([1.0, -2.0, 0.5]), np.array([1.0, 2.0, 3.0]), np.array([0.5, 2.0, 0.0])
    a, b = standardised(40, 3, seed=1) * scale_a, standardised(70, 3, seed=2) * scale_b + shift
    expected = np.sum(shift**2) + np.sum((scale_a - scale_b) ** 2)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-7)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-7)
    assert frechet_distance(a, a + shift) == pytest.approx(np.sum(shift**2), rel=1e-7)


def test_frechet_distance_matches_the_matrix_square_root():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(60, 6)) @ rng.normal(size=(6, 6)), rng.normal(size=(80, 6)) @ rng.normal(size=(6, 6)) + 1.0
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(cov_a @ cov_b).real
    expected = np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(cov_a + cov_b - 2 * root)
    assert frechet_distance(a.astype(np.float32), b.astype(np.float32)) == pytest.approx(expected, rel=1e-5)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (np.zeros((1, 3)), np.zeros((5, 3)), r"N >= 2 and D >= 1, got \(1, 3\)"),
        (np.zeros((5, 3)), np.zeros(5), r"must be \[N, D\].*got \(5,\)"),
        (np.zeros((5, 3)), np.zeros((5, 4)), "features of one dimension, got 3 and 4"),
        (np.full((5, 3), np.nan), np.zeros((5, 3)), "Features must be finite; 15 values are NaN"),
        (np.zeros((5, 3)), np.full((5, 3), np.inf), "Features must be finite; 15 values"),
    ],
)
def test_frechet_distance_refuses_bad_features(a, b, message):
    with pytest.raises(ValueError, match=message):
        frechet_distance(a, b)


# --- Class accuracy ----------------------------------------------------------------------------------------------


def test_class_accuracy_counts_matches():
    assert class_accuracy(np.array([1, 2, 3, 0]), [1, 0, 3, 1]) == 0.5
    assert class_accuracy(jnp.array([4]), np.array([4])) == 1.0


@pytest.mark.parametrize(("predicted", "requested"), [([1, 2], [1]), ([], []), ([[1]], [[1]])])
def test_class_accuracy_refuses_unequal_or_empty_labels(predicted, requested):
    with pytest.raises(ValueError, match=r"must be two \[N\] arrays of labels, N >= 1"):
        class_accuracy(predicted, requested)


# --- Precision and recall ------------------------------------------------------------------------------------------


def test_precision_recall_on_points_worked_by_hand():
    real = np.array([[0.0], [1.0], [2.0], [3.0], [10.0]])  # nearest neighbours at 1, 1, 1, 1, 7
    fake = np.array([[0.5], [20.0], [20.125], [5.0]])  # nearest neighbours at 4.5, 0.125, 0.125, 4.5
    # Inside the real balls: 0.5 and 5. Inside the fake balls: 0, 1, 2, 3; 10 is 5 away from 5.
    assert precision_recall(real, fake, k=1) == (0.5, 0.8)


def test_precision_recall_of_a_collapsed_and_of_a_diverse_generator():
    rng = np.random.default_rng(4)
    real = rng.normal(size=(300, 4))
    collapsed = real[:1] + 1e-3 * rng.normal(size=(200, 4))
    precision, recall = precision_recall(real, collapsed)
    assert precision == 1.0 and recall <= 0.01
    precision, recall = precision_recall(real, 5.0 * rng.normal(size=(300, 4)))
    assert precision < 0.3 and recall > 0.9
    assert precision_recall(real, real.copy()) == (1.0, 1.0)
    assert precision_recall(real, real + 100.0) == (0.0, 0.0)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_precision_recall_in_chunks_matches_whole_distance_matrices(monkeypatch, k):
    monkeypatch.setattr(metrics, "CHUNK_ROWS", 7)
    rng = np.random.default_rng(5)
    real, fake = rng.normal(size=(40, 3)), rng.normal(size=(31, 3)) + 0.7

    def share(points, manifold):
        radii = np.sort(cdist(manifold, manifold), axis=1)[:, k]  # column 0 is the point itself
        return np.mean((cdist(points, manifold) <= radii).any(axis=1))

    assert precision_recall(real, fake, k) == (share(fake, real), share(real, fake))


def test_precision_recall_refuses_bad_input():
    feats = np.zeros((4, 2))
    with pytest.raises(ValueError, match="k=0 must be an integer >= 1"):
        precision_recall(feats, feats, k=0)
    with pytest.raises(ValueError, match=r"N >= 5 and D >= 1, got \(4, 2\)"):
        precision_recall(feats, feats, k=4)
    with pytest.raises(ValueError, match="one dimension, got 2 and 3"):
        precision_recall(feats, np.zeros((4, 3)))


# --- The shipped classifier ----------------------------------------------------------------------------------------


def test_shipped_classifier_recognises_real_images(extractor, sample):
    images, labels = sample
    assert float(extractor.metadata["test_accuracy"]) >= 0.91
    assert {"command", "data_licence"} <= extractor.metadata.keys()
    predicted = extractor.predict(images.astype(np.float32) / 255.0)
    assert np.issubdtype(predicted.dtype, np.integer) and class_accuracy(predicted, labels) >= 0.85


def test_features_do_not_depend_on_batching_or_input_type(monkeypatch, extractor, sample):
    images = sample[0]
    features = extractor.features(images)
    assert features.shape == (64, 128) and features.dtype == np.float32
    assert np.mean(features.std(axis=0) > 0.1) > 0.5  # most features vary even over 64 images
    np.testing.assert_allclose(extractor.features(images / 255.0), features, atol=1e-5)
    monkeypatch.setattr(metrics, "BATCH_SIZE", 24)
    np.testing.assert_allclose(extractor.features(images), features, atol=1e-4)
    bfloat16 = np.asarray(jnp.asarray(images / 255.0, jnp.bfloat16))
    assert class_accuracy(extractor.predict(bfloat16), extractor.predict(images)) > 0.9


def test_evaluate_ranks_real_noisy_and_collapsed_images(extractor, sample):
    images, labels = sample
    mirrored = evaluate(images[:, :, ::-1], labels, images, extractor)
    assert mirrored.keys() == {"frechet_distance", "class_accuracy", "precision", "recall", "num_images"}
    noise = np.random.default_rng(6).uniform(size=images.shape).astype(np.float32)
    noisy = evaluate(noise, labels, images, extractor)
    collapsed = evaluate(np.repeat(images[:1], 64, axis=0), labels, images, extractor)
    assert mirrored["num_images"] == 64 and mirrored["class_accuracy"] >= 0.8
    assert mirrored["frechet_distance"] < 0.2 * noisy["frechet_distance"]
    assert mirrored["recall"] > 0.8 and noisy["recall"] == 0.0 and collapsed["recall"] <= 1 / 64


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 28, 28), np.uint8), r"must be \[N, 28, 28, 1\] with N >= 1, got \(2, 28, 28\)"),
        (np.zeros((0, 28, 28, 1)), "with N >= 1"),
        (np.zeros((2, 28, 28, 1), np.int32), "floating point in .* or uint8, got int32"),
        (np.full((2, 28, 28, 1), 1.5), r"must lie in \[0, 1\], got \[1.5, 1.5\]"),
        (np.full((2, 28, 28, 1), np.nan), r"must lie in \[0, 1\], got \[nan, nan\]"),
    ],
)
def test_classifier_refuses_bad_images(extractor, images, message):
    with pytest.raises(ValueError, match=message):
        extractor.features(images)


def test_loading_refuses_unknown_missing_and_foreign_files(tmp_path):
    with pytest.raises(ValueError, match="Unknown feature extractor 'inception'; expected one of fashion_mnist"):
        load_feature_extractor("inception")
    with pytest.raises(FileNotFoundError, match="missing"):
        FeatureExtractor.load(tmp_path / "missing.safetensors")
    (tmp_path / "text").write_text("not a safetensors file")
    with pytest.raises(ValueError, match="text is not a readable safetensors file"):
        FeatureExtractor.load(tmp_path / "text")
    leaves = load_file(ROOT / "marjax" / "assets" / "fashion_mnist_classifier.safetensors")
    leaves["Dense_0/bias"] = leaves["Dense_0/bias"][1:]
    save_file(leaves, tmp_path / "short")
    with pytest.raises(ValueError, match="does not hold this classifier's weights: Dense_0/bias missing or different"):
        FeatureExtractor.load(tmp_path / "short")


# --- tools/train_classifier.py -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("train_classifier", ROOT / "tools" / "train_classifier.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_train_classifier_writes_a_loadable_file_and_nothing_else(tmp_path, tool, sample, capsys):
    (tmp_path / "data").mkdir()
    images, labels = (
        struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
        for array in (sample[0][:48, :, :, 0], sample[1][:48])
    )
    for prefix in ("train", "t10k"):
        (tmp_path / "data" / f"{prefix}-images-idx3-ubyte").write_bytes(images)
        (tmp_path / "data" / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
    out = tmp_path / "out" / "classifier.safetensors"
    tool.main(["--data", str(tmp_path / "data"), "--out", str(out), "--epochs", "4", "--batch_size", "16"])
    trained = FeatureExtractor.load(out)
    assert f"test accuracy {trained.metadata['test_accuracy']} on 48 images" in capsys.readouterr().out
    assert float(trained.metadata["test_accuracy"]) > 0.2  # 0.1 is chance; it learnt something of what it saw
    assert [file.name for file in out.parent.iterdir()] == [out.name]


def test_train_classifier_refuses_bad_arguments(tmp_path, tool, capsys):
    for arguments, message in [(["--epochs", "0"], "--epochs 0 must be positive"), ([], "nowhere does not exist")]:
        with pytest.raises(SystemExit, match="2"):
            tool.main(["--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out"), *arguments])
        assert message in capsys.readouterr().err
