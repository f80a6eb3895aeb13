"""The PyTorch half of `bench_vs_torch.py`: a checkout of LTH14/mar or feihongyan1/LazyMAR on the CPU, in a worker.

Nothing of those repositories is here: the user's own checkout is imported and run as it is, eagerly. Two things of
theirs are replaced from outside: `Tensor.cuda`, which they call throughout and which here stays on the CPU, and, to
replay given noise, torch's normal draws and the model's random orders.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from workers import RefusedError

from marjax.config import MARConfig

# Constructor arguments of both repositories' models that are fields of our configuration under the same name.
FIELDS = (
    *("img_size", "vae_stride", "patch_size", "vae_embed_dim", "mlp_ratio", "class_num", "buffer_size"),
    *("encoder_embed_dim", "encoder_depth", "encoder_num_heads"),
    *("decoder_embed_dim", "decoder_depth", "decoder_num_heads"),
    *("diffloss_d", "diffloss_w"),
)


class Side:
    """A model of one of the repositories.

    Args:
        repository: the checkout.
        lazy: whether it is LazyMAR's, with all of its caches, or the original.
        config: the model.
        num_sampling_steps: diffusion steps per token.
    """

    def __init__(self, repository: Path, lazy: bool, config: MARConfig, num_sampling_steps: int):
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        sys.dont_write_bytecode = True  # the checkout stays as it is
        sys.path.insert(0, str(repository))
        try:
            module = importlib.import_module("models.mar_cache" if lazy else "models.mar")
        except ImportError as error:
            raise RefusedError(
                f"{repository} cannot be imported ({error}); its code needs timm, as in pip install timm==0.9.12, "
                "and the torchvision that goes with your torch."
            ) from error
        sizes = {name: getattr(config, name) for name in FIELDS}
        norm = functools.partial(torch.nn.LayerNorm, eps=1e-6)
        extra = {"lazy_mar": True} if lazy else {}
        self._model = module.MAR(**sizes, norm_layer=norm, num_sampling_steps=str(num_sampling_steps), **extra).eval()
        self._diffusion = importlib.import_module("diffusion_cached" if lazy else "diffusion")
        self._extra = {"args": SimpleNamespace(device="cpu", lazy_mar=True)} if lazy else {}

    @torch.no_grad()
    def make_weights(self, path: Path) -> None:
        """Draws weights and writes the state dict; `bench_vs_torch.py` says which weights, and why."""
        torch.manual_seed(0)
        for parameter in self._model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
        predict_noise(self._model.diffloss.net)
        save_file(self._model.state_dict(), path)

    def load(self, path: Path) -> None:
        """Reads a state dict."""
        self._model.load_state_dict(load_file(path), strict=True)

    def replay(
        self, labels: np.ndarray, options: dict, spacing: str, order: np.ndarray, draws: list[np.ndarray]
    ) -> np.ndarray:
        """Float32 latents [B, h, w, c] of given noise.

        Args:
            labels: [B] classes.
            options: of `sample_tokens`.
            spacing: the diffusion steps, in the place of the model's own.
            order: [B, S] image positions, in the order in which this code reads them: the last is generated first.
            draws: per decode step [T + 1, rows, D], rows by image and then by position.
        """
        left = (torch.from_numpy(rows) for step in draws for rows in step)

        def draw(*shape: int) -> torch.Tensor:
            rows = next(left)
            # With guidance each half draws its own noise, but only the first half's sample is ever used.
            rows = rows if len(rows) == shape[0] else torch.cat([rows, rows])
            if rows.shape != shape:
                raise RuntimeError(f"{shape} was drawn where {tuple(rows.shape)} is recorded.")
            return rows

        orders = torch.from_numpy(order)
        diffusion = self._diffusion.create_diffusion(timestep_respacing=spacing, noise_schedule="cosine")
        with (
            mock.patch.multiple(torch, randn=draw, randn_like=lambda x: draw(*x.shape)),
            mock.patch.object(self._model, "sample_orders", lambda *_: orders),
            mock.patch.object(self._model.diffloss, "gen_diffusion", diffusion),
        ):
            latents = self._sample(labels, options, "float32")
        if next(left, None) is not None:
            raise RuntimeError("Fewer draws were made than are recorded.")
        return latents.permute(0, 2, 3, 1).numpy()

    def run(self, labels: np.ndarray, options: dict, dtype: str, seed: int) -> tuple[float, float]:
        """Seconds that a batch takes, and 0, for compilation."""
        torch.manual_seed(seed)
        np.random.seed(seed)  # of the orders
        start = time.monotonic()
        self._sample(labels, options, dtype)
        return time.monotonic() - start, 0.0

    def versions(self) -> dict[str, object]:
        """What a measurement has to name."""
        import timm

        return {
            "torch": torch.__version__,
            "timm": timm.__version__,
            "torch_threads": torch.get_num_threads(),
            "peak_torch_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _sample(self, labels: np.ndarray, options: dict, dtype: str) -> torch.Tensor:
        with torch.no_grad(), _precision(dtype):
            return self._model.sample_tokens(
                bsz=len(labels), labels=torch.from_numpy(labels).long(), **options, **self._extra
            )


def predict_noise(head: torch.nn.Module, share: float = 0.02) -> None:
    """Makes a random head predict noise as a trained one does: of unit data, nearly x itself, plus little that varies.

    Its last LayerNorm would lose the length of x. So x is a small `share` of what goes through it and the rest is
    constant, each in directions of its own, of which the last layer reads those of x. What time and condition add is
    smaller still.
    """
    out, (width, dim) = head.final_layer.linear, head.input_proj.weight.shape
    for block in (*head.res_blocks, head.final_layer):
        for parameter in block.adaLN_modulation.parameters():
            parameter.normal_(std=0.1 * share)
    # Orthonormal: that of the mean, which the LayerNorm takes away, a constant, and one for each channel.
    basis, _ = torch.linalg.qr(torch.cat([torch.ones(width, 1), torch.randn(width, 1 + dim)], dim=1))
    constant, channels = basis[:, 1] * math.sqrt(width), basis[:, 2:]
    head.input_proj.bias.copy_(constant)
    head.input_proj.weight.copy_(channels * math.sqrt(width) * share)
    out.weight[:dim] = channels.T / (math.sqrt(width) * share)
    out.bias[:dim] = 0


@contextlib.contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """Both repositories sample under autocast on GPUs; here it is bfloat16's."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        yield
