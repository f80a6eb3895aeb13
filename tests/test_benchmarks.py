"""The benchmarks run, and what they write can be read: small numbers, real code."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import write_idx

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plots]'")
pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def idx_data(tmp_path):
    with np.load(Path(__file__).parent / "data" / "fashion_mnist_test64.npz") as file:
        return write_idx(tmp_path / "data", "t10k", file["images"][..., 0], file["labels"])


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a benchmark's main function; returns what it prints."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def run(name: str, *options: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
        importlib.import_module(name).main()
        return capsys.readouterr().out

    return run


def record(out: str) -> dict:
    """The JSON document at the end of a benchmark's output."""
    return json.loads(out.splitlines()[-1])


def test_bench_sample(run):
    options = ("--num-iter", 6, "--num-sampling-steps", 2, "--batch-size", 2, "--repeats", 2)
    out = run("bench_sample", *options, "--accel", "none", "marche", "--dtype", "bfloat16", "float32")
    results = record(out)["results"]
    assert list(results) == ["none bfloat16", "marche bfloat16", "none float32", "marche float32"]
    exact, cached = (results[name] for name in ("none bfloat16", "marche bfloat16"))
    assert cached["flops_per_image"] < exact["flops_per_image"] == results["none float32"]["flops_per_image"]
    assert len(cached["seconds"]) == 2 and cached["compile_seconds"] > 0 and exact["ratios"] == [1.0, 1.0]
    assert "operation_seconds" not in cached
    assert cached["ratios"] == [a / b for a, b in zip(cached["seconds"], exact["seconds"], strict=True)]


def test_breakdown(run):
    """Of a run with twice the diffusion steps, the head takes more, and the rest does not."""
    options = ("--num-iter", 4, "--batch-size", 2, "--repeats", 1, "--accel", "lazymar", "--breakdown", "--vae")
    few, many = (record(run("bench_sample", *options, "--num-sampling-steps", steps))["results"] for steps in (10, 100))
    for name, result in few.items():
        before, after = result["operation_seconds"], many[name]["operation_seconds"]
        assert before["encoder"] > 0 and before["decoder"] > 0
        assert after["head"] > 3 * before["head"] > 0
        assert before["other"] < 0.2 * sum(before.values())


def test_the_other_benchmarks(run, tmp_path):
    """Each runs with `--quick`, prints its table, and writes what its last line says."""
    head = record(run("bench_head", "--quick", "--model", "fashion_mnist", "--out", tmp_path))
    assert [result["rows"] for result in head["results"]] == [2, 32]
    assert list(head["results"][0]["ms_per_step"]) == ["prepared", "step by step", "cached"]
    attention = record(run("bench_attention", "--quick", "--model", "fashion_mnist"))
    assert [name.partition(", ")[2] for name in attention["results"]] == [
        *("in turn", "at once", "jax.nn"),
        *("two-path", "renewed cache"),
    ]
    compiled = record(run("bench_compile", "--quick", "--accel", "none"))["results"]["none"]
    assert compiled["second"]["compile_seconds"] < compiled["first"]["compile_seconds"]
    assert compiled["first"]["argument_bytes"] > 6e6 and compiled["first"]["temporary_bytes"] > 1e6
    scaling = record(run("bench_scaling", "--quick", "--out", tmp_path))["results"]
    assert [point[0] for point in scaling["batch size"]["none"]] == [1, 2]
    for name in ("bench_head", "bench_scaling"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_fidelity(run, tmp_path, idx_data):
    out, options = tmp_path / "out", ("--num-iter", 3, "--num-paired", 8, "--batch-size", 4, "--repeats", 1)
    options = ("--data", idx_data, "--work", tmp_path / "work", "--out", out, *options, "--accel", "none", "marche")
    run("fidelity", *options)
    exact, cached = json.loads((out / "fidelity.json").read_text())["rows"]
    assert exact["latent_error"] == 0 < cached["latent_error"] and cached["count"] == 8
    assert cached["flops"] < exact["flops"] and exact["ratios"] == [1.0]
    assert "| marche | `marche` | 3 |" in (out / "fidelity.md").read_text()
    assert (out / "fidelity.png").stat().st_size > 1000
    images = {file: file.stat().st_mtime_ns for file in (tmp_path / "work").glob("*.npz")}
    assert len(images) == 2
    run("fidelity", *options, "--only", "images")  # nothing is missing
    assert images == {file: file.stat().st_mtime_ns for file in images}
    run("fidelity", *options, "--num-paired", 12)  # the first 8 are kept
    more = json.loads((out / "fidelity.json").read_text())["rows"]
    assert [row["count"] for row in more] == [12, 12] and more[0]["latent_error"] == 0
    assert 0.3 < more[1]["latent_error"] / cached["latent_error"] < 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fidelity", ("--data", "nowhere"), "nowhere"),
        ("fidelity", ("--data", "DATA", "--accel", "none", "marche:bugdet=20"), "unknown option 'bugdet'"),
        ("fidelity", ("--data", "DATA", "--repeats", "0"), "must be a positive integer"),
        ("fidelity", ("--data", "DATA", "--work", "WORK", "--dtype", "float32"), "holds images of"),
        ("bench_sample", ("--accel", "none", "marchee"), "Unknown accel 'marchee'"),
        ("bench_sample", ("--model", "mar_bas"), "mar_bas"),
        ("redundancy", ("--num-iter", "1"), "give at least 2"),
        ("bench_attention", ("--model", "fashion_mnist", "--active", "205"), "must not exceed the model's 204"),
        ("bench_scaling", ("--accel", "marchee"), "Unknown accel 'marchee'"),
        ("bench_vs_torch", (), "--accel none needs --mar, a checkout"),
        ("bench_vs_torch", ("--mar", "nowhere"), "--mar nowhere is no directory"),
        ("bench_vs_torch", ("--mar", "WORK"), "there is no models/mar.py in it"),
        ("bench_vs_torch", ("--model", "mar_bas"), "mar_bas"),
    ],
)
def test_bad_options_are_refused_before_any_work(name, options, message, run, idx_data, tmp_path, capsys):
    work = tmp_path / "work"
    work.mkdir()
    (work / "settings.json").write_text("{}")
    known = {"DATA": str(idx_data), "WORK": str(work)}
    with pytest.raises(SystemExit, match="2"):
        run(name, *(known.get(option, option) for option in options))
    assert message in capsys.readouterr().err


