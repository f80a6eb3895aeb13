"""What the tests of token policies share: a decode on given tokens, step by step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from sample_helpers import CONFIG, PARAMS

from marjax import mar
from marjax.accel import Accel
from marjax.accel.base import StepInput, TokenPolicy
from marjax.accel.plan import plan_for
from marjax.accel.trace import codes
from marjax.types import MARParams, cast_matrices

BATCH, STEPS = 2, 8


@functools.cache
def inputs(config=CONFIG):
    """Orders [B, S]; tokens [B, 2 S, D] in generation order, of which slices never reach the end."""
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(config.seq_len) for _ in range(BATCH)])
    return order, rng.normal(size=(BATCH, 2 * config.seq_len, config.token_dim)).astype(np.float32)


def class_embeddings(params=PARAMS):
    return np.asarray(params.mar["class_emb"])[[3, 7]]


def forced_steps(policy: TokenPolicy, num_iter: int = STEPS, params: MARParams = PARAMS, dtype=jnp.float32):
    """Every step of a decode on given tokens: its numbers, the output [B, p, E], codes [B, N], the cache."""
    config, tree = params.config, cast_matrices(params.mar, dtype)
    order, tokens = map(jnp.asarray, inputs(config))
    plan = plan_for(config, num_iter, 10, accel=Accel(tokens=policy), guided=False)
    positions = mar.gather_positions(tree, config, order)
    cache = policy.init(config, BATCH, max(segment.previous for segment in plan.segments), dtype)

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def run(cache, rows, segment, full):
        keys = jax.random.split(jax.random.key(1), BATCH)
        step = StepInput(tree, tokens, class_embeddings(params), positions, rows, keys, config, segment)
        if full:
            cache, x = policy.full(cache, step)
            return cache, x, codes(None, step, BATCH)
        cache, x, chosen = policy.cached(cache, step)
        return cache, x, codes(chosen, step, BATCH)

    for segment, rows in zip(plan.segments, plan.rows, strict=True):
        for index in range(segment.num_steps):
            numbers = jax.tree.map(lambda row, index=index: row[index], rows)
            cache, x, code = run(cache, numbers, segment, bool(numbers.refresh))
            yield numbers, np.asarray(x)[:, : numbers.num_predicted], np.asarray(code), cache
