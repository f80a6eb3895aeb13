"""Quality of generated images: Fréchet distance, class accuracy, precision and recall, in a classifier's features.

The Fréchet distance is that of FID (Heusel et al. 2017, arXiv 1706.08500), precision and recall are the k-nearest
neighbour estimates of Kynkäänniemi et al. 2019 (arXiv 1904.06991). Both are defined on any features; for 28 x 28 grey
images `load_feature_extractor("fashion_mnist")` gives those of a small classifier shipped with the library, trained by
`tools/train_classifier.py`. Distances in different features are not comparable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from marjax.types import Array, PyTree

EXTRACTORS = {"fashion_mnist": "fashion_mnist_classifier.safetensors"}  # name -> file in marjax/assets
FEATURE_DIM = 128
NUM_CLASSES = 10
IMAGE_SHAPE = (28, 28, 1)
BATCH_SIZE = 500  # images per forward pass
CHUNK_ROWS = 1024  # rows of a distance matrix held at once


class Classifier(nn.Module):
    """Three convolutions and two dense layers for 28 x 28 grey images.

    Attributes:
        dropout_rate: share of the features dropped in training.
    """

    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, images: Array, deterministic: bool = True) -> tuple[Array, Array]:
        """Maps images [B, 28, 28, 1] in [0, 1] to features [B, 128] and logits [B, 10]."""
        x = images * 2.0 - 1.0
        x = nn.gelu(nn.GroupNorm(num_groups=8)(nn.Conv(32, (5, 5), strides=(2, 2))(x)))  # 28 -> 14
        for width in (64, 128):
            x = _halve(nn.gelu(nn.GroupNorm(num_groups=8)(nn.Conv(width, (3, 3))(x))))  # 14 -> 7 -> 3
        features = nn.gelu(nn.Dense(FEATURE_DIM)(x.reshape(x.shape[0], -1)))
        logits = nn.Dense(NUM_CLASSES)(nn.Dropout(self.dropout_rate)(features, deterministic=deterministic))
        return features, logits


def _halve(x: Array) -> Array:
    """2 x 2 maximum; an odd last row and column are dropped. Its gradient is far faster on CPU than `nn.max_pool`'s.

    Pairwise, because the gradient of `jnp.max` counts the elements equal to the maximum: where the compiler computes
    `x` a second time with another rounding it finds none, and divides by zero.
    """
    rows, columns = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    x = jnp.maximum(x[:, 0:rows:2], x[:, 1:rows:2])
    return jnp.maximum(x[:, :, 0:columns:2], x[:, :, 1:columns:2])


@jax.jit
def _classify(params: PyTree, images: Array) -> tuple[Array, Array]:
    features, logits = Classifier().apply({"params": params}, images)
    return features, jnp.argmax(logits, axis=-1)


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureExtractor:
    """A trained `Classifier`.

    Attributes:
        params: its parameters, float32.
        metadata: what its file says about it (test accuracy, command, data licence).
    """

    params: PyTree
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> FeatureExtractor:
        """Reads a file written by `tools/train_classifier.py`.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not a safetensors file of a `Classifier`.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                names = file.keys()
                leaves = {name: file.get_tensor(name).astype(np.float32) for name in names}
                metadata = file.metadata() or {}
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file ({error}).") from error
        shapes = jax.eval_shape(Classifier().init, jax.random.key(0), jnp.zeros((1, *IMAGE_SHAPE)))["params"]
        expected = {name: leaf.shape for name, leaf in traverse_util.flatten_dict(shapes, sep="/").items()}
        got = {name: leaf.shape for name, leaf in leaves.items()}
        if got != expected:
            names = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
            raise ValueError(
                f"{path} does not hold this classifier's weights: {', '.join(names)} missing or different."
            )
        return cls(traverse_util.unflatten_dict(leaves, sep="/"), metadata)

    def features(self, images: np.ndarray) -> np.ndarray:
        """Penultimate activations.

        Args:
            images: [N, 28, 28, 1], floating point in [0, 1] or uint8 in [0, 255].

        Returns:
            float32 [N, 128].

        Raises:
            ValueError: on another shape, type or range, or if N is 0.
        """
        return np.concatenate([features for features, _ in self._forward(images)])

    def predict(self, images: np.ndarray) -> np.ndarray:
        """The most likely class, int32 [N]; takes and refuses what `features` does."""
        return np.concatenate([labels for _, labels in self._forward(images)])

    def _forward(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        images = _unit_range(images)
        for start in range(0, len(images), BATCH_SIZE):
            batch = images[start : start + BATCH_SIZE]
            size = len(batch)
            # One shape for every batch, so one compilation.
            padded = np.pad(batch, ((0, BATCH_SIZE - size), (0, 0), (0, 0), (0, 0)))
            features, labels = _classify(self.params, padded)
            yield np.asarray(features)[:size], np.asarray(labels)[:size]


def load_feature_extractor(name: str = "fashion_mnist") -> FeatureExtractor:
    """Loads a classifier shipped with the library.

    Raises:
        ValueError: if there is none of this name.
    """
    if name not in EXTRACTORS:
        raise ValueError(f"Unknown feature extractor {name!r}; expected one of {', '.join(EXTRACTORS)}.")
    with resources.as_file(resources.files("marjax") / "assets" / EXTRACTORS[name]) as path:
        return FeatureExtractor.load(path)


def frechet_distance(feats_a: np.ndarray, feats_b: np.ndarray) -> float:
    """Squared Fréchet distance between the Gaussians fitted to two sets of features, in float64.

    |mean_a - mean_b|^2 + tr(cov_a + cov_b - 2 (cov_a cov_b)^(1/2)), the quantity FID reports. The last trace is the
    sum of the singular values of cov_a^(1/2) cov_b^(1/2), which needs no square root of a non-symmetric matrix and
    stays exact for singular covariances.

    Args:
        feats_a: [N, D], N >= 2.
        feats_b: [M, D], M >= 2.

    Raises:
        ValueError: on other shapes, unequal D, or values that are not finite.
    """
    a, b = _feature_pair(feats_a, feats_b, at_least=2)
    cov_a, cov_b = (np.cov(feats, rowvar=False).reshape(feats.shape[1], -1) for feats in (a, b))
    cross = np.linalg.norm(_psd_root(cov_a) @ _psd_root(cov_b), ord="nuc")
    distance = np.sum((a.mean(axis=0) - b.mean(axis=0)) ** 2) + np.trace(cov_a) + np.trace(cov_b) - 2.0 * cross
    return max(float(distance), 0.0)  # rounding can leave equal sets just below zero


def class_accuracy(predicted: np.ndarray, requested: np.ndarray) -> float:
    """Share of images whose predicted class is the requested one.

    Args:
        predicted: [N] integer labels.
        requested: [N] integer labels.

    Raises:
        ValueError: if the shapes differ or there are no labels.
    """
    predicted, requested = np.asarray(predicted), np.asarray(requested)
    if predicted.ndim != 1 or predicted.shape != requested.shape or not predicted.size:
        raise ValueError(
            f"predicted {predicted.shape} and requested {requested.shape} must be two [N] arrays of labels, N >= 1."
        )
    return float(np.mean(predicted == requested))


def precision_recall(real_feats: np.ndarray, fake_feats: np.ndarray, k: int = 3) -> tuple[float, float]:
    """Improved precision and recall (Kynkäänniemi et al. 2019, section 2 and algorithm 1).

    A set's manifold is the union of balls around its points, each reaching its k-th nearest neighbour in the set.
    Precision is the share of fake points inside the real manifold, recall that of real points inside the fake one.
    Outliers reach far, so high precision alone proves little: in the shipped classifier's
    features half of uniform noise lies in some ball. Distance matrices are formed in chunks of rows.

    Args:
        real_feats: [N, D], N > k.
        fake_feats: [M, D], M > k.
        k: neighbours, >= 1.

    Returns:
        Precision and recall in [0, 1].

    Raises:
        ValueError: on k < 1, too few points, other shapes, unequal D, or values that are not finite.
    """
    if k < 1:
        raise ValueError(f"k={k} must be an integer >= 1.")
    real, fake = _feature_pair(real_feats, fake_feats, at_least=k + 1)
    return _share_inside(fake, real, k), _share_inside(real, fake, k)


def evaluate(
    images: np.ndarray, labels: np.ndarray, real_images: np.ndarray, extractor: FeatureExtractor, k: int = 3
) -> dict[str, float]:
    """All metrics of a set of generated images.

    Args:
        images: [N, 28, 28, 1] generated images, floating point in [0, 1] or uint8; N > k.
        labels: [N] the classes asked for.
        real_images: [M, 28, 28, 1] images to compare with, M > k.
        extractor: gives features and predictions.
        k: neighbours of precision and recall.

    Returns:
        `frechet_distance`, `class_accuracy`, `precision`, `recall`, `num_images`.

    Raises:
        ValueError: as the functions it calls.
    """
    accuracy = class_accuracy(extractor.predict(images), labels)
    fake, real = extractor.features(images), extractor.features(real_images)
    precision, recall = precision_recall(real, fake, k)
    return {
        "frechet_distance": frechet_distance(real, fake),
        "class_accuracy": accuracy,
        "precision": precision,
        "recall": recall,
        "num_images": len(fake),
    }


def _unit_range(images: np.ndarray) -> np.ndarray:
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[1:] != IMAGE_SHAPE or not len(images):
        raise ValueError(f"images must be [N, {', '.join(map(str, IMAGE_SHAPE))}] with N >= 1, got {images.shape}.")
    if images.dtype == np.uint8:
        return images.astype(np.float32) / 255.0
    # bfloat16 is no subtype of np.floating, but jax knows it as one.
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(f"images must be floating point in [0, 1] or uint8, got {images.dtype}.")
    images = images.astype(np.float32)
    if not (images.min() >= 0.0 and images.max() <= 1.0):  # also refuses NaN
        raise ValueError(f"images must lie in [0, 1], got [{images.min()}, {images.max()}].")
    return images


def _feature_pair(feats_a: np.ndarray, feats_b: np.ndarray, at_least: int) -> tuple[np.ndarray, np.ndarray]:
    """Both sets in float64, checked."""
    a, b = np.asarray(feats_a, np.float64), np.asarray(feats_b, np.float64)
    for feats in (a, b):
        if feats.ndim != 2 or len(feats) < at_least or not feats.shape[1]:
            raise ValueError(f"Features must be [N, D] with N >= {at_least} and D >= 1, got {feats.shape}.")
        if not np.isfinite(feats).all():
            raise ValueError(f"Features must be finite; {np.sum(~np.isfinite(feats))} values are NaN or infinite.")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"Both sets need features of one dimension, got {a.shape[1]} and {b.shape[1]}.")
    return a, b


def _psd_root(matrix: np.ndarray) -> np.ndarray:
    """Square root of a symmetric positive semi-definite matrix; rounding's negative eigenvalues count as zero."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T


def _squared_distances(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Rows of the matrix of squared distances: the first row's index, and [<= CHUNK_ROWS, len(b)]."""
    norms_b = np.sum(b**2, axis=1)
    for start in range(0, len(a), CHUNK_ROWS):
        rows = a[start : start + CHUNK_ROWS]
        yield start, np.maximum(np.sum(rows**2, axis=1)[:, None] + norms_b - 2.0 * rows @ b.T, 0.0)


def _share_inside(points: np.ndarray, manifold: np.ndarray, k: int) -> float:
    """Share of `points` within the k-nearest-neighbour balls of `manifold`."""
    radii = np.empty(len(manifold))
    for start, distances in _squared_distances(manifold, manifold):
        rows = np.arange(len(distances))
        distances[rows, start + rows] = np.inf  # a point is not its own neighbour
        radii[start + rows] = np.partition(distances, k - 1, axis=1)[:, k - 1]
    inside = [(distances <= radii).any(axis=1) for _, distances in _squared_distances(points, manifold)]
    return float(np.mean(np.concatenate(inside)))
