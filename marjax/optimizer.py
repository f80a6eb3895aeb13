"""The optimizer: learning-rate schedule, weight-decay groups, clipping (reference `main_mar.py`, `util/lr_sched.py`).

AdamW with the reference's constants is the default. Muon (orthogonalised momentum for the block matrices, AdamW for
the rest) is offered because it trains small models with fewer images.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from marjax.types import Array, PyTree

LR_SCHEDULES = ("constant", "cosine")
OPTIMIZERS = ("adamw", "muon")
STACKS = ("encoder_blocks", "decoder_blocks", "res_blocks")  # depth-stacked subtrees: leaves have a layer axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Constants of the optimizer; the defaults are the reference's published recipe.

    Attributes:
        optimizer: "adamw" or "muon".
        blr: base learning rate per 256 images of batch; used when `lr` is None.
        lr: absolute learning rate, or None.
        min_lr: where the cosine schedule ends.
        lr_schedule: "constant" or "cosine", after the linear warm-up from 0.
        warmup_epochs: length of the warm-up; fractions are allowed.
        weight_decay: decoupled decay of matrices and embeddings outside the diffusion head.
        beta1, beta2: Adam's moments.
        eps: Adam's epsilon.
        muon_momentum: Muon's momentum.
        muon_rms: root mean square of Muon's updates; 0.2 is that of Adam's, so both take the same learning rate.
        grad_clip: largest global gradient norm.
    """

    optimizer: str = "adamw"
    blr: float = 1e-4
    lr: float | None = None
    min_lr: float = 0.0
    lr_schedule: str = "constant"
    warmup_epochs: float = 100.0
    weight_decay: float = 0.02
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    muon_momentum: float = 0.95
    muon_rms: float = 0.2
    grad_clip: float = 3.0

    def __post_init__(self):
        for name, choices in (("optimizer", OPTIMIZERS), ("lr_schedule", LR_SCHEDULES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}.")
        for name in ("blr", "grad_clip", "eps", "muon_rms") + (() if self.lr is None else ("lr",)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a positive finite number.")
        for name in ("min_lr", "warmup_epochs", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value} must be finite and >= 0.")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1).")

    def peak_lr(self, batch_size: int) -> float:
        """Learning rate after the warm-up."""
        return self.blr * batch_size / 256 if self.lr is None else self.lr


def learning_rate(config: OptimizerConfig, batch_size: int, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Step -> learning rate."""
    peak = config.peak_lr(batch_size)

    def schedule(step: Array | int) -> Array:
        if config.lr_schedule == "constant":
            after = peak
        else:
            progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
            after = config.min_lr + (peak - config.min_lr) * 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(progress, 0, 1)))
        return jnp.where(step < warmup_steps, peak * step / max(1, warmup_steps), after)

    return schedule


def decay_mask(params: PyTree) -> PyTree:
    """True for each leaf that is decayed: not 1-D (a layer axis aside), not a bias, not in the diffusion head."""

    def decays(path, leaf) -> bool:
        names = [part.key for part in path]
        ndim = leaf.ndim - any(name in STACKS for name in names)
        # Our mask token and unconditional embedding are [1, E], 2-D as in the reference, so they are decayed as there.
        return ndim > 1 and names[-1] != "bias" and "diffloss" not in names

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Gradient clipping, then AdamW with the reference's decay groups, or Muon.

    Muon decays the matrices it orthogonalises; what it leaves to Adam (embeddings, norms, projections) is not decayed.
    """
    if config.optimizer == "adamw":
        moments = (config.beta1, config.beta2, config.eps)
        update = optax.adamw(schedule, *moments, weight_decay=config.weight_decay, mask=decay_mask)
    else:
        update = contrib.muon(
            schedule,
            beta=config.muon_momentum,
            eps=config.eps,
            weight_decay=config.weight_decay,
            weight_decay_mask=decay_mask,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=_muon_dimensions,
            consistent_rms=config.muon_rms,
        )
    return optax.chain(optax.clip_by_global_norm(config.grad_clip), update)


def _muon_dimensions(params: PyTree) -> PyTree:
    """Muon for the kernels of the stacks, one orthogonalisation per layer; Adam (None) for everything else."""

    def dimensions(path, leaf) -> contrib.MuonDimensionNumbers | None:
        names = [part.key for part in path]
        hidden = names[-1] == "kernel" and any(name in STACKS for name in names)
        return contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2) if hidden else None

    return jax.tree_util.tree_map_with_path(dimensions, params)
