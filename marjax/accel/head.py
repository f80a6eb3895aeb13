"""Policies of the diffusion head: what an evaluation takes over from earlier diffusion steps of the same token.

`HeadCache` is LazyMAR's (arXiv 2503.12450, `CachedDiffLoss` of its code). The cache lives for one decode step.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from marjax import diffusion_head
from marjax.accel import fields
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
        prepared: what the policy's `prepare` made for this step.
        num_steps: T.
    """

    params: PyTree
    x: Array
    time: Array
    cond: Array
    row: Array
    prepared: diffusion_head.Modulations
    num_steps: int = struct.field(pytree_node=False)

    @property
    def guided(self) -> bool:
        """Whether there are unconditional rows."""
        return self.cond.shape[0] > self.x.shape[0]


@runtime_checkable
class HeadPolicy(Protocol):
    """How the head is computed at each diffusion step."""

    def check(self, depth: int) -> None:
        """Raises a ValueError for a head, of so many blocks, that the policy does not fit."""

    def init(self, params: PyTree, num_tokens: int, *, guided: bool) -> PyTree:
        """The cache before the first diffusion step, for `num_tokens` rows."""

    def prepare(self, params: PyTree, time: Array, cond: Array, num_tokens: int) -> diffusion_head.Modulations:
        """What `apply` needs at some diffusion steps that does not depend on x.

        Args:
            params: head parameters, unstacked.
            time: [n, W] time embeddings of the steps.
            cond: as in `HeadInput`.
            num_tokens: rows of x.

        Returns:
            Arrays [n, rows, ...].
        """

    def apply(self, cache: PyTree, step: HeadInput) -> tuple[PyTree, Array, Array | None, Array]:
        """The cache after a step; eps [n, D] conditional and unconditional (None unguided), v [n, D] conditional."""

    def cost(self, depth: int, width: int, num_steps: int, *, guided: bool) -> float:
        """Multiply-adds of all diffusion steps of one token."""


PUBLISHED_PERIOD, PUBLISHED_SKIPPED, PUBLISHED_DEPTH = 7, (1, 2, 3, 4), 6
# Multiply-adds of the parts of a head, in units of width^2.
MODULATION, MLP, OUTPUT = 3, 2, 2
# Rows of the products that compute modulations, for several diffusion steps if one has fewer: with few rows the head is
# bound by reading its weights, of which these are more than half.
PREPARED_ROWS = 512


def steps_at_once(num_steps: int, rows: int) -> int:
    """For how many diffusion steps to compute modulations at once; a divisor of `num_steps`."""
    return max(
        count
        for count in range(1, num_steps + 1)
        if num_steps % count == 0 and (count == 1 or count * rows <= PREPARED_ROWS)
    )


