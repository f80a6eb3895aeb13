"""MARché against a plain NumPy re-statement, step by step with teacher forcing, and what holds for every choice."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_marche import PlainMarche
from sample_helpers import CONFIG, PARAMS

from marjax import ActiveTokens, mar
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


def forced_steps(policy: TokenPolicy, num_iter: int = STEPS, params: MARParams = PARAMS):
    """Every step of a decode on given tokens: its numbers, the output [B, p, E], codes [B, N], the cache."""
    config, tree = params.config, cast_matrices(params.mar, jnp.float32)
    order, tokens = map(jnp.asarray, inputs(config))
    plan = plan_for(config, num_iter, 10, accel=Accel(tokens=policy), guided=False)
    positions = mar.gather_positions(tree, config, order)
    cache = policy.init(config, BATCH, max(segment.previous for segment in plan.segments), jnp.float32)

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def run(cache, rows, segment, full):
        keys = jax.random.split(jax.random.key(1), BATCH)
        step = StepInput(tree, tokens, class_embeddings(params), positions, rows, keys, config, segment)
        if full:
            cache, x = policy.full(cache, step)
            return cache, step.predicted(x), codes(None, step, BATCH)
        cache, x, chosen = policy.cached(cache, step)
        return cache, x, codes(chosen, step, BATCH)

    for segment, rows in zip(plan.segments, plan.rows, strict=True):
        for index in range(segment.num_steps):
            numbers = jax.tree.map(lambda row, index=index: row[index], rows)
            cache, x, code = run(cache, numbers, segment, bool(numbers.refresh))
            yield numbers, np.asarray(x)[:, : numbers.num_predicted], np.asarray(code), cache


OPTIONS = [
    {"decision_layer": 1, "encoder_buffers": "recomputed", "buffers": "never"},
    {"encoder": "full", "skip_mlp": False, "include_caching": False},
]
SLOW_OPTIONS = [
    {},
    {"encoder": "full"},
    {"encoder_buffers": "recomputed"},
    {"select": "least_attention"},
    {"include_caching": False},
    {"include_generating": False},
    {"buffers": "always"},
    {"buffers": "never"},
    {"skip_mlp": False},
    {"decision_layer": 1},
    {"decision_layer": 4},
]


@pytest.mark.parametrize(
    "options", [*OPTIONS, *(pytest.param(options, marks=pytest.mark.slow) for options in SLOW_OPTIONS)], ids=str
)
def test_equals_the_plain_restatement(options):
    policy = ActiveTokens(budget=20, **options)
    orders, tokens = inputs()
    plain = [
        PlainMarche(PARAMS, order, emb, budget=20, **options)
        for order, emb in zip(orders, class_embeddings(), strict=True)
    ]
    for number, (rows, x, code, _) in enumerate(forced_steps(policy)):
        for image, model in enumerate(plain):
            counts = int(rows.num_known), int(rows.num_predicted), int(rows.num_previous)
            expected, active = model.step(number, tokens[image], *counts)
            np.testing.assert_allclose(x[image], expected, rtol=0, atol=2e-5)
            got = np.flatnonzero(code[image])
            np.testing.assert_array_equal(got, np.arange(len(code[image])) if active is None else active)
