"""docs/from_pytorch.md: its commands are understood, and it leaves out no option of the reference's scripts."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest
from cli_helpers import ROOT

from marjax import cli
from marjax.cli_options import dashed, with_options
from marjax.config import get_preset
from marjax.train import TrainConfig

TEXT = (ROOT / "docs" / "from_pytorch.md").read_text(encoding="utf-8")
REFERENCE_OPTIONS = """
    batch_size epochs model img_size vae_path vae_embed_dim vae_stride patch_size num_iter num_images cfg cfg_schedule
    label_drop_prob eval_freq save_last_freq online_eval evaluate eval_bsz weight_decay grad_checkpointing lr blr min_lr
    lr_schedule warmup_epochs ema_rate mask_ratio_min grad_clip attn_dropout proj_dropout buffer_size diffloss_d
    diffloss_w num_sampling_steps diffusion_batch_mul temperature data_path class_num output_dir log_dir device seed
    resume start_epoch num_workers pin_mem no_pin_mem world_size local_rank dist_on_itp dist_url use_cached cached_path
"""


def commands():
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL))
    lines = re.sub(r"^#.*\n", "", blocks, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [shlex.split(re.sub(r"\$\{(\w+)\}", r"\1", line)) for line in lines if line.strip()]


def parse(words):
    assert words[0] == "marjax"
    return cli._parser().parse_args(dashed(words[1:]), argparse.Namespace())


def test_commands_are_understood():
    assert [words[1] for words in commands()] == ["encode", "train", "train", "sample"]
    for words in commands():
        parse(words)


def test_the_published_recipe_is_the_default():
    """The long command says what the short one leaves to defaults."""
    long, short = (parse(words) for words in commands() if words[1] == "train")
    for start in (TrainConfig(), get_preset(long.preset)):
        assert with_options(start, long) == with_options(start, short)
    assert with_options(TrainConfig(), long) == TrainConfig(flip=True)


@pytest.mark.parametrize("name", REFERENCE_OPTIONS.split())
def test_every_option_has_its_row(name):
    rows = [line for line in TEXT.splitlines() if line.startswith("|")]
    assert any(re.search(rf"`[^`]*--{name}\b[^`]*`", line.split("|")[1]) for line in rows), name
