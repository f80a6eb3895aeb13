"""Trains the classifier whose features measure Fashion-MNIST quality (`marjax.metrics`), from IDX files.

Example, a few minutes on two CPU cores:

    python tools/train_classifier.py --data fashion-mnist --out marjax/assets/fashion_mnist_classifier.safetensors
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from safetensors.numpy import save_file
from tqdm import trange

from marjax.data import Source, batches, open_source
from marjax.files import atomic_write
from marjax.metrics import IMAGE_SHAPE, NUM_CLASSES, Classifier, FeatureExtractor, class_accuracy
from marjax.types import Array, PyTree

DATA_LICENCE = "Fashion-MNIST, MIT licence, Copyright 2017 Zalando SE"
DROPOUT_RATE = 0.3
WEIGHT_DECAY = 0.05


def train(source: Source, *, epochs: int, batch_size: int, learning_rate: float, seed: int) -> PyTree:
    """Trains a `Classifier` with AdamW, a one-cycle learning rate and mirrored images.

    Args:
        source: images uint8 [N, 28, 28, 1] of 10 classes.
        epochs: passes over the data.
        batch_size: images per step.
        learning_rate: its peak.
        seed: of initialisation, data order and dropout.

    Returns:
        Parameters, float32.
    """
    model = Classifier(dropout_rate=DROPOUT_RATE)
    steps = max(1, epochs * len(source) // batch_size)
    optimizer = optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps), weight_decay=WEIGHT_DECAY
    )
    init_key, dropout_key = jax.random.split(jax.random.key(seed))
    params = model.init(init_key, jnp.zeros((1, *IMAGE_SHAPE)))["params"]

    def loss_fn(params: PyTree, images: Array, labels: Array, key: Array) -> Array:
        variables, inputs = {"params": params}, images.astype(jnp.float32) / 255.0
        _, logits = model.apply(variables, inputs, deterministic=False, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params: PyTree, state: PyTree, images: Array, labels: Array, key: Array) -> tuple[PyTree, PyTree, Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels, key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, stream = optimizer.init(params), batches(source, batch_size, seed, flip=True)
    with trange(steps) as progress:
        for index in progress:
            params, state, loss = step(params, state, *next(stream), jax.random.fold_in(dropout_key, index))
            if index % 100 == 0:
                progress.set_postfix(loss=f"{loss:.3f}")
    return params


def main(argv: list[str] | None = None) -> None:
    """Trains, measures the weights as they are shipped (float16), writes them, and prints the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="directory of 28 x 28 grey images: MNIST-family IDX files"
    )
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data_licence", default=DATA_LICENCE, help="recorded in the file")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)

    for name in ("epochs", "batch_size", "learning_rate"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name)} must be positive.")
    if args.seed < 0:
        parser.error(f"--seed {args.seed} must not be negative.")
    try:
        source, test = (open_source(args.data, split=split, img_size=28, channels=1) for split in ("train", "test"))
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    num_classes = max(source.num_classes, test.num_classes)
    if num_classes > NUM_CLASSES:
        parser.error(f"{args.data} has {num_classes} classes, expected at most {NUM_CLASSES}.")
    test_images, test_labels = test.get(np.arange(len(test)))
    params = train(
        source, epochs=args.epochs, batch_size=args.batch_size, learning_rate=args.learning_rate, seed=args.seed
    )
    shipped = jax.tree.map(lambda leaf: np.asarray(leaf, np.float16), params)
    widened = FeatureExtractor(jax.tree.map(lambda leaf: leaf.astype(np.float32), shipped))
    accuracy = class_accuracy(widened.predict(test_images), test_labels)
    metadata = {
        "test_accuracy": f"{accuracy:.4f}",
        "command": shlex.join(["python", "tools/train_classifier.py", *argv]),
        "data_licence": args.data_licence,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(args.out) as temporary:
        save_file(traverse_util.flatten_dict(shipped, sep="/"), temporary, metadata)
    reloaded = class_accuracy(FeatureExtractor.load(args.out).predict(test_images), test_labels)
    print(f"test accuracy {reloaded:.4f} on {len(test_labels)} images, {args.out.stat().st_size} bytes in {args.out}")


if __name__ == "__main__":
    main()
