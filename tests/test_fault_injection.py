"""kill -9 at random moments and files that grow too large, from outside: nothing half-written is loaded or counted.

Each command runs in a process of its own. `MARJAX_KILLS` is the number of kills of each command (default 50).
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_images
from PIL import Image

from marjax import convert, mar, torch_files
from marjax.checkpoint import CheckpointError, fingerprint, load, save, save_file
from marjax.config import MARConfig
from marjax.images import OPTIONS_FILE, is_complete
from marjax.types import MARParams

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
KILLS = int(os.environ.get("MARJAX_KILLS", "50"))

# Large enough that writing takes a while: 4M parameters.
CONFIG = MARConfig(
    **{"img_size": 8, "vae_stride": 1, "vae_embed_dim": 1, "patch_size": 2, "class_num": 2, "buffer_size": 2},
    **{"encoder_embed_dim": 256, "encoder_depth": 2, "encoder_num_heads": 2, "diffloss_d": 1, "diffloss_w": 64},
    **{"decoder_embed_dim": 256, "decoder_depth": 2, "decoder_num_heads": 2, "num_sampling_steps": "4"},
)
FAST = ("--num-iter", "1", "--batch-size", "2")
RECIPE = ("--preset", "fashion_mnist", "--img-size", "8", "--class-num", "2", "--buffer-size", "2", "--epochs", "3")
RECIPE += ("--encoder-depth", "1", "--decoder-depth", "1", "--diffloss-d", "1", "--batch-size", "4")
RECIPE += ("--warmup-epochs", "1", "--lr", "1e-3")
RECIPE += ("--save-every", "1", "--log-every", "1", "--dtype", "float32", "--attn-dropout", "0", "--proj-dropout", "0")

# Says when it starts to work, so that no kill is spent on imports.
CHILD = """
import resource, sys
from marjax import cli
from marjax.checkpoint import load, save
limit = int(sys.argv.pop(1))
print("ready", flush=True)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
if sys.argv[1] == "save":
    for _ in range(5):
        save(load(sys.argv[2]), sys.argv[3], overwrite=True)
        save(load(sys.argv[4]), sys.argv[3], overwrite=True)
else:
    sys.exit(cli.main())
"""


def start(folder: Path, *words, limit: int = 0) -> subprocess.Popen:
    """A command in a process of its own, which has imported everything."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MARJAX_CACHE_DIR": str(folder / ".cache")}
    command = [sys.executable, "-c", CHILD, str(limit), *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
    assert child.stdout.readline() == "ready\n", child.communicate()[1]
    return child


def finish(folder: Path, *words) -> tuple[float, str]:
    """Runs a command to its end, which must be a success: seconds and output."""
    child, begin = start(folder, *words), time.monotonic()
    out, err = child.communicate()
    assert child.returncode == 0, err
    return time.monotonic() - begin, out


def killed(folder: Path, words, delay: float) -> bool:
    """Starts a command and kills it after `delay` seconds; whether it was still running."""
    child = start(folder, *words)
    try:
        child.wait(delay)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
    _, err = child.communicate()
    assert child.returncode in (0, -signal.SIGKILL), err
    return child.returncode != 0


def kills(folder: Path, words, check, seed: int) -> int:
    """Kills a command at random moments of its run, again and again; `check` looks at what it left each time.

    What one run leaves, the next one finds. A run that comes to its end begins a new chain, in `check`'s hands.
    """
    seconds, _ = finish(folder, *words)
    check(True)
    count = 0
    for delay in np.random.default_rng(seed).uniform(0, seconds, KILLS):
        dead = killed(folder, words, delay)
        check(not dead)
        count += dead
    finish(folder, *words)
    check(True)
    print(f"{words[0]}: {seconds:.1f} s unbroken, {count} of {KILLS} runs killed")
    return count


@functools.cache
def model(seed: int) -> MARParams:
    shapes = jax.eval_shape(functools.partial(mar.init, CONFIG), jax.random.key(0))
    rng = np.random.default_rng(seed)
    tree = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.02, leaf.shape), leaf.dtype), shapes)
    return MARParams(mar=tree, vae=None, config=CONFIG)


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.exists() else set()


def remove(path: Path) -> None:
    subprocess.run(["rm", "-rf", str(path)], check=True)


@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_kill_convert(tmp_path, target):
    with torch_files.writing(tmp_path / "reference.safetensors", convert.to_state_dict(model(0)), CONFIG):
        pass
    before, expected, found = visible(tmp_path), fingerprint(model(0)), []

    def check(ended):
        there = visible(tmp_path) - before
        assert there <= {target}
        assert there or not ended
        if there:
            assert fingerprint(load(tmp_path / target)) == expected
            found.append(ended)
            remove(tmp_path / target)

    assert kills(tmp_path, ("convert", "reference.safetensors", target), check, seed=1) >= KILLS // 2
    assert True in found
    assert not list(tmp_path.glob(".tmp-*"))  # the last run removed what the killed ones left


