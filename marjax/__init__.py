"""marjax: masked autoregressive image generation (MAR) in JAX, made fast by training-free caching."""

from marjax.accel import Accel
from marjax.checkpoint import CheckpointError, load, save, save_file
from marjax.config import PRESETS, MARConfig, VAEConfig, get_preset
from marjax.sample import sample, sample_latents
from marjax.types import MARParams
from marjax.version import __version__

__all__ = [
    "PRESETS",
    "Accel",
    "CheckpointError",
    "MARConfig",
    "MARParams",
    "VAEConfig",
    "__version__",
    "get_preset",
    "load",
    "sample",
    "sample_latents",
    "save",
    "save_file",
]
