"""The training objective: masked tokens, their conditioning, and the diffusion loss (reference `MAR.forward`).

1. an order per image and one mask ratio per batch, from a truncated normal on [mask_ratio_min, 1]
2. class embeddings dropped to the unconditional one with probability `label_drop_prob`
3. encoder on the known prefix (static room for the most tokens that can be known), decoder on everything
4. diffusion loss of every token `diffusion_batch_mul` times with fresh timesteps and noise
5. mean over masked tokens
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import struct

from marjax import diffusion, diffusion_head, mar
from marjax.config import MARConfig
from marjax.layers import dense
from marjax.noise_schedule import TRAIN_STEPS
from marjax.types import Array, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Constants of the objective; the defaults are the reference's published recipe.

    Attributes:
        mask_ratio_min: smallest share of masked tokens, in (0, 1]. The largest is 1, the mode of the distribution.
        mask_ratio_std: standard deviation of that share before it is truncated.
        label_drop_prob: probability of training a label's image unconditionally, in [0, 1).
        attn_dropout, proj_dropout: dropout rates, in [0, 1).
        diffusion_batch_mul: timesteps and noises drawn per token and image.
        remat: recompute blocks in the backward pass to save memory.
        unroll: layers per iteration of the scans over depth.
    """

    mask_ratio_min: float = 0.7
    mask_ratio_std: float = 0.25
    label_drop_prob: float = 0.1
    attn_dropout: float = 0.1
    proj_dropout: float = 0.1
    diffusion_batch_mul: int = 4
    remat: bool = False
    unroll: int = 1

    def __post_init__(self):
        if not 0.0 < self.mask_ratio_min <= 1.0:
            raise ValueError(f"mask_ratio_min={self.mask_ratio_min} must lie in (0, 1].")
        if not (math.isfinite(self.mask_ratio_std) and self.mask_ratio_std > 0.0):
            raise ValueError(f"mask_ratio_std={self.mask_ratio_std} must be a positive finite number.")
        for name in ("label_drop_prob", "attn_dropout", "proj_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1).")
        for name in ("diffusion_batch_mul", "unroll"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")

    def max_known(self, seq_len: int) -> int:
        """The most tokens that can be known."""
        return seq_len - math.ceil(seq_len * self.mask_ratio_min)


@struct.dataclass
class Draws:
    """Everything random in one evaluation of the loss, apart from dropout.

    Attributes:
        order: [B, S] int, image position of each token in generation order.
        num_known: int scalar, tokens known in every image.
        t: [mul, B, S] int, training timesteps, in generation order.
        noise: [mul, B, S, D] standard normal, in generation order.
        drop_label: [B] bool, True where the label is replaced by the unconditional embedding.
    """

    order: Array
    num_known: Array
    t: Array
    noise: Array
    drop_label: Array


def draw(objective: Objective, config: MARConfig, key: Array, batch_size: int) -> Draws:
    """Draws orders, mask ratio, timesteps, noise and dropped labels."""
    k_order, k_ratio, k_t, k_noise, k_drop = jax.random.split(key, 5)
    seq_len, rows = config.seq_len, (objective.diffusion_batch_mul, batch_size, config.seq_len)
    low = (objective.mask_ratio_min - 1.0) / objective.mask_ratio_std
    ratio = 1.0 + objective.mask_ratio_std * jax.random.truncated_normal(k_ratio, low, 0.0)
    num_masked = jnp.clip(jnp.ceil(seq_len * ratio).astype(jnp.int32), seq_len - objective.max_known(seq_len), seq_len)
    return Draws(
        order=jax.vmap(lambda k: jax.random.permutation(k, seq_len))(jax.random.split(k_order, batch_size)),
        num_known=seq_len - num_masked,
        t=jax.random.randint(k_t, rows, 0, TRAIN_STEPS),
        noise=jax.random.normal(k_noise, (*rows, config.token_dim)),
        drop_label=jax.random.bernoulli(k_drop, objective.label_drop_prob, (batch_size,)),
    )


def loss(
    params: PyTree,
    config: MARConfig,
    objective: Objective,
    tokens: Array,
    labels: Array,
    draws: Draws,
    *,
    key: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
    """The training loss of a batch.

    Args:
        params: `mar.init`'s tree, kernels in the compute dtype.
        config: the model's configuration.
        objective: the objective's constants.
        tokens: [B, S, D] float32 clean tokens in image order.
        labels: [B] int32.
        draws: the random choices.
        key: PRNG key of the dropout; None switches dropout off.

    Returns:
        The scalar loss, and its parts `mse` and `vb`.
    """
    z, target = conditioning(params, config, objective, tokens, labels, draws, key=key)
    mul, batch, seq_len = draws.t.shape
    rows = mul * batch * seq_len
    x0 = jnp.broadcast_to(target, (mul, *target.shape)).reshape(rows, -1)
    t, noise = draws.t.reshape(rows), draws.noise.reshape(rows, -1)
    head = params["diffloss"]
    xt = diffusion.add_noise(x0, t, noise)
    cond = jnp.tile(dense(head["cond_embed"], z.reshape(batch * seq_len, -1)), (mul, 1))
    output = diffusion_head.apply(diffusion_head.unstack(head), xt, diffusion_head.time_embedding(head, t), cond)
    mse, vb = diffusion.training_losses(output, x0, xt, t, noise)

    masked = (jnp.arange(seq_len) >= draws.num_known).astype(jnp.float32)
    weight = masked / (mul * batch * jnp.sum(masked))
    mse, vb = (jnp.sum(part.reshape(mul, batch, seq_len) * weight) for part in (mse, vb))
    return mse + vb, {"mse": mse, "vb": vb}


def conditioning(
    params: PyTree,
    config: MARConfig,
    objective: Objective,
    tokens: Array,
    labels: Array,
    draws: Draws,
    *,
    key: Array | None = None,
) -> tuple[Array, Array]:
    """Conditioning z [B, S, E] and clean tokens [B, S, D], both in generation order; arguments as in `loss`."""
    tokens = jnp.take_along_axis(tokens, draws.order[..., None], axis=1)
    positions = mar.gather_positions(params, config, draws.order)
    embedded = mar.class_embedding(params, labels, labels.shape[0])
    class_emb = jnp.where(draws.drop_label[:, None], params["fake_latent"], embedded)

    room = objective.max_known(config.seq_len)
    train = functools.partial(mar.train_blocks, unroll=objective.unroll, remat=objective.remat)
    run_encoder = run_decoder = train
    if key is not None:
        train = functools.partial(train, dropout=mar.Dropout(objective.attn_dropout, objective.proj_dropout))
        run_encoder, run_decoder = (functools.partial(train, key=each) for each in jax.random.split(key))
    x = mar.embed(params, tokens[:, :room], class_emb, positions.encoder[:, : config.buffer_size + room])
    encoded = mar.encode(params, config, x, draws.num_known, run=run_encoder)
    x = mar.decoder_input(params, config, encoded, draws.num_known, positions.decoder)
    x = mar.decode(params, config, x, run=run_decoder)
    return mar.condition(params, x[:, config.buffer_size :], positions.diffusion), tokens