def test_kill_save_over_another_model(tmp_path):
    for seed in (0, 1):
        save_file(model(seed), tmp_path / f"{seed}.safetensors")
    expected, found = {fingerprint(model(seed)): seed for seed in (0, 1)}, set()

    def check(ended):
        try:
            found.add(expected[fingerprint(load(tmp_path / "out"))])
        except CheckpointError as error:  # between two renames; the old model is there under a hidden name
            assert not ended and "no such path" in str(error)
            old = [path for path in tmp_path.glob(".tmp-*-old")]
            assert any(fingerprint(load(path)) in expected for path in old)

    words = ("save", "0.safetensors", "out", "1.safetensors")
    assert kills(tmp_path, words, check, seed=2) >= KILLS // 2
    assert found == {0, 1}


def test_kill_train(tmp_path):
    make_images(tmp_path / "photos", {"cat": 4, "dog": 4})
    words = ("train", "--data", "photos", "--out", "run", *RECIPE)
    finish(tmp_path, *words[:4], "unbroken", *RECIPE)
    expected = {name: fingerprint(load(tmp_path / "unbroken" / name)) for name in ("ema", "raw")}
    steps = []

    def check(ended):
        run = tmp_path / "run"
        for name in visible(run) & set(expected):
            got = fingerprint(load(run / name))
            assert got == expected[name] or not ended
        if (run / "metrics.jsonl").exists():
            lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
            steps.append(len([line for line in lines if line.endswith("\n")]))
        if ended:
            done = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
            assert done == [1, 2, 3, 4, 5, 6]
            assert fingerprint(load(run / "ema")) == expected["ema"]
            remove(run)

    assert kills(tmp_path, words, check, seed=3) >= KILLS // 4
    assert len(set(steps)) > 2 or KILLS < 20  # they went on from one another


@pytest.mark.parametrize("target", ["samples", "s.npz"])
def test_kill_sample(tmp_path, target):
    save_file(model(0), tmp_path / "model.safetensors")
    option = "--out-npz" if target.endswith(".npz") else "--out"
    words = ("sample", "--model", "model.safetensors", "--per-class", 6, *FAST, option, target)
    finish(tmp_path, *words[:-1], f"whole-{target}")
    whole, out = tmp_path / f"whole-{target}", tmp_path / target
    expected = read_samples(whole)

    def check(ended):
        if target == "samples":
            names = visible(out)
            assert names <= visible(whole)
            for name in names - {OPTIONS_FILE}:
                assert is_complete(out / name, (8, 8, 1))
                np.testing.assert_array_equal(Image.open(out / name), expected[name])
            assert not ended or names == visible(whole)
        elif out.exists():
            got = read_samples(out)
            assert got.keys() == expected.keys()
            for name, array in got.items():
                np.testing.assert_array_equal(array, expected[name])
        if ended:
            assert out.exists()
            remove(out)

    assert kills(tmp_path, words, check, seed=4) >= KILLS // 4


def read_samples(path: Path) -> dict[str, np.ndarray]:
    if path.suffix == ".npz":
        with np.load(path) as file:
            return dict(file)
    return {file.name: np.asarray(Image.open(file)) for file in path.glob("*.png")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in both forms, images, and a compilation cache; not to be written to."""
    path = tmp_path_factory.mktemp("limited")
    save(model(0), path / "model")
    with torch_files.writing(path / "reference.safetensors", convert.to_state_dict(model(0)), CONFIG):
        pass
    make_images(path / "photos", {"cat": 4, "dog": 4})
    # Programs are compiled and kept without a limit.
    for words in (
        ("sample", "--model", "model", *FAST, "--out", "a.png"),
        ("train", "--data", "photos", "--out", "a", *RECIPE),
    ):
        finish(path, *words)
    return path


@pytest.mark.parametrize(
    ("words", "limit", "blamed"),
    [
        (("convert", "reference.safetensors", "out"), 100_000, "out"),
        (("convert", "reference.safetensors", "out.safetensors"), 100_000, "out.safetensors"),
        (("convert", "model", "out.safetensors", "--to", "safetensors"), 100_000, "out.safetensors"),
        (("sample", "--model", "model", *FAST, "--out", "out.png"), 100, "out.png"),
        (("sample", "--model", "model", *FAST, "--out", "out"), 60, "out/options.json"),
        (("sample", "--model", "model", *FAST, "--out-npz", "out.npz"), 300, "out.npz.partial/images.npy"),
        (("train", "--data", "photos", "--out", "out", *RECIPE), 100_000, "out/state"),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, tuple) else None,
)
def test_a_file_that_may_not_grow(folder, words, limit, blamed):
    """RLIMIT_FSIZE, which fails writes as a full disk does: one sentence, exit code 2, nothing half-written."""
    before = visible(folder)
    child = start(folder, *words, limit=limit)
    out, err = child.communicate()
    assert child.returncode == 2 and not out, err
    *progress, sentence = err.splitlines()
    assert all(line.startswith("step ") for line in progress)
    assert sentence == f"marjax: Cannot write {blamed}: the file is too large for this file system; write elsewhere."
    left = visible(folder) - before
    for name in left:  # what may be begun: no image, no model
        assert not [path for path in (folder / name).rglob("*") if path.suffix in (".png", ".npz")]
        assert not visible(folder / name) & {"ema", "raw"}
        remove(folder / name)
