"""`marjax train` in-process: options, runs, resumption, and how it refuses bad input."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from cli_helpers import FAST, FAST_OPTIONS, NAMES, SIZES, TINY, random_model, read
from helpers import write_idx
from PIL import Image

from marjax import cli_train
from marjax.checkpoint import describe, load, save
from marjax.config import FASHION_MNIST_CLASSES, IMAGENET_CLASSES
from marjax.images import to_uint8
from marjax.sample import sample


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
TINY_OPTIONS += ["--cfg=1", "--temperature=1"]
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

    assert "(different: train.optimizer.lr)" in refused(*command, "--epochs", 1, "--lr", 0.1)
    # The run's directory is a model for the other commands.
    for words, weights in (((), "ema"), (("--weights", "raw"), "raw")):
        code, out, _ = marjax("info", "run", *words)
        assert code == 0 and out.startswith(f"run/{weights}: 8 x 8 pixels") and f"  weights: {weights}\n" in out
    assert marjax("sample", "--model", "run", "--weights", "raw", "--seed", 1, *FAST)[0] == 0
    expected = to_uint8(sample(load("run/raw"), jax.random.key(1), [0, 1, 2], **FAST_OPTIONS))
    assert np.array_equal(read("grid.png")[4:92:11, 4:92:11], expected[0, ..., 0])


def test_train_passes_its_options_on(marjax, data, trained):
    words = shlex.split(
        "--epochs 2 --batch_size 4 --accum_iter 2 --seed 3 --ema-rate 0.5 --dtype float32 --no-flip --log-every 7 "
        "--save-every 8 "
        "--mask-ratio-min 0.5 --label-drop-prob 0.2 --attn-dropout 0.3 --proj_dropout 0.4 --diffusion-batch-mul 2 "
        "--remat --unroll 3 --mask-ratio-std 0.5 --optimizer muon --blr 1e-3 --lr 2e-3 --min-lr 1e-5 "
        "--lr-schedule cosine --warmup-epochs 0.5 --weight-decay 0.1 --beta1 0.8 --beta2 0.9 --eps 1e-6 "
        "--muon-momentum 0.7 --muon-rms 0.3 --grad-clip 1 --no-clip-denoised"
    )
    code, _, err = marjax("train", "--data", data, "--out", "run", *TINY_OPTIONS, *words)
    assert (code, err) == (0, "step 2/6: loss 0.5000, 10 images/s, 0:01:30 left\n")
    (call,) = trained
    assert call["config"] == dataclasses.replace(TINY, clip_denoised=False)
    assert call["init_from"] is None
    flat = dataclasses.asdict(call["recipe"])
    objective, optimizer = flat.pop("objective"), flat.pop("optimizer")
    assert flat == {
        **{"epochs": 2.0, "batch_size": 4, "seed": 3, "ema_rate": 0.5, "dtype": "float32", "flip": False},
        **{"log_every": 7, "save_every": 8, "accum_iter": 2},
    }
    assert objective == {
        **{"mask_ratio_min": 0.5, "label_drop_prob": 0.2, "attn_dropout": 0.3, "proj_dropout": 0.4},
        **{"mask_ratio_std": 0.5, "diffusion_batch_mul": 2, "remat": True, "unroll": 3},
    }
    assert optimizer == {
        **{"optimizer": "muon", "blr": 1e-3, "lr": 2e-3, "min_lr": 1e-5, "lr_schedule": "cosine"},
        **{"warmup_epochs": 0.5, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9, "grad_clip": 1.0},
        **{"eps": 1e-6, "muon_momentum": 0.7, "muon_rms": 0.3},
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


def test_train_knows_the_directories_of_imagenet(marjax, trained):
    ends, inner = ("n01440764", "n15075141"), [f"n{number:08}" for number in range(2_000_000, 2_000_998)]
    for name in (*ends, *inner):
        Path("imagenet/train", name).mkdir(parents=True)
        Path("imagenet/train", name, "0.png").touch()
    Image.new("L", (8, 8)).save(Path("imagenet/train", ends[0], "0.png"))
    command = ("train", "--data", "imagenet", "--out", "run", "--img-size", 8)
    assert marjax(*command, "--class-num", 1000)[0] == 0
    Path("imagenet/train", ends[1]).rename("imagenet/train/n99999999")
    assert marjax(*command, "--class-num", 1000)[0] == 0
    known, other = (call["config"].class_names for call in trained)
    assert known == IMAGENET_CLASSES and other == (ends[0], *inner, "n99999999")


def test_train_names_the_classes_of_idx_files_only_on_demand(marjax, tmp_path, trained):
    """Ten classes of 28 x 28 pixels may be Fashion-MNIST's or not."""
    write_idx(tmp_path / "digits", "train", np.zeros((20, 28, 28)), np.arange(20) % 10)
    for words, named in (((), False), (("--preset", "fashion_mnist"), True)):
        assert marjax("train", "--data", "digits", "--out", "run", *words)[0] == 0
        assert trained.pop()["config"].class_names == (FASHION_MNIST_CLASSES if named else ())


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
        ("--accum-iter 3", "batch_size=4 must be a multiple of accum_iter=3."),
        ("--vae-path fashion_mnist", "fashion_mnist carries no autoencoder; give a checkpoint that does."),
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
