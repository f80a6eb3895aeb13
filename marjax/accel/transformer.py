"""One step of encoder and decoder under an acceleration: everything, or what the caches leave to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from marjax.accel.base import Accel, StepInput
from marjax.accel.trace import codes
from marjax.config import MARConfig
from marjax.schedule import Segment
from marjax.types import Array, PyTree


@struct.dataclass
class Caches:
    """What encoder and decoder keep between steps.

    Attributes:
        tokens: the token policy's.
        residual: [B, S, E] unconditional minus conditional decoder output at the last refresh; None without a condition
            cache, or without guidance.
    """

    tokens: PyTree
    residual: Array | None


@struct.dataclass
class Output:
    """What a step computes.

    Attributes:
        x: [R, P, E] decoder output for the tokens predicted now.
        codes: [rows, N] uint8, what happened to each position (`accel/trace.py`), for each row that has a token cache;
            None unless asked for.
    """

    x: Array
    codes: Array | None


def init(
    accel: Accel, config: MARConfig, segments: tuple[Segment, ...], batch: int, *, guided: bool, dtype: jnp.dtype
) -> Caches:
    """The caches before the first step, which is a refresh."""
    conditioned = guided and accel.condition is not None
    room = max(segment.previous for segment in segments)
    tokens = accel.tokens.init(config, rows=2 * batch if guided and not conditioned else batch, room=room, dtype=dtype)
    shape = (batch, config.seq_len, config.decoder_embed_dim)
    return Caches(tokens=tokens, residual=jnp.zeros(shape, jnp.float32) if conditioned else None)


@jax.named_scope("decoder")  # what is not the encoder's
def compute(accel: Accel, caches: Caches, step: StepInput, *, trace: bool) -> tuple[Caches, Output]:
    """A step: a refresh, or a cached one, as `step.rows` says."""
    batch, segment = step.tokens.shape[0], step.segment
    conditioned = caches.residual is not None
    cached_rows = batch if conditioned else step.class_emb.shape[0]

    def full(caches: Caches, step: StepInput) -> tuple[Caches, Output]:
        # The condition cache keeps the difference at every token, since it is for later steps.
        tokens, x = accel.tokens.full(caches.tokens, step.replace(every_token=conditioned))
        residual = x[batch:] - x[:batch] if conditioned else None
        coded = codes(None, step, cached_rows) if trace else None
        return Caches(tokens, residual), Output(step.predicted(x) if conditioned else x, coded)

    def cached(caches: Caches, step: StepInput) -> tuple[Caches, Output]:
        if conditioned:
            step = step.replace(class_emb=step.class_emb[:batch])
        tokens, x, chosen = accel.tokens.cached(caches.tokens, step)
        if conditioned:
            x = jnp.concatenate([x, x + step.predicted(caches.residual)])
        coded = codes(chosen, step, cached_rows) if trace else None
        return Caches(tokens, caches.residual), Output(x, coded)

    if segment.num_refresh in (0, segment.num_steps):
        return (full if segment.num_refresh else cached)(caches, step)

    # Two loops of one turn or none, since XLA hands copies of the caches to the branches of a conditional.
    def once(compute, skip: Array, state: tuple[Caches, Output]) -> tuple[Caches, Output]:
        def turn(number: Array, state: tuple[Caches, Output]) -> tuple[Caches, Output]:
            # Depends on the turn, lest XLA move the work out in front of the loop.
            tokens = jnp.where(number == 0, step.tokens, 0.0)
            return compute(state[0], step.replace(tokens=tokens))

        return lax.fori_loop(skip.astype(jnp.int32), jnp.int32(1), turn, state)

    _, output = jax.eval_shape(cached, caches, step)
    state = once(full, ~step.rows.refresh, (caches, jax.tree.map(jnp.zeros_like, output)))
    return once(cached, step.rows.refresh, state)
