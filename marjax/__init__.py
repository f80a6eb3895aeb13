"""marjax: masked autoregressive image generation (MAR) in JAX."""

from marjax import convert, metrics
from marjax.accel import Accel, ActiveTokens, ConditionCache, HeadCache, LazyTokens, Refresh
from marjax.accel.trace import Trace
from marjax.checkpoint import CheckpointError, load, save, save_file
from marjax.config import PRESETS, MARConfig, VAEConfig, get_preset
from marjax.inpaint import inpaint, inpaint_latents
from marjax.objective import Objective
from marjax.optimizer import OptimizerConfig
from marjax.sample import sample, sample_latents
from marjax.train import NonFiniteLossError, TrainConfig, train
from marjax.types import MARParams
from marjax.version import __version__

__all__ = [
    "PRESETS",
    "Accel",
    "ActiveTokens",
    "CheckpointError",
    "ConditionCache",
    "HeadCache",
    "LazyTokens",
    "MARConfig",
    "MARParams",
    "NonFiniteLossError",
    "Objective",
    "OptimizerConfig",
    "Refresh",
    "Trace",
    "TrainConfig",
    "VAEConfig",
    "__version__",
    "convert",
    "get_preset",
    "inpaint",
    "inpaint_latents",
    "load",
    "metrics",
    "sample",
    "sample_latents",
    "save",
    "save_file",
    "train",
]