def test_redundancy(run, tmp_path):
    run("redundancy", "--num-images", 2, "--num-iter", 4, "--out", tmp_path)
    written = json.loads((tmp_path / "redundancy.json").read_text())
    measured = {name: np.array(values, float) for name, values in written["measured"].items()}
    now, last, earlier, masked, buffers = range(5)
    assert written["groups"][masked] == "still masked" and measured["k"].shape == (3, 6, 5)
    # What the decoder is given for a masked token never changes; for one that was just decoded it does.
    np.testing.assert_allclose(measured["input"][:, now], 1, atol=1e-5)
    np.testing.assert_allclose(measured["input"][:2, masked], 1, atol=1e-5)
    assert np.isnan(measured["input"][2, masked]) and (measured["input"][:, last] < 0.9).all()
    assert (measured["input"][1:, earlier] > measured["input"][1:, last]).all()
    assert np.isfinite(measured["v"][..., buffers]).all() and (measured["residual"] > 0).all()
    assert len(list(tmp_path.glob("*.png"))) == 3


@pytest.fixture
def checkouts():
    """Options that name the PyTorch repositories, which this suite cannot bring along."""
    # Found, not imported: that is for a process of its own.
    if missing := [name for name in ("torch", "timm") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {' and '.join(missing)}: pip install torch torchvision timm==0.9.12")
    names = {"--mar": "MARJAX_MAR_DIR", "--lazymar": "MARJAX_LAZYMAR_DIR"}
    if missing := [name for name in names.values() if name not in os.environ]:
        pytest.skip(f"needs checkouts of LTH14/mar and feihongyan1/LazyMAR; set {' and '.join(missing)}")
    return [word for option, name in names.items() for word in (option, os.environ[name])]


@pytest.mark.torch
def test_bench_vs_torch(run, checkouts):
    record = json.loads(run("bench_vs_torch", *checkouts, "--quick", "--no-warm-up").splitlines()[-1])
    assert list(record["results"]) == [f"{a} {d}" for d in ("float32", "bfloat16") for a in ("none", "lazymar")]
    for row in record["results"].values():
        assert row["ratios"] == [a / b for a, b in zip(row["marjax_seconds"], row["torch_seconds"], strict=True)]
        assert len(row["ratios"]) == 1 and row["compile_seconds"] > 0
    exact, lazy = record["checks"]["none"], record["checks"]["lazymar"]
    assert max(exact["largest"], lazy["largest"]) < 1e-3 < lazy["from_exact"]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-iter", "32"), "LazyMAR's code is written for --num-iter 64, by which its table"),
        (("--cfg", "1", "--model", "tiny"), "guidance, so --cfg other than 1; for buffer_size=64"),
        (("--model", "fashion_mnist"), "clips what its head predicts"),
        (("--cfg", "-1"), "cfg"),
        (("--num-sampling-steps", "1"), "num_sampling_steps"),
    ],
)
def test_bench_vs_torch_refuses_what_one_side_cannot_do(options, message, run, checkouts, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("bench_vs_torch", *checkouts, *options)
    assert message in capsys.readouterr().err
