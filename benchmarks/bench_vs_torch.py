"""marjax against the PyTorch code it reimplements: seconds per image, and whether both make the same latents.

    git clone https://github.com/LTH14/mar
    git clone https://github.com/feihongyan1/LazyMAR
    pip install torch timm==0.9.12                # and the torchvision that goes with that torch
    python benchmarks/bench_vs_torch.py --mar mar --lazymar LazyMAR --quick       # a tiny model, two minutes
    python benchmarks/bench_vs_torch.py --mar mar --lazymar LazyMAR --no-warm-up  # MAR-B, 64 x 100 steps
    python benchmarks/bench_vs_torch.py --mar mar --accel none --check-only --num-iter 4 --num-sampling-steps 10

All on the CPU, on all of its cores. The two checkouts (each needed only for its --accel) are imported and run as they
are, eagerly: nothing of them is in this repository. bfloat16 is autocast on their side, the compute dtype on ours.
Every subject has a process of its own, and they take turns. A round runs each pair once, torch and marjax directly
after one another, first the one and in the next round first the other; ratios are those of runs of one round. Each
side draws its own orders and noise. Compilation is timed apart. The autoencoder is left out.

Weights are random: the PyTorch model's own initialisation and normal noise of 0.02 on everything, with a head that
predicts roughly the noise in its input and a little that varies with time and condition (`torch_side.predict_noise`).
They reach marjax through `marjax.convert.from_state_dict`. Time does not depend on them.

Latents are compared in float32 with the same orders and noise on both sides, and diffusion steps that leave the last
timesteps out: there, sampling multiplies whatever a random head gets wrong by 316 (100 steps) or thousands (few), and
what the later steps do would drown in that. Without them, and with that head, latents are of order 1. What is printed
is how far any number of marjax's latents is from PyTorch's, in units of the latents' root mean square, which has to
stay below 0.001. For scale: with --quick a temperature of 0.99 in place of 1 makes 0.04; and the distance of LazyMAR's
latents from the exact model's is printed too (norm of the difference over norm).

LazyMAR's code is written for guidance, 64 steps, 64 buffers, at most 256 tokens, and encoders as deep as the decoder.
The last line of the output is one JSON document; the exit code is 1 if latents differ.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from timing import Timing, ratios, spread
from tqdm import tqdm
from workers import RefusedError, Worker

import marjax
from marjax import MARConfig, arguments
from marjax.accel import resolve
from marjax.accel.head import PUBLISHED_DEPTH, PUBLISHED_PERIOD, PUBLISHED_SKIPPED
from marjax.accel.lazymar import PUBLISHED_STEPS
from marjax.cli_options import positive
from marjax.noise_schedule import noise_schedule
from marjax.schedule import step_counts
from marjax.types import DTYPES

QUICK = MARConfig(
    encoder_embed_dim=64,
    encoder_depth=6,
    encoder_num_heads=4,
    decoder_embed_dim=64,
    decoder_depth=6,
    decoder_num_heads=4,
    class_num=10,
    diffloss_w=64,
    cfg=3.0,
)
QUICK_SAMPLING_STEPS = 10
TOLERANCE = 1e-3  # of latents, in units of their root mean square
# Accelerations that have a counterpart: the option that names its checkout, and files by which one is recognised.
REPOSITORIES = {
    "none": ("mar", ("models/mar.py", "models/diffloss.py", "diffusion/respace.py")),
    "lazymar": ("lazymar", ("models/mar_cache.py", "models/diffloss_cached.py", "diffusion_cached/respace.py")),
}
# Built into LazyMAR's code.
LAZY_BUFFERS, LAZY_TOKENS = 64, 256


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mar", type=Path, help="checkout of LTH14/mar")
    parser.add_argument("--lazymar", type=Path, help="checkout of feihongyan1/LazyMAR")
    parser.add_argument("--model", default="mar_base", help="a preset; default: mar_base")
    parser.add_argument("--accel", nargs="+", choices=REPOSITORIES, default=list(REPOSITORIES))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--batch-size", type=positive, default=1)
    parser.add_argument("--num-iter", type=positive, default=64)
    parser.add_argument("--num-sampling-steps", type=positive, default=100)
    parser.add_argument("--cfg", type=float, help="default: the model's")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--no-warm-up", action="store_true", help="time the first runs too, less their compilation")
    stages = parser.add_mutually_exclusive_group()
    stages.add_argument("--check-only", action="store_true", help="compare latents and time nothing")
    stages.add_argument("--no-check", action="store_true", help="time, and compare no latents")
    parser.add_argument(
        "--quick", action="store_true", help=f"a tiny model, {QUICK_SAMPLING_STEPS} diffusion steps, one round"
    )
    options = parser.parse_args()
    if options.quick:
        options.model, options.num_sampling_steps, options.rounds = "quick", QUICK_SAMPLING_STEPS, 1
    accels, dtypes = list(dict.fromkeys(options.accel)), list(dict.fromkeys(options.dtype))
    try:
        config = QUICK if options.quick else marjax.get_preset(options.model)
        cfg = float(config.cfg if options.cfg is None else options.cfg)
        checkouts = {accel: checkout(options, accel) for accel in accels}
        check_options(config, accels, cfg, options.num_iter, options.num_sampling_steps)
        with contextlib.ExitStack() as stack:
            subjects = Subjects(stack, config, checkouts, options, cfg)
            checks = {} if options.no_check else subjects.check()
            report_checks(checks)
            timings = {} if options.check_only else subjects.measure(dtypes, options.rounds, not options.no_warm_up)
            versions = subjects.versions()
    except (RefusedError, ValueError) as error:
        parser.error(str(error))
    results = report_times(timings, options.batch_size)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    commits = {accel: commit(path) for accel, path in checkouts.items()}
    document = {**settings, "cfg": cfg, "commits": commits, **versions, "checks": checks, "results": results}
    print(json.dumps(document))
    if wrong := [accel for accel, check in checks.items() if not check["largest"] < TOLERANCE]:
        sys.exit(f"bench_vs_torch: latents differ by more than {TOLERANCE} of their rms: {', '.join(wrong)}")


def checkout(options: argparse.Namespace, accel: str) -> Path:
    """The directory that an acceleration's PyTorch code is in.

    Raises:
        ValueError: if it was not given, or does not look like it; or if packages are missing that it needs.
    """
    name, files = REPOSITORIES[accel]
    path = getattr(options, name)
    if path is None:
        raise ValueError(f"--accel {accel} needs --{name}, a checkout of its PyTorch code.")
    if not path.is_dir():
        raise ValueError(f"--{name} {path} is no directory.")
    if missing := [file for file in files if not (path / file).is_file()]:
        raise ValueError(f"--{name} {path} is no checkout of that repository: there is no {missing[0]} in it.")
    if missing := [package for package in ("torch", "timm") if importlib.util.find_spec(package) is None]:
        raise ValueError(f"The PyTorch code needs {' and '.join(missing)}: pip install torch torchvision timm==0.9.12")
    return path.resolve()


def check_options(config: MARConfig, accels: list[str], cfg: float, num_iter: int, num_sampling_steps: int) -> None:
    """Refuses what one of the sides cannot do.

    Raises:
        ValueError: with the reason.
    """
    arguments.check_cfg(config, cfg, True)
    arguments.check_num_iter(config, num_iter)
    noise_schedule(str(num_sampling_steps))
    if config.clip_denoised:
        raise ValueError("This model clips what its head predicts, which the PyTorch code never does.")
    if "lazymar" not in accels:
        return
    limits = {
        f"--num-iter {PUBLISHED_STEPS}, by which its table of kept tokens is read": num_iter == PUBLISHED_STEPS,
        "guidance, so --cfg other than 1": cfg != 1.0,
        f"buffer_size={LAZY_BUFFERS}": config.buffer_size == LAZY_BUFFERS,
        f"at most {LAZY_TOKENS} tokens": config.seq_len <= LAZY_TOKENS,
        "encoder_depth equal to decoder_depth": config.encoder_depth == config.decoder_depth,
    }
    if broken := [limit for limit, holds in limits.items() if not holds]:
        raise ValueError(f"LazyMAR's code is written for {'; for '.join(broken)}. --accel none leaves it out.")
    resolve(ours(config, "lazymar")).check(config)


def ours(config: MARConfig, accel: str) -> str:
    """The acceleration that does what the PyTorch code does, which caches shallow heads too."""
    if accel == "none" or config.diffloss_d >= PUBLISHED_DEPTH:
        return accel
    skipped = "+".join(str(block) for block in PUBLISHED_SKIPPED if block < config.diffloss_d) or "none"
    return f"{accel}:head_period={PUBLISHED_PERIOD},head_skipped={skipped}"


def torch_draws(noise: np.ndarray, order: np.ndarray, num_iter: int) -> Iterator[np.ndarray]:
    """Noise [B, S, T + 1, D] in generation order -> per decode step [T + 1, rows, D], as the PyTorch code draws it.

    Its rows are those of the tokens that the step predicts, by image and then by position.
    """
    known, _ = step_counts(order.shape[1], num_iter)
    for start, stop in itertools.pairwise(known):
        ranks = np.argsort(order[:, start:stop], axis=1)
        rows = np.take_along_axis(noise[:, start:stop], ranks[..., None, None], axis=1)
        yield np.ascontiguousarray(rows.transpose(2, 0, 1, 3)).reshape(rows.shape[2], -1, rows.shape[3])


class Subjects:
    """The processes that are compared: a PyTorch one for each acceleration, and marjax.

    Args:
        stack: what ends them.
        config: the model.
        checkouts: acceleration -> PyTorch code.
        options: the command line's.
        cfg: guidance scale.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        config: MARConfig,
        checkouts: dict[str, Path],
        options: argparse.Namespace,
        cfg: float,
    ):
        self._config, self._num_steps, self._num_iter = config, options.num_sampling_steps, options.num_iter
        self._labels = np.arange(options.batch_size) % config.class_num
        self._options = {
            "num_iter": options.num_iter,
            "cfg": cfg,
            "cfg_schedule": config.cfg_schedule,
            "temperature": config.temperature,
        }
        weights = Path(stack.enter_context(tempfile.TemporaryDirectory()), "weights.safetensors")
        self._torch: dict[str, Worker] = {}
        for accel, path in checkouts.items():
            arguments = (path, accel == "lazymar", config, options.num_sampling_steps)
            worker = self._torch[accel] = stack.enter_context(Worker("torch_side", *arguments))
            worker.call("load" if weights.exists() else "make_weights", weights)
        self._marjax = stack.enter_context(Worker("marjax_side", config, weights))

    def check(self) -> dict[str, dict[str, float]]:
        """How far marjax's latents are from PyTorch's, with the same orders and noise in float32, by acceleration."""
        rng, seq_len, batch = np.random.default_rng(0), self._config.seq_len, len(self._labels)
        order = rng.permuted(np.tile(np.arange(seq_len), (batch, 1)), axis=1)
        noise = rng.standard_normal((batch, seq_len, self._num_steps + 1, self._config.token_dim), np.float32)
        draws = list(torch_draws(noise, order, self._num_iter))
        spacing = ",".join(["1"] * self._num_steps)  # the first timestep of each of so many sections
        checks, latents = {}, {}
        for accel, worker in self._torch.items():
            # The PyTorch code generates from the end of its order to the start.
            backwards = np.ascontiguousarray(order[:, ::-1])
            expected = worker.call("replay", self._labels, self._options, spacing, backwards, draws)
            options = {**self._marjax_options(accel), "num_sampling_steps": spacing}
            actual = self._marjax.call("replay", self._labels, options, order, noise)
            rms = float(np.sqrt(np.mean(np.square(expected, dtype=np.float64))))
            error = actual.astype(np.float64) - expected
            checks[accel] = {
                "rms": rms,
                "largest": float(np.abs(error).max() / rms),
                "relative_norm": float(np.linalg.norm(error) / np.linalg.norm(expected)),
            }
            latents[accel] = expected
        if len(latents) == 2:
            exact, lazy = latents["none"], latents["lazymar"]
            checks["lazymar"]["from_exact"] = float(np.linalg.norm(lazy - exact) / np.linalg.norm(exact))
        return checks

    def measure(self, dtypes: list[str], rounds: int, warm_up: bool) -> dict[str, dict[str, Timing]]:
        """Times of "torch" and "marjax", by acceleration and dtype; run i of each had seed i."""
        timings = {
            f"{accel} {dtype}": {"torch": Timing(), "marjax": Timing()} for dtype in dtypes for accel in self._torch
        }
        seeds = range(0 if warm_up else 1, rounds + 1)
        with tqdm(total=2 * len(seeds) * len(timings), disable=None) as bar:
            for seed, (name, pair) in itertools.product(seeds, timings.items()):
                accel, dtype = name.split()
                runs = {"torch": self._run_torch(accel, dtype), "marjax": self._run_marjax(accel, dtype)}
                for side in sorted(runs, reverse=seed % 2 == 1):
                    bar.set_description_str(f"{side} {name}")
                    seconds, compiling = runs[side](seed)
                    bar.update()
                    if seed == seeds[0]:
                        pair[side].compile_seconds = compiling
                    elif compiling > 0.01 * seconds:
                        raise RuntimeError(f"{side} {name}: run {seed} spent {compiling:.2f} s on compilation.")
                    if seed > 0:
                        pair[side].seconds.append(seconds - compiling)
        return timings

    def versions(self) -> dict[str, object]:
        """What a measurement has to name."""
        return {**next(iter(self._torch.values())).call("versions"), **self._marjax.call("versions")}

    def _run_torch(self, accel: str, dtype: str) -> Callable[[int], tuple[float, float]]:
        return lambda seed: self._torch[accel].call("run", self._labels, self._options, dtype, seed)

    def _run_marjax(self, accel: str, dtype: str) -> Callable[[int], tuple[float, float]]:
        return lambda seed: self._marjax.call("run", self._labels, self._marjax_options(accel), dtype, seed)

    def _marjax_options(self, accel: str) -> dict[str, object]:
        return {**self._options, "num_sampling_steps": self._num_steps, "accel": ours(self._config, accel)}