@dataclasses.dataclass(frozen=True)
class ExactHead:
    """The whole head at every diffusion step."""

    def check(self, depth: int) -> None:
        """Fits every head."""
        del depth

    def init(self, params: PyTree, num_tokens: int, *, guided: bool) -> None:
        """No cache."""
        del params, num_tokens, guided

    def prepare(self, params: PyTree, time: Array, cond: Array, num_tokens: int) -> diffusion_head.Modulations:
        """The modulations of all blocks and rows."""
        del num_tokens
        return diffusion_head.modulations(params, time[:, None], cond)

    def apply(self, cache: None, step: HeadInput) -> tuple[None, Array, Array | None, Array]:
        """One evaluation of the head on all rows."""
        return cache, *_split(diffusion_head.modulated(step.params, step.x, step.prepared), step)

    def cost(self, depth: int, width: int, num_steps: int, *, guided: bool) -> float:
        """Both halves, every block, every step."""
        return (1 + guided) * num_steps * (depth * (MODULATION + MLP) + OUTPUT) * width**2


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
            1, which is exact. None: the published 7, but 1 for heads of fewer than six blocks, the published fewest:
            for the shipped model's three it ruins images (docs/results/README.md).
        warmup: at steps above this share of T, the MLPs of blocks that are not skipped are recomputed; in [0, 1].
        skipped: blocks that are skipped, counted from 0. None: the published 1 to 4, but not the last block of a
            shallower head.
    """

    period: int | None = None
    warmup: float = 0.9
    skipped: tuple[int, ...] | None = None

    def __post_init__(self):
        fields.integer(self, "period", at_least=1, optional=True)
        fields.share(self, "warmup")
        fields.integers(self, "skipped")

    def check(self, depth: int) -> None:
        """Refuses a head without the blocks to be skipped, and one that options without a period would leave exact.

        Raises:
            ValueError: as said.
        """
        if self.skipped is not None and max(self.skipped, default=0) >= depth:
            raise ValueError(f"skipped={self.skipped!r} names a block that the head, which has {depth}, lacks.")
        if self.period is None and self._every(depth) == 1 and self != HeadCache():
            raise ValueError(
                f"{self}: heads of fewer than {PUBLISHED_DEPTH} blocks are left exact unless a period is given, and "
                f"this one has {depth}."
            )

    def _skips(self, depth: int) -> list[bool]:
        """For each block, whether it is skipped."""
        skipped = [block for block in PUBLISHED_SKIPPED if block < depth - 1] if self.skipped is None else self.skipped
        return [block in skipped for block in range(depth)]

    def _every(self, depth: int) -> int:
        """The period."""
        return self.period or (PUBLISHED_PERIOD if depth >= PUBLISHED_DEPTH else 1)

    def init(self, params: PyTree, num_tokens: int, *, guided: bool) -> _Cache:
        """Zeros, which the first step, a full one, replaces."""
        width, out = params["input_proj"]["bias"].shape[0], params["final_layer"]["linear"]["bias"].shape[0]
        hidden = jnp.zeros((num_tokens, width), jnp.float32)
        skips = self._skips(len(params["res_blocks"]))
        return _Cache(
            mlp=tuple(None if skip else hidden for skip in skips),
            delta=tuple(hidden if skip else None for skip in skips),
            guidance=jnp.zeros((num_tokens, out // 2), jnp.float32) if guided else None,
        )

    def cost(self, depth: int, width: int, num_steps: int, *, guided: bool) -> float:
        """Full steps like `ExactHead`'s, partial ones of the conditional half alone."""
        steps = np.arange(num_steps)
        full = self._is_full(steps, num_steps, depth)
        warm = ~full & (steps > self.warmup * num_steps)
        run = self._skips(depth).count(False)
        partial = (~full).sum() * (run * MODULATION + OUTPUT) + warm.sum() * run * MLP
        every = (1 + guided) * full.sum() * (depth * (MODULATION + MLP) + OUTPUT)
        return float(every + partial) * width**2

    def prepare(self, params: PyTree, time: Array, cond: Array, num_tokens: int) -> diffusion_head.Modulations:
        """The modulations that partial steps need, of the conditional rows; full steps compute their own."""
        depth = len(params["res_blocks"])
        if self._every(depth) == 1:
            return ExactHead().prepare(params, time, cond, num_tokens)
        wanted = tuple(not skip for skip in self._skips(depth))
        return diffusion_head.modulations(params, time[:, None], cond[:num_tokens], wanted)

    def _is_full(self, row, num_steps: int, depth: int):
        return (row == num_steps - 1) | (row % self._every(depth) == 0)

    def apply(self, cache: _Cache, step: HeadInput) -> tuple[_Cache, Array, Array | None, Array]:
        """A full step or a partial one."""
        depth = len(step.params["res_blocks"])
        if self._every(depth) == 1:
            return cache, *ExactHead().apply(None, step)[1:]
        return lax.cond(self._is_full(step.row, step.num_steps, depth), self._full, self._partial, cache, step)

    def _full(self, cache: _Cache, step: HeadInput) -> tuple[_Cache, Array, Array | None, Array]:
        params, rows = step.params, step.x.shape[0]
        modulations = diffusion_head.modulations(params, step.time, step.cond)
        h = diffusion_head.first(params, step.x, step.cond.shape[0])
        mlp, delta = list(cache.mlp), list(cache.delta)
        for index, block in enumerate(map(diffusion_head.bound, params["res_blocks"])):
            out, gate = block.mlp(h, modulations.blocks[index])
            if delta[index] is not None:
                delta[index] = (gate * out)[:rows]
            else:
                mlp[index] = out[:rows]
            h = h + gate * out
        eps_c, eps_u, v = _split(diffusion_head.output(params, h, modulations.final), step)
        guidance = None if eps_u is None else eps_c - eps_u
        return _Cache(tuple(mlp), tuple(delta), guidance), eps_c, eps_u, v

    def _partial(self, cache: _Cache, step: HeadInput) -> tuple[_Cache, Array, Array | None, Array]:
        params, rows = step.params, step.x.shape[0]
        h, mlp = diffusion_head.first(params, step.x, rows), list(cache.mlp)
        for index, block in enumerate(map(diffusion_head.bound, params["res_blocks"])):
            if cache.delta[index] is not None:
                h = h + cache.delta[index]
                continue
            modulation = step.prepared.blocks[index]

            def renewed(block=block, h: Array = h, modulation: Array = modulation) -> tuple[Array, Array]:
                return block.mlp(h, modulation)

            def kept(index: int = index, modulation: Array = modulation) -> tuple[Array, Array]:
                return cache.mlp[index], jnp.split(modulation, 3, axis=-1)[2]

            mlp[index], gate = lax.cond(step.row > self.warmup * step.num_steps, renewed, kept)
            h = h + gate * mlp[index]
        output = diffusion_head.output(params, h, step.prepared.final)
        eps_c, _, v = _split(output, dataclasses.replace(step, cond=step.cond[:rows]))
        eps_u = None if cache.guidance is None else eps_c - cache.guidance
        return _Cache(tuple(mlp), cache.delta, cache.guidance), eps_c, eps_u, v


def _split(output: Array, step: HeadInput) -> tuple[Array, Array | None, Array]:
    """[n or 2 n, 2 D] -> eps conditional and unconditional, v conditional, each [n, D]."""
    eps, v = jnp.split(output, 2, axis=-1)
    rows = step.x.shape[0]
    return eps[:rows], eps[rows:] if step.guided else None, v[:rows]
