"""Policies of the diffusion head: what an evaluation takes over from earlier diffusion steps of the same token.

`HeadCache` is LazyMAR's (arXiv 2503.12450, `CachedDiffLoss` of its code). The cache lives for one decode step.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jax import lax

from marjax import diffusion_head
from marjax.layers import dense
from marjax.types import Array, PyTree


@struct.dataclass
class HeadInput:
    """One evaluation of the head. n rows: tokens; with guidance `cond` has 2 n, conditional ones first.

    Attributes:
        params: head parameters, unstacked.
        x: [n, D] noisy tokens.
        time: [W] time embedding of the diffusion step.
        cond: [n or 2 n, W] `cond_embed` of the conditioning z.
        row: the diffusion step, T - 1 first and 0 last; a traced int32.
        num_steps: T.
    """

    params: PyTree
    x: Array
    time: Array
    cond: Array
    row: Array
    num_steps: int = struct.field(pytree_node=False)

    @property
    def guided(self) -> bool:
        """Whether there are unconditional rows."""
        return self.cond.shape[0] > self.x.shape[0]


class HeadPolicy(Protocol):
    """How the head is computed at each diffusion step."""

    def init(self, params: PyTree, num_tokens: int, *, guided: bool) -> PyTree:
        """The cache before the first diffusion step, for `num_tokens` rows."""

    def apply(self, cache: PyTree, step: HeadInput) -> tuple[PyTree, Array, Array | None, Array]:
        """The cache after a step; eps [n, D] conditional and unconditional (None unguided), v [n, D] conditional."""


@dataclasses.dataclass(frozen=True)
class ExactHead:
    """The whole head at every diffusion step."""

    def init(self, params: PyTree, num_tokens: int, *, guided: bool) -> None:
        """No cache."""
        del params, num_tokens, guided

    def apply(self, cache: None, step: HeadInput) -> tuple[None, Array, Array | None, Array]:
        """One evaluation of the head on all rows."""
        return cache, *_split(diffusion_head.apply(step.params, step.x, step.time, step.cond), step)


@struct.dataclass
class _Cache:
    """What the conditional rows leave for the next diffusion steps.

    Attributes:
        mlp: per block, [n, W] output of its MLP before the gate; None where the whole block is skipped.
        delta: per block, [n, W] what it added; None where it is not skipped.
        guidance: [n, D] eps_c - eps_u; None unguided.
    """

    mlp: tuple[Array | None, ...]
    delta: tuple[Array | None, ...]
    guidance: Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadCache:
    """LazyMAR's head cache.

    At full steps the whole head runs. At the others only the conditional rows do: a skipped block adds what it added
    at the last full step, another block adds the cached output of its MLP under a fresh gate, and the unconditional
    noise keeps its distance to the conditional one.

    Attributes:
        period: the first diffusion step, and those whose number (from the end) is a multiple of it, are full; at least
            1, which is exact.
        warmup: at steps above this share of T, the MLPs of blocks that are not skipped are recomputed; in [0, 1].
        skipped: blocks that are skipped; numbers beyond the head's depth mean nothing.
    """

    period: int = 7
    warmup: float = 0.9
    skipped: tuple[int, ...] = (1, 2, 3, 4)

    def __post_init__(self):
        if not isinstance(self.period, int) or isinstance(self.period, bool) or self.period < 1:
            raise ValueError(f"period={self.period!r} must be an integer of at least 1.")
        if not 0.0 <= self.warmup <= 1.0:
            raise ValueError(f"warmup={self.warmup!r} must lie in [0, 1].")

    def init(self, params: PyTree, num_tokens: int, *, guided: bool) -> _Cache:
        """Zeros, which the first step, a full one, replaces."""
        width, out = params["input_proj"]["bias"].shape[0], params["final_layer"]["linear"]["bias"].shape[0]
        hidden = jnp.zeros((num_tokens, width))
        blocks = range(len(params["res_blocks"]))
        return _Cache(
            mlp=tuple(None if block in self.skipped else hidden for block in blocks),
            delta=tuple(hidden if block in self.skipped else None for block in blocks),
            guidance=jnp.zeros((num_tokens, out // 2)) if guided else None,
        )

    def apply(self, cache: _Cache, step: HeadInput) -> tuple[_Cache, Array, Array | None, Array]:
        """A full step or a partial one."""
        full = (step.row == step.num_steps - 1) | (step.row % self.period == 0)
        return lax.cond(full, self._full, self._partial, cache, step)

    def _full(self, cache: _Cache, step: HeadInput) -> tuple[_Cache, Array, Array | None, Array]:
        params, rows = step.params, step.x.shape[0]
        silu_y = nn.silu(step.time + step.cond)
        h = jnp.tile(dense(params["input_proj"], step.x), (step.cond.shape[0] // rows, 1))
        mlp, delta = list(cache.mlp), list(cache.delta)
        for index, block in enumerate(map(diffusion_head.bound, params["res_blocks"])):
            shift, scale, gate = block.modulation(silu_y)
            out = block.mlp(h, shift, scale)
            if index in self.skipped:
                delta[index] = (gate * out)[:rows]
            else:
                mlp[index] = out[:rows]
            h = h + gate * out
        eps_c, eps_u, v = _split(diffusion_head.output(params, h, silu_y), step)
        guidance = None if eps_u is None else eps_c - eps_u
        return _Cache(tuple(mlp), tuple(delta), guidance), eps_c, eps_u, v

    def _partial(self, cache: _Cache, step: HeadInput) -> tuple[_Cache, Array, Array | None, Array]:
        params, rows = step.params, step.x.shape[0]
        silu_y = nn.silu(step.time + step.cond[:rows])
        h, mlp = dense(params["input_proj"], step.x), list(cache.mlp)
        for index, block in enumerate(map(diffusion_head.bound, params["res_blocks"])):
            if index in self.skipped:
                h = h + cache.delta[index]
                continue

            def renewed(block: diffusion_head.ResBlock = block, h: Array = h) -> tuple[Array, Array]:
                shift, scale, gate = block.modulation(silu_y)
                return block.mlp(h, shift, scale), gate

            def kept(block: diffusion_head.ResBlock = block, index: int = index) -> tuple[Array, Array]:
                return cache.mlp[index], block.modulation(silu_y)[2]

            mlp[index], gate = lax.cond(step.row > self.warmup * step.num_steps, renewed, kept)
            h = h + gate * mlp[index]
        eps_c, _, v = _split(diffusion_head.output(params, h, silu_y), dataclasses.replace(step, cond=step.cond[:rows]))
        eps_u = None if cache.guidance is None else eps_c - cache.guidance
        return _Cache(tuple(mlp), cache.delta, cache.guidance), eps_c, eps_u, v


def _split(output: Array, step: HeadInput) -> tuple[Array, Array | None, Array]:
    """[n or 2 n, 2 D] -> eps conditional and unconditional, v conditional, each [n, D]."""
    eps, v = jnp.split(output, 2, axis=-1)
    rows = step.x.shape[0]
    return eps[:rows], eps[rows:] if step.guided else None, v[:rows]