def report_checks(checks: dict[str, dict[str, float]]) -> None:
    """Prints how far the latents are apart."""
    for accel, check in checks.items():
        print(f"{accel}: latents differ by at most {check['largest']:.1e} of their rms, {check['rms']:.3g}", end="")
        print(f"; LazyMAR from exact: {check['from_exact']:.2g}" if "from_exact" in check else "")


def report_times(timings: dict[str, dict[str, Timing]], batch_size: int) -> dict[str, dict[str, object]]:
    """Prints the table of times, if there are any; returns them for the JSON document."""
    results = {}
    if timings:
        print(f"{'s/image':20s} {'PyTorch':>9s} {'marjax':>9s} {'compile':>8s}  marjax / PyTorch")
    for name, pair in timings.items():
        shares = ratios(pair, "torch")["marjax"]
        each = {side: timing.median / batch_size for side, timing in pair.items()}
        compiling = pair["marjax"].compile_seconds
        print(f"{name:20s} {each['torch']:9.3f} {each['marjax']:9.3f} {compiling:7.1f}s  {spread(shares)}")
        results[name] = {
            **{f"{side}_seconds": timing.seconds for side, timing in pair.items()},
            **{f"{side}_seconds_per_image": seconds for side, seconds in each.items()},
            "compile_seconds": compiling,
            "ratios": shares,
        }
    return results


def commit(path: Path) -> str | None:
    """The commit that a directory is a checkout of; None where git does not tell, as for a copy without a history."""
    if not (path / ".git").exists() or shutil.which("git") is None:
        return None
    done = subprocess.run(["git", "-C", path, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()
