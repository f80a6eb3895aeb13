"""The command line in-process: what it writes and prints, and one sentence for every kind of bad input."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from PIL import Image

from marjax import cli, cli_sample, cli_train, compilation, mar, metrics
from marjax.checkpoint import CheckpointError, describe, load, save
from marjax.cli_options import dashed
from marjax.compilation import Stopwatch
from marjax.config import MARConfig
from marjax.images import OPTIONS_FILE, to_uint8
from marjax.sample import sample
from marjax.train import NonFiniteLossError, TrainConfig
from marjax.types import MARParams

ROOT = Path(__file__).parent.parent
NAMES = ("sneaker", "bag", "ankle boot")
SIZES = {"encoder_embed_dim": 32, "encoder_depth": 1, "encoder_num_heads": 2, "buffer_size": 2, "diffloss_d": 1}
SIZES |= {"decoder_embed_dim": 32, "decoder_depth": 1, "decoder_num_heads": 2, "diffloss_w": 16}
TINY = MARConfig(
    **{"img_size": 8, "vae_stride": 1, "vae_embed_dim": 1, "patch_size": 2, "class_num": 3, "class_names": NAMES},
    **{"num_sampling_steps": "4", "clip_denoised": True},
    **SIZES,
)
# One compiled program for every test that really samples.
FAST = ("--num-iter", "1", "--batch-size", "2")
FAST_OPTIONS = {"num_iter": 1, "batch_size": 2}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs take longer to compile than to run; other tests get their own, optimised ones."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A working directory and a compilation cache of its own; jax's settings as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARJAX_CACHE_DIR", str(tmp_path / "cache"))
    settings = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()  # jax reads its settings once, when it first compiles
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@functools.cache
def random_model(config):
    """Weights drawn without compiling anything."""
    shapes, rng = jax.eval_shape(functools.partial(mar.init, config), jax.random.key(0)), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.1, leaf.shape), leaf.dtype), shapes)
    return MARParams(mar=params, vae=None, config=config)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    save(random_model(TINY), path, provenance={"data": "none"})
    return str(path)


@pytest.fixture
def marjax(capsys):
    """Function that runs a command: (exit code, stdout, stderr)."""

    def run(*words):
        code = cli.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(marjax):
    """Function that runs a command which must be refused with exit code 2, and gives its one sentence."""

    def run(*words):
        code, out, err = marjax(*words)
        assert code == 2 and not out
        assert err.startswith("marjax: ") and err.endswith(".\n") and err.count("\n") == 1
        return err

    return run


@pytest.fixture
def calls(monkeypatch):
    """Replaces sampling by black images, and lists the arguments it was called with."""
    recorded = []

    def fake(params, rng, labels, **options):
        recorded.append({"seed": jax.random.key_data(rng).tolist(), "labels": labels, **options})
        config = params.config
        return jnp.zeros((len(options["indices"]), config.img_size, config.img_size, config.vae_embed_dim))

    monkeypatch.setattr(cli_sample, "sample", fake)
    return recorded


def read(path):
    with Image.open(path) as image:
        return np.asarray(image)


def write_idx(folder, split, images, labels):
    """Images uint8 [N, H, W] and labels [N] as the IDX files of a split ("train" or "t10k")."""
    folder.mkdir(exist_ok=True)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (folder / f"{split}-{name}-ubyte").write_bytes(header + array.astype(np.uint8).tobytes())
    return folder


# --- Spelling, help, version ---------------------------------------------------------------------------------------


def test_both_spellings():
    assert dashed(["sample", "--num_iter=8", "--out", "a_b", "--cfg_schedule", "x", "-x_y", "--", "--my_file"]) == [
        *("sample", "--num-iter=8", "--out", "a_b", "--cfg-schedule", "x", "-x_y", "--", "--my_file")
    ]
    assert dashed(["--labels=a_b"]) == ["--labels=a_b"]


def test_version_and_help(marjax):
    from marjax import __version__

    assert marjax("--version") == (0, f"marjax {__version__}\n", "")
    for command in ((), ("sample",), ("train",), ("eval",), ("info",)):
        code, out, err = marjax(*command, "--help")
        assert (code, err) == (0, "") and "usage: marjax" in out
        assert "examples:" in out or command == ("info",)


def test_every_field_is_an_option_of_train(marjax):
    text = " ".join(marjax("train", "--help")[1].split())
    train = TrainConfig()
    fields = [*dataclasses.fields(train), *dataclasses.fields(train.objective), *dataclasses.fields(train.optimizer)]
    for field in fields:
        if field.name not in ("objective", "optimizer") or field.type == "str":
            assert f"--{field.name.replace('_', '-')}" in text
    for field in dataclasses.fields(MARConfig):
        assert (f"--{field.name.replace('_', '-')} " in text) == (field.name != "vae")
    assert "decay of the exponential moving average of the weights, in [0, 1) (default: 0.9999)" in text
    assert "image side in pixels (default: the preset's)" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: COMMAND; `marjax --help` lists the options"),
        (("paint",), "invalid choice: 'paint'"),
        (("sample", "--frobnicate"), "unrecognized arguments: --frobnicate"),
        (("sample", "--num", "3"), "unrecognized arguments: --num 3"),
        (("sample", "--seed", "-1"), "--seed: '-1' must be an integer from 0 to 2**32 - 1; `marjax sample --help`"),
        (("sample", "--seed", "4294967296"), "--seed: '4294967296' must be an integer from 0 to"),
        (("sample", "--batch-size", "0"), "--batch-size: '0' must be a positive integer"),
        (("sample", "--per-class", "2.5"), "--per-class: '2.5' must be a positive integer"),
        (("sample", "--cfg", "high"), "--cfg: invalid float value: 'high'"),
        (("sample", "--cfg-schedule", "cosine"), "--cfg-schedule: invalid choice: 'cosine'"),
        (("sample", "--dtype", "float16"), "--dtype: invalid choice: 'float16'"),
        (("train", "--out", "run"), "required: --data"),
        (("train", "--data", "d", "--out", "r", "--seed", "x"), "--seed: 'x' must be an integer"),
        (("train", "--data", "d", "--out", "r", "--preset", "a", "--init-from", "b"), "not allowed with"),
        (("eval",), "required: --data"),
    ],
)
def test_bad_command_lines(refused, words, message):
    assert message in refused(*words)


# --- sample --------------------------------------------------------------------------------------------------------


def test_sample_grid(marjax, model, tmp_path):
    code, out, err = marjax("sample", "--model", model, "--seed", 3, *FAST)
    assert (code, err) == (0, "")
    assert out.startswith("grid.png: 3 images (") and "images/s, compilation" in out
    expected = to_uint8(sample(random_model(TINY), jax.random.key(3), [0, 1, 2], **FAST_OPTIONS))
    grid = read(tmp_path / "grid.png")
    assert grid.shape == (88 + 2 * 4, 3 * 88 + 4 * 4)  # one row, cells enlarged 11 times
    cells = [grid[4 : 4 + 88, 4 + 92 * column :][:, :88] for column in range(3)]
    assert np.array_equal([cell[::11, ::11] for cell in cells], expected[..., 0])
    assert {path.name for path in tmp_path.iterdir()} <= {"grid.png", "cache"}


def test_sample_grid_has_a_row_per_class(marjax, model, calls, tmp_path):
    words = ("--labels", "Bag, 0", "--per-class", 4, "--out", "g.PNG", "--batch-size", 3)
    assert marjax("sample", "--model", model, *words)[0] == 0
    assert read(tmp_path / "g.PNG").shape == (2 * 92 + 4, 4 * 92 + 4)
    # The last batch is filled up, so that there is one shape.
    assert [call["labels"].tolist() for call in calls] == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert [call["indices"].tolist() for call in calls] == [[0, 1, 2], [3, 4, 5], [6, 7, 7]]


def test_sample_passes_its_options_on(marjax, model, calls):
    words = shlex.split(
        "--labels 2 --seed 7 --cfg 3 --cfg_schedule constant --num_iter 5 --num-sampling-steps ddim25 "
        "--temperature=0.9 --accel none --dtype bfloat16"
    )
    assert marjax("sample", "--model", model, *words)[0] == 0
    (call,) = calls
    assert call.pop("indices").tolist() == [0] and call.pop("labels").tolist() == [2]
    assert call == {
        **{"seed": [0, 7], "batch_size": 1, "accel": "none", "num_iter": 5, "dtype": "bfloat16", "cfg": 3.0},
        **{"cfg_schedule": "constant", "temperature": 0.9, "num_sampling_steps": "ddim25"},
    }


def test_sample_defaults_are_the_models(marjax, tmp_path, calls):
    config = dataclasses.replace(TINY, cfg=2.0, cfg_schedule="constant", temperature=0.9)
    save(random_model(TINY).replace(config=config), tmp_path / "model")
    assert marjax("sample", "--model", tmp_path / "model")[0] == 0
    assert marjax("sample", "--model", tmp_path / "model", "--unconditional", 3, "--out", "u")[0] == 0
    for call, labels, cfg in zip(calls, ([0, 1, 2], None), (2.0, 1.0), strict=True):
        assert (call["labels"] if labels is None else call["labels"].tolist()) == labels
        assert {name: call[name] for name in ("cfg", "cfg_schedule", "temperature", "num_sampling_steps")} == {
            **{"cfg": cfg, "cfg_schedule": "constant", "temperature": 0.9, "num_sampling_steps": "4"}
        }
        assert call["num_iter"] == 16  # one per token, as there are fewer than 64
        assert call["dtype"] == ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    names = {path.name for path in (tmp_path / "u").iterdir()}
    assert names == {OPTIONS_FILE, *(f"00000{index}_unconditional.png" for index in range(3))}


def test_sample_shows_its_progress_on_a_terminal(marjax, model, calls, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert marjax("sample", "--model", model)[0] == 0
    assert "3/3 images" in terminal.getvalue() and "images/s, compilation" in terminal.getvalue()


def test_sample_directory_resumes(marjax, model, tmp_path, monkeypatch):
    command = ("sample", "--model", model, "--per-class", 2, *FAST)
    assert marjax(*command, "--out", "whole")[1].startswith("whole: 6 images written, 0 kept (")
    assert {path.name for path in Path("whole").iterdir()} == {
        *("000000_sneaker.png", "000001_sneaker.png", "000002_bag.png", "000003_bag.png"),
        *("000004_ankle-boot.png", "000005_ankle-boot.png", OPTIONS_FILE),
    }
    assert read("whole/000005_ankle-boot.png").shape == (8, 8)

    assert marjax(*command, "--out", "broken/")[0] == 0
    Path("broken/000001_sneaker.png").unlink()
    Path("broken/000003_bag.png").write_bytes(Path("broken/000003_bag.png").read_bytes()[:50])
    Path("broken/000004_ankle-boot.png").unlink()
    kept = {path: path.stat().st_mtime_ns for path in Path("broken").iterdir() if not path.name.startswith("000003")}
    sampled = []
    monkeypatch.setattr(
        cli_sample, "sample", lambda *args, **options: sampled.append(options["indices"]) or sample(*args, **options)
    )
    assert marjax(*command, "--out", "broken/")[1].startswith("broken/: 3 images written, 3 kept (")
    assert [indices.tolist() for indices in sampled] == [[1, 3], [4, 4]]
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    for path in Path("whole").iterdir():
        assert path.read_bytes() == Path("broken", path.name).read_bytes()

    assert marjax(*command, "--out", "whole")[1] == "whole: all 6 images were there already\n"
    assert len(sampled) == 2


def test_sample_directory_keeps_what_was_done_before_an_interruption(marjax, model, calls, monkeypatch):
    fake = cli_sample.sample

    def interrupted(*args, **options):
        if len(calls) == 1:
            raise KeyboardInterrupt
        return fake(*args, **options)

    monkeypatch.setattr(cli_sample, "sample", interrupted)
    assert marjax("sample", "--model", model, "--out", "samples", *FAST) == (130, "", "marjax: interrupted.\n")
    assert {path.name for path in Path("samples").iterdir()} == {"000000_sneaker.png", "000001_bag.png", OPTIONS_FILE}


def test_sample_directory_refuses_other_options(marjax, refused, model, calls, tmp_path):
    command = ("sample", "--model", model, "--out", "samples")
    assert marjax(*command)[0] == 0
    assert "(different: cfg, seed)" in refused(*command, "--seed", 1, "--cfg", 2)
    assert "(different: count, labels)" in refused(*command, "--per-class", 2)
    other = dataclasses.replace(TINY, cfg=4.0)
    save(random_model(TINY).replace(config=other), tmp_path / "other")
    assert "(different: model)" in refused(*command, "--model", tmp_path / "other", "--cfg", 1)
    assert "is not empty and holds no options.json" in refused("sample", "--model", model, "--out", tmp_path)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--labels boot", "Unknown label 'boot'; expected a number from 0 to 2 or one of sneaker, bag, ankle boot."),
        ("--labels 3", "Unknown label '3'"),
        ("--labels sneaker,,bag", "Unknown label ''"),
        ("--unconditional 2 --labels 1", "--unconditional excludes --labels and --per-class"),
        ("--unconditional 2 --cfg 3", "cfg=3.0 needs labels"),
        ("--weights raw", "--weights raw is for a training run's directory, which"),
        ("--cfg nan", "cfg=nan must be finite and >= 0."),
        ("--temperature -1", "temperature=-1.0 must be finite and >= 0."),
        ("--num-iter 17", "num_iter=17 must be an integer in [1, 16], the sequence length."),
        ("--num-sampling-steps many", "num_sampling_steps='many': expected a count such as 100"),
        ("--accel warp", "Unknown accel 'warp'; expected one of none"),
        ("--out no/grid.png", "does not exist; create that folder first."),
        ("--out file/grid.png", "is not a folder; create that folder first."),
        ("--out folder.png", "Cannot write folder.png: it is a folder; give the name of a file."),
        ("--out grid.jpg", "--out grid.jpg: images are written as PNG; give a .png file or a directory."),
        ("--out file", "Cannot make the directory file: File exists; give another."),
        ("--out file/samples", "Cannot make the directory file/samples: Not a directory; give another."),
        ("--model missing", "Cannot load 'missing': no such path"),
        ("--model file", "Cannot load 'file': it is neither a checkpoint directory nor a .safetensors file"),
    ],
)
@pytest.mark.parametrize("out", ["grid.png", "samples"])
def test_sample_bad_input(refused, model, tmp_path, words, message, out):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    assert message in refused("sample", "--model", model, "--out", out, *words.split())
    left = {path for path in tmp_path.rglob("*") if path.parent.name != "cache"}
    assert {path.name for path in left} <= {"file", "folder.png", "cache", "samples"}


def test_sample_refuses_images_that_are_no_pictures(refused, tmp_path):
    save(random_model(dataclasses.replace(TINY, vae_embed_dim=4)), tmp_path / "model")
    assert "Images of 4 channels cannot be written as PNG" in refused("sample", "--model", tmp_path / "model")


# --- train ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    return write_idx(tmp_path / "data", "train", rng.integers(0, 256, (12, 8, 8)), np.arange(12) % 3)


@pytest.fixture
def trained(monkeypatch):
    """Replaces training, and lists the arguments it was called with."""
    recorded = []

    def fake(config, recipe, source, out, **options):
        recorded.append({"config": config, "recipe": recipe, "source": source, **options})
        step = {"step": 2, "loss": 0.5, "images_per_s": 10.0, "eta_s": 90.0}
        options["progress"](step)
        Path(out).mkdir(exist_ok=True)
        save(random_model(TINY), Path(out, "ema"), provenance={"step": 2, **options["provenance"]}, overwrite=True)
        return random_model(TINY)

    monkeypatch.setattr(cli_train, "train", fake)
    return recorded


TINY_OPTIONS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
TINY_OPTIONS += ["--img-size=8", "--class-num=3", f"--class-names={','.join(NAMES)}", "--num-sampling-steps=4"]
TINY_OPTIONS += ["--cfg=1"]
RECIPE = ["--batch-size=4", "--warmup-epochs=0", "--dtype=float32", "--attn-dropout=0", "--proj-dropout=0"]


def test_train_resumes_and_its_run_is_a_model(marjax, refused, data):
    command = ["train", "--data", data, "--out", "run", *TINY_OPTIONS, *RECIPE, "--log_every", 1]
    code, out, err = marjax(*command, "--epochs", 0.34)
    assert code == 0 and out.startswith("run: at step 1 after 0:")
    assert err.startswith("step 1/1: loss ") and "images/s, 0:00:00 left\n" in err

    compiled = {path.name for path in Path("cache").glob("jit_step-*-cache")}
    assert len(compiled) == 1

    code, out, err = marjax(*command, "--epochs", 1, "--save-file", "ema.safetensors")
    assert {path.name for path in Path("cache").glob("jit_step-*-cache")} == compiled  # and was found again
    assert code == 0 and "run: at step 3 after" in out
    assert "ema.safetensors: the EMA model, matrices in bfloat16\n" in out
    assert [line.split(":")[0] for line in err.splitlines()] == ["step 2/3", "step 3/3"]
    assert [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()] == [1, 2, 3]

    ema, compact = load("run/ema"), load("ema.safetensors")
    assert ema.config == compact.config == TINY
    for kept, cast in zip(jax.tree.leaves(ema), jax.tree.leaves(compact), strict=True):
        assert np.array_equal(kept.astype(cast.dtype), cast)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(compact)} == {"float32", "bfloat16"}
    facts = describe("ema.safetensors").provenance
    assert (facts["step"], facts["weights"], facts["train_config"]["objective"]["attn_dropout"]) == (3, "ema", 0.0)
    assert shlex.split(facts["command"])[:3] == ["marjax", "train", "--data"]
    assert facts["command"].endswith("--epochs 1 --save-file ema.safetensors")

    assert "(different: train.optimizer)" in refused(*command, "--epochs", 1, "--lr", 0.1)
    # The run's directory is a model for the other commands.
    for words, weights in (((), "ema"), (("--weights", "raw"), "raw")):
        code, out, _ = marjax("info", "run", *words)
        assert code == 0 and out.startswith(f"run/{weights}: 8 x 8 pixels") and f"  weights: {weights}\n" in out
    assert marjax("sample", "--model", "run", "--weights", "raw", "--seed", 1, *FAST)[0] == 0
    expected = to_uint8(sample(load("run/raw"), jax.random.key(1), [0, 1, 2], **FAST_OPTIONS))
    assert np.array_equal(read("grid.png")[4:92:11, 4:92:11], expected[0, ..., 0])


def test_train_passes_its_options_on(marjax, data, trained):
    words = shlex.split(
        "--epochs 2 --batch_size 4 --seed 3 --ema-rate 0.5 --dtype float32 --flip --log-every 7 --save-every 8 "
        "--mask-ratio-min 0.5 --label-drop-prob 0.2 --attn-dropout 0.3 --proj_dropout 0.4 --diffusion-batch-mul 2 "
        "--remat --unroll 3 --optimizer muon --blr 1e-3 --lr 2e-3 --min-lr 1e-5 --lr-schedule cosine "
        "--warmup-epochs 0.5 --weight-decay 0.1 --beta1 0.8 --beta2 0.9 --grad-clip 1 --no-clip-denoised"
    )
    code, _, err = marjax("train", "--data", data, "--out", "run", *TINY_OPTIONS, *words)
    assert (code, err) == (0, "step 2/6: loss 0.5000, 10 images/s, 0:01:30 left\n")
    (call,) = trained
    assert call["config"] == dataclasses.replace(TINY, clip_denoised=False)
    assert call["init_from"] is None
    flat = dataclasses.asdict(call["recipe"])
    objective, optimizer = flat.pop("objective"), flat.pop("optimizer")
    assert flat == {
        **{"epochs": 2.0, "batch_size": 4, "seed": 3, "ema_rate": 0.5, "dtype": "float32", "flip": True},
        **{"log_every": 7, "save_every": 8},
    }
    assert objective == {
        **{"mask_ratio_min": 0.5, "label_drop_prob": 0.2, "attn_dropout": 0.3, "proj_dropout": 0.4},
        **{"diffusion_batch_mul": 2, "remat": True, "unroll": 3},
    }
    assert optimizer == {
        **{"optimizer": "muon", "blr": 1e-3, "lr": 2e-3, "min_lr": 1e-5, "lr_schedule": "cosine"},
        **{"warmup_epochs": 0.5, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9, "grad_clip": 1.0},
    }


def test_train_starts_from_a_model(marjax, refused, data, trained, model):
    from marjax import save_file

    save_file(random_model(TINY), "compact.safetensors", dtype="bfloat16")
    command = ("train", "--data", data, "--out", "run", "--init-from", "compact.safetensors")
    assert marjax(*command, "--cfg", 2)[0] == 0
    (call,) = trained
    assert call["config"] == dataclasses.replace(TINY, cfg=2.0)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(call["init_from"].mar)} == {"float32"}
    assert "--init-from: the weights do not fit the options that change the model's shape" in refused(
        *command, "--diffloss-w", 8
    )
    assert len(trained) == 1


def test_train_takes_class_names_from_class_directories(marjax, trained):
    for name in ("cats", "dogs"):
        Path("photos", name).mkdir(parents=True)
        Image.new("L", (9, 9)).save(Path("photos", name, "0.png"))
    command = ("train", "--data", "photos", "--out", "run", "--img-size", 8)
    assert marjax(*command, "--class-num", 2)[0] == 0
    assert marjax(*command)[0] == 0  # of ten classes, two are there: Fashion-MNIST's names would be wrong
    assert marjax(*command, "--class-num", 2, "--class-names", "a, b")[0] == 0
    assert [call["config"].class_names for call in trained] == [("cats", "dogs"), (), ("a", "b")]


def test_train_shows_its_progress_on_a_terminal(marjax, data, trained, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert marjax("train", "--data", data, "--out", "run", *TINY_OPTIONS, "--batch-size", 4, "--epochs", 1)[0] == 0
    assert "2/3 steps, loss 0.5000, 10 images/s, 0:01:30 left" in terminal.getvalue()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data missing", "missing does not exist; expected a directory of IDX files"),
        ("--preset mar_tiny", "Unknown preset 'mar_tiny'; expected one of mar_base"),
        ("--preset mar_base", "img_size=8 must be a multiple of vae_stride * patch_size = 16 * 1."),
        ("--epochs 0", "epochs=0.0 must be a positive finite number."),
        ("--optimizer sgd", "optimizer='sgd' must be one of adamw, muon."),
        ("--mask-ratio-min 0", "mask_ratio_min=0.0 must lie in (0, 1]."),
        ("--encoder-depth 0", "encoder_depth=0 must be a positive integer."),
        ("--img-size 10", "images are 8 x 8 x 1, the model expects 10 x 10 x 1"),
        ("--class-names a,b", "class_names has 2 entries, expected class_num=3."),
        ("--class-num 2 --class-names a,b", "The data has 3 classes, the model class_num=2."),
        ("--out data", "is not empty and holds no training run"),
        ("--init-from missing", "Cannot load 'missing': no such path"),
        ("--save-file ema.bin", "--save-file ema.bin: the name must end in .safetensors."),
        ("--save-file no/ema.safetensors", "does not exist; create that folder first."),
    ],
)
def test_train_bad_input(refused, data, tmp_path, words, message):
    before = set(data.iterdir())
    assert message in refused("train", "--data", data, "--out", "run", *TINY_OPTIONS, *RECIPE, *words.split())
    assert not Path("run").exists() and set(data.iterdir()) == before


def test_latent_models_train_on_cached_latents_only(refused, data):
    words = ("--data", data, "--out", "run", "--preset", "mar_base", "--img-size", 16)
    assert "the model expects 16 x 16 x 3" in refused("train", *words)


# --- eval ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fashion(tmp_path_factory):
    """A random model of 28 x 28 images, and a small test split of Fashion-MNIST."""
    folder = tmp_path_factory.mktemp("fashion")
    with np.load(ROOT / "tests" / "data" / "fashion_mnist_test64.npz") as file:
        write_idx(folder / "data", "t10k", file["images"][..., 0], file["labels"])
    config = dataclasses.replace(TINY, img_size=28, patch_size=14, class_num=10, class_names=())
    save(random_model(config), folder / "model")
    return folder


def test_eval(marjax, fashion, monkeypatch):
    evaluate, evaluated = metrics.evaluate, []

    def recorded(*args):
        evaluated.append((*args, evaluate(*args)))
        return evaluated[-1][-1]

    monkeypatch.setattr(metrics, "evaluate", recorded)
    command = ("eval", "--model", fashion / "model", "--data", fashion / "data", "--num-images", 14, "--seed", 5)
    code, out, err = marjax(*command, "--num-iter", 1, "--batch-size", 7, "--dtype", "float32")
    assert (code, err) == (0, "")
    *table, last = out.splitlines()
    document = json.loads(last)
    assert [line[:18].rstrip() for line in table] == [
        *("frechet distance", "class accuracy", "precision", "recall", "num images", "speed")
    ]
    ((images, labels, real_images, _, k, scores),) = evaluated
    assert np.array_equal(labels, np.arange(14) % 10) and k == 3
    expected = sample(load(fashion / "model"), jax.random.key(5), labels, num_iter=1, batch_size=7)
    assert np.array_equal(images, to_uint8(expected))
    with np.load(ROOT / "tests" / "data" / "fashion_mnist_test64.npz") as file:
        assert np.array_equal(real_images, file["images"])
    assert {name: document[name] for name in scores} == scores
    assert table[0].split()[-1] == f"{scores['frechet_distance']:.4f}"
    assert document["seconds_per_image"] > 0 and document["compile_seconds"] >= 0
    settings = {
        **{"num_images": 14, "num_real_images": 64, "seed": 5, "batch_size": 7, "num_iter": 1, "accel": "none"},
        **{"dtype": "float32", "cfg": 1.0, "cfg_schedule": "linear", "temperature": 1.0, "num_sampling_steps": "4"},
        **{"model": str(fashion / "model"), "data": str(fashion / "data"), "extractor": "fashion_mnist", "k": 3},
    }
    assert {name: document[name] for name in settings} == settings
    assert {"device", "num_devices", "jax", "marjax"} <= document.keys()


def test_eval_bad_input(refused, fashion, model, data, calls):
    command = ("eval", "--model", fashion / "model", "--data", fashion / "data")
    assert (
        "The model generates 8 x 8 x 1 images of 3 classes, but only the fashion_mnist feature extractor ships, "
        "for 28 x 28 x 1 images of 10 classes"
    ) in refused(*command, "--model", model)
    assert "--num-images 3 and 64 test images: the metrics need at least 4" in refused(*command, "--num-images", 3)
    assert "t10k-images-idx3-ubyte.gz exists there" in refused(*command, "--data", data)
    assert "missing does not exist" in refused(*command, "--data", "missing")
    assert "Cannot load 'missing'" in refused(*command, "--model", "missing")
    assert not calls


# --- info ----------------------------------------------------------------------------------------------------------


def test_info_lists_what_there_is(marjax, monkeypatch, model):
    header = describe(model)
    monkeypatch.setattr(cli.checkpoint, "describe", lambda name: header)
    code, out, err = marjax("info")
    assert (code, err) == (0, "")
    assert "  mar_base       256 x 256 pixels, 1000 classes, 256 tokens, 208M parameters\n" in out
    assert out.splitlines()[-2:] == [
        "Shipped models:",
        "  fashion_mnist  8 x 8 pixels, 3 classes, 16 tokens, 0.0357M parameters",
    ]


def test_info_names_a_shipped_model_that_cannot_be_used(marjax, monkeypatch):
    def broken(name):
        raise CheckpointError(f"Cannot load '{name}': it is damaged.")

    monkeypatch.setattr(cli.checkpoint, "describe", broken)
    code, out, _ = marjax("info")
    assert code == 0 and "  fashion_mnist  unusable: Cannot load 'fashion_mnist': it is damaged.\n" in out


def test_info_describes_a_model(marjax, model):
    code, out, err = marjax("info", model)
    assert (code, err) == (0, "")
    count = sum(leaf.size for leaf in jax.tree.leaves(random_model(TINY)))
    lines = out.splitlines()
    assert lines[:2] == [f"{model}: 8 x 8 pixels, 3 classes, 16 tokens", f"parameters: {count:,} (matrices in float32)"]
    assert {'  class_names: ["sneaker", "bag", "ankle boot"]', "  vae: null", "  data: none"} <= set(lines)
    assert lines[-1] == f"checksums: {len(describe(model).digests)} verified"


def test_info_of_a_damaged_model(marjax, tmp_path):
    save(random_model(TINY), tmp_path / "model")
    damaged = max((tmp_path / "model" / "params").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    code, out, err = marjax("info", tmp_path / "model")
    assert code == 2 and "parameters: " in out and "checksums" not in out
    assert err.count("\n") == 1 and "is damaged or missing; get a fresh copy." in err


# --- Exit codes, cache, time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (NonFiniteLossError("The loss became nan\nat step 3."), 1, "The loss became nan at step 3."),
        (KeyboardInterrupt(), 130, "interrupted."),
        (CheckpointError("Cannot load it."), 2, "Cannot load it."),
        (PermissionError(13, "Permission denied", "file"), 2, "[Errno 13] Permission denied: 'file'"),
        (TypeError("labels must be integers."), 2, "labels must be integers."),
    ],
)
def test_exit_codes(marjax, monkeypatch, error, code, sentence):
    def fail(*args):
        raise error

    monkeypatch.setattr(cli, "_list_models", fail)
    assert marjax("info") == (code, "", f"marjax: {sentence}\n")


def test_unexpected_errors_keep_their_traceback(marjax, monkeypatch):
    def fail():
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli, "_list_models", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        marjax("info")


def test_cache_directory(monkeypatch, tmp_path):
    assert compilation.cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("MARJAX_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert compilation.cache_dir() == Path("/xdg/marjax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert compilation.cache_dir() == Path("/home/someone/.cache/marjax")


def test_cache_is_switched_on(tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)
    compilation.use_persistent_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache")
    assert jax.config.jax_persistent_cache_min_compile_time_secs < 1.0
    assert not list((tmp_path / "cache").iterdir())


def test_the_users_own_cache_is_respected(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    compilation.use_persistent_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_a_warning(marjax, model, monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MARJAX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    code, out, err = marjax("info", model)
    assert code == 0 and "checksums" in out and jax.config.jax_compilation_cache_dir is None
    assert err.startswith("marjax: warning: compiled programs cannot be kept") and err.count("\n") == 1
    assert "set MARJAX_CACHE_DIR to a folder that can be written to." in err


def test_as_a_process(model):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    for words, code, out, err in (
        (["info", model], 0, f"{model}: 8 x 8 pixels", ""),
        (["sample", "--seed", "x"], 2, "", "marjax: argument --seed: 'x' must be"),
    ):
        command = [sys.executable, "-m", "marjax", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == code and done.stdout.startswith(out) and done.stderr.startswith(err)
        assert bool(done.stdout) == bool(out) and done.stderr.count("\n") == bool(err)


def test_stopwatch_counts_compilation_apart():
    function, watch = jax.jit(lambda x: jnp.sin(x) @ x), Stopwatch()
    x = np.ones((8, 8), np.float32)
    with watch:
        function(x).block_until_ready()
    first = watch.compile_seconds
    assert 0 < first < watch.seconds and watch.work_seconds == watch.seconds - first
    with watch:
        function(x).block_until_ready()
    assert watch.compile_seconds == first
    jax.jit(lambda x: x + 2)(x)  # outside
    assert watch.compile_seconds == first


def test_stopwatch_counts_overlapping_reports_once():
    watch, report = Stopwatch(), jax.monitoring.record_event_time_span
    with watch:
        report("/jax/core/compile/inner", 11.0, 12.0)
        report("/jax/core/compile/inner", 13.0, 14.0)
        report("/jax/core/compile/outer", 10.0, 15.0)
        report("/jax/core/compile/next", 16.0, 17.5)
        report("/jax/elsewhere", 20.0, 30.0)
    assert watch.compile_seconds == 6.5
