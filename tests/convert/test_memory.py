"""Converting takes at most twice the memory of the file, over what converting a tiny file takes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from convert_helpers import HEADS, ROOT, SMALL, SMALL_ARGS, random_state, shapes_of, small_checkpoint, write_pth
from safetensors.numpy import save_file

from marjax.config import MARConfig

pytestmark = [pytest.mark.slow, pytest.mark.torch]

# 40M parameters, of which random values compress badly.
MEDIUM = MARConfig(
    **{"img_size": 128, "class_num": 100, "buffer_size": 16, "diffloss_d": 3, "diffloss_w": 512},
    **{"encoder_embed_dim": 512, "encoder_depth": 6, "encoder_num_heads": 8},
    **{"decoder_embed_dim": 512, "decoder_depth": 6, "decoder_num_heads": 8},
)
OPTIONS = ("--num-heads", "8", "--patch-size", "1", "--vae-stride", "16")

SCRIPT = """
import sys
from marjax import cli
code = cli.main(["convert", *sys.argv[1:]])
# Not ru_maxrss, which a child inherits from its parent.
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])
sys.exit(code)
"""


def peak_bytes(*words) -> int:
    """The most memory that converting takes, pages of mapped files included."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SCRIPT, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return 1024 * int(done.stdout.split()[-1])


def check(file, small, *more) -> None:
    options = ("--encoder-num-heads", HEADS["encoder_num_heads"], "--decoder-num-heads", HEADS["decoder_num_heads"])
    sizes = ("--patch-size", SMALL.patch_size, "--vae-stride", SMALL.vae_stride)
    base = peak_bytes(small, "small", *options, *sizes)
    extra = peak_bytes(file, "medium", *OPTIONS, *more) - base
    size = file.stat().st_size
    print(f"{file.name}: {size / 2**20:.0f} MiB on disk, {extra / 2**20:.0f} MiB more memory: {extra / size:.2f} x")
    assert extra <= 2 * size


@pytest.fixture(scope="module")
def state():
    return random_state(shapes_of(MEDIUM))


def test_safetensors(tmp_path, state):
    small, file = tmp_path / "small.safetensors", tmp_path / "medium.safetensors"
    save_file(random_state(shapes_of(SMALL)), small)
    save_file(state, file)
    check(file, small)


def test_pth(tmp_path, state):
    content = {"model": state, "model_ema": {key: -array for key, array in state.items()}, "epoch": 1}
    small = write_pth(tmp_path / "small.pth", small_checkpoint(**SMALL_ARGS))
    check(write_pth(tmp_path / "medium.pth", content), small)
