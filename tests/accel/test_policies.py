"""What holds for every policy: exact when it refreshes at each step, static shapes, sets that are what they must be."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accel_helpers import BATCH, forced_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_helpers import CONFIG, KEY, LABELS, PARAMS

import marjax
from marjax import Accel, ActiveTokens, ConditionCache, HeadCache, LazyTokens, Refresh, mar
from marjax.accel import ExactTokens, resolve
from marjax.accel.lazymar import choose
from marjax.accel.plan import plan_for
from marjax.accel.trace import CACHING, FULL, GENERATING, REFRESHING, REUSED
from marjax.schedule import MAX_BODIES, Rows, Segment

OPTIONS = {"num_iter": 6, "num_sampling_steps": 40, "temperature": 0.9, "dtype": "float32"}
ALWAYS = Refresh(period=1)
EXACT_IN_EFFECT = {
    "lazymar tokens": Accel(tokens=LazyTokens(refresh=ALWAYS)),
    "condition": Accel(condition=ConditionCache(refresh=ALWAYS)),
    "head": Accel(head=HeadCache(period=1)),
    "lazymar": Accel(LazyTokens(refresh=ALWAYS), ConditionCache(refresh=ALWAYS), HeadCache(period=1)),
    "marche": Accel(tokens=ActiveTokens(refresh=ALWAYS)),
    "marche of everything": Accel(tokens=ActiveTokens(budget=CONFIG.buffer_size + CONFIG.seq_len, encoder="full")),
}


APPROXIMATIONS = ["lazymar:warmup=1", "marche:budget=16", "none:condition=on,warmup=1"]
APPROXIMATIONS += ["none:head=on,head_period=3", "marche:condition=on,head=on,head_period=3"]


def sampled(accel="none", cfg=3.0, labels=LABELS[:3], **options):
    return np.asarray(marjax.sample_latents(PARAMS, KEY, labels, accel=accel, cfg=cfg, **{**OPTIONS, **options}))


def quick_among(names, *quick):
    """Names as parameters, all but some of them slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@functools.cache
def exact(cfg=3.0):
    return sampled(cfg=cfg)


@pytest.mark.parametrize("name", quick_among(EXACT_IN_EFFECT, "lazymar", "marche"))
def test_refreshing_at_every_step_is_exact(name):
    np.testing.assert_allclose(sampled(EXACT_IN_EFFECT[name]), exact(), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT_IN_EFFECT)
def test_refreshing_at_every_step_is_exact_without_guidance(name):
    np.testing.assert_allclose(sampled(EXACT_IN_EFFECT[name], 1.0), exact(1.0), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT_IN_EFFECT)
def test_refreshing_at_every_step_is_exact_on_the_shipped_weights(name):
    policy, params = EXACT_IN_EFFECT[name], marjax.load("fashion_mnist")
    if name == "marche of everything":
        policy = Accel(tokens=ActiveTokens(budget=204, encoder="full"))
    options = {"num_iter": 8, "num_sampling_steps": 20, "dtype": "float32"}
    got, expected = (marjax.sample_latents(params, KEY, [3, 8], accel=accel, **options) for accel in (policy, "none"))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("model", quick_among(["golden", "shipped"], "shipped"))
@pytest.mark.parametrize(
    "policy", [LazyTokens(refresh=ALWAYS), ActiveTokens(refresh=ALWAYS)], ids=["lazymar", "marche"]
)
def test_conditioning_is_exact_at_every_step(policy, model):
    """On given tokens, what the decoder hands to the head, where every step refreshes."""
    params = PARAMS if model == "golden" else marjax.load("fashion_mnist")
    pairs = zip(forced_steps(policy, 4, params), forced_steps(ExactTokens(), 4, params), strict=True)
    for (rows, x, code, _), (_, expected, _, _) in pairs:
        assert rows.refresh and (code == FULL).all()
        np.testing.assert_allclose(x, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", quick_among(APPROXIMATIONS, "marche:condition=on,head=on,head_period=3"))
def test_approximations_differ_and_stay_finite(name):
    got = sampled(name)
    assert np.isfinite(got).all() and np.abs(got - exact()).max() > 1e-2


@pytest.mark.parametrize("name", quick_among(["lazymar:warmup=1", "marche"], "marche"))
def test_images_do_not_influence_one_another(name):
    together = sampled(name)
    alone = sampled(name, labels=LABELS[[2]], indices=[2])
    np.testing.assert_allclose(alone[0], together[2], rtol=0, atol=1e-3)
    turned = sampled(name, labels=LABELS[:3][::-1], indices=[2, 1, 0])
    np.testing.assert_allclose(turned[::-1], together, rtol=0, atol=1e-3)


@pytest.mark.parametrize("num_iter", quick_among([1, 2, 64], 1))
@pytest.mark.parametrize("name", ["lazymar", "marche"])
def test_any_number_of_steps(name, num_iter):
    assert np.isfinite(sampled(name, num_iter=num_iter, num_sampling_steps=4, cfg=1.0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("buffers", [1, 20])
def test_any_number_of_buffers(buffers):
    config = dataclasses.replace(marjax.get_preset("tiny"), buffer_size=buffers)
    params = marjax.MARParams(mar=jax.jit(mar.init, static_argnums=0)(config, KEY), vae=None, config=config)
    for name in ("lazymar", "marche"):
        latents = marjax.sample_latents(params, KEY, [1, 2], accel=name, num_iter=4, num_sampling_steps=2)
        assert np.isfinite(latents).all()


@pytest.mark.parametrize("name", quick_among([*APPROXIMATIONS, *EXACT_IN_EFFECT], "lazymar:warmup=1"))
def test_inpainting(name):
    """Known tokens stay, the trace shows them, and a policy that always refreshes gives what the exact model does."""
    policy = EXACT_IN_EFFECT.get(name, name)
    latents = np.random.default_rng(0).normal(size=(2, 8, 8, 16)).astype(np.float32)
    mask = np.zeros((8, 8), bool)
    mask[:, :4] = True
    options = {**OPTIONS, "cfg": 3.0, "latents": latents, "mask": mask}
    got, trace = marjax.inpaint_latents(PARAMS, KEY, LABELS[:2], accel=policy, return_trace=True, **options)
    np.testing.assert_array_equal(np.asarray(got)[:, ~mask], latents[:, ~mask])
    generated = np.asarray(trace.positions[1:, 0, :, CONFIG.buffer_size :]) == GENERATING
    assert not generated[..., ~mask.reshape(-1)].any()
    expected = np.asarray(marjax.inpaint_latents(PARAMS, KEY, LABELS[:2], **options))
    difference = np.abs(got - expected).max()
    assert difference < 1e-3 if name in EXACT_IN_EFFECT else 1e-2 < difference < np.inf


@pytest.mark.parametrize("name", ["lazymar", "marche"])
def test_plans_have_few_bodies_and_room_for_every_step(name):
    config, accel = marjax.get_preset("mar_base"), resolve(name)
    plan = plan_for(config, 64, 100, accel=accel)
    assert len(plan.segments) <= MAX_BODIES
    for segment, rows in zip(plan.segments, plan.rows, strict=True):
        cached = ~rows.refresh
        assert segment.num_refresh == rows.refresh.sum() and segment.num_steps == len(rows.refresh)
        for room, counts in ((segment.previous, rows.num_previous), (segment.active, rows.num_active)):
            assert room == max(counts[cached], default=0)
    refresh = np.concatenate([rows.refresh for rows in plan.rows])
    expected = {0, 1, 2, 3, 4, *range(5, 64, 9)} if name == "lazymar" else set(range(0, 64, 3))
    assert set(np.flatnonzero(refresh)) == expected


@pytest.mark.parametrize("policy", [ActiveTokens(budget=3), LazyTokens(slack=4)], ids=lambda x: type(x).__name__)
def test_active_sets_under_teacher_forcing(policy):
    """Generating and caching tokens are in; the size is what the plan says; what is outside stays, bit for bit."""
    before = None
    for rows, _, code, cache in forced_steps(policy, num_iter=12):
        deep = jax.tree.leaves(cache.deep)
        if rows.refresh:
            assert (code == FULL).all()
        else:
            tokens = code[:, CONFIG.buffer_size :]
            start, known, stop = rows.num_known - rows.num_previous, rows.num_known, rows.num_known + rows.num_predicted
            assert (tokens[:, known:stop] == GENERATING).all() and (tokens[:, start:known] == CACHING).all()
            assert ((code != REUSED).sum(axis=1) == rows.num_active).all()
            assert set(np.unique(code)) <= {REUSED, GENERATING, CACHING, REFRESHING}
            for new, old in zip(deep, before, strict=True):
                np.testing.assert_array_equal(np.asarray(new)[:, code == REUSED], np.asarray(old)[:, code == REUSED])
                assert (np.asarray(new)[:, code != REUSED] != np.asarray(old)[:, code != REUSED]).any()
        before = deep


@pytest.mark.parametrize(
    "policy", [ActiveTokens(budget=20), LazyTokens(refresh=Refresh(period=3))], ids=["marche", "lazymar"]
)
def test_bfloat16_stays_near_float32(policy):
    """The cached keys and values of the compute dtype that accelerators use."""
    pairs = zip(forced_steps(policy, 4, dtype=jnp.bfloat16), forced_steps(policy, 4), strict=True)
    for (rows, x, _, cache), (_, expected, _, _) in pairs:
        assert {leaf.dtype.name for leaf in jax.tree.leaves(cache.deep)} == {"uint16"}
        error = np.sqrt(np.mean((x - expected) ** 2) / np.mean(expected**2))
        assert error < 0.02, int(rows.num_known)


@pytest.mark.parametrize("budget", [64, 70, 9999])
def test_buffers_are_never_active_where_they_are_not_to_be(budget):
    for rows, _, code, _ in forced_steps(ActiveTokens(budget=budget, buffers="never"), 4):
        if not rows.refresh:
            assert (code[:, : CONFIG.buffer_size] == REUSED).all() and (code[:, CONFIG.buffer_size :] != REUSED).all()


def test_steps_that_fill_up_a_bucket_change_no_count():
    """Images that start from 61 of 64 tokens share a program with those of 57, which have more steps."""
    accel, counts = Accel(tokens=LazyTokens(refresh=Refresh(warmup=1), slack=3)), {}
    for known in (57, 61):
        plan = plan_for(CONFIG, 12, 4, known, accel=accel)
        rows = jax.tree.map(lambda *parts: np.concatenate(parts), *plan.rows)
        counts[known] = rows.num_active[rows.num_predicted > 0]
    expected = accel.tokens.active_counts(CONFIG, np.ones(3, int), np.array([0, 1, 1]))
    np.testing.assert_array_equal(counts[61], expected)
    assert len(counts[57]) == 7 and counts[61][-1] < counts[61][0]


@dataclasses.dataclass(frozen=True)
class EveryOther:
    """A token policy of a user's own, by the protocol alone: the last output again at every second step."""

    refresh: Refresh = Refresh(period=2)

    def check(self, config):
        pass

    def active_counts(self, config, num_predicted, num_previous):
        return np.zeros(len(num_predicted), int)

    def cached_cost(self, config, known, predicted, previous, active):
        return 0.0 * np.asarray(known)

    def init(self, config, rows, room, dtype):
        return jnp.zeros((rows, config.seq_len, config.decoder_embed_dim), jnp.float32)

    def full(self, cache, step):
        _, x = ExactTokens().full(None, step.replace(every_token=True))
        return x, x if step.every_token else step.predicted(x)

    def cached(self, cache, step):
        return cache, step.predicted(cache), jnp.zeros((cache.shape[0], step.config.buffer_size + cache.shape[1]), bool)


def test_a_policy_of_ones_own():
    options = {"accel": Accel(tokens=EveryOther()), "num_iter": 5, "num_sampling_steps": 4, "dtype": "float32"}
    latents, trace = marjax.sample_latents(PARAMS, KEY, LABELS[:2], cfg=1.0, return_trace=True, **options)
    assert np.isfinite(latents).all()
    np.testing.assert_array_equal(trace.refresh, [True, False, True, False, True])
    np.testing.assert_array_equal((trace.positions == FULL).all(axis=(1, 2, 3)), trace.refresh)


@pytest.mark.slow
@pytest.mark.parametrize("name", APPROXIMATIONS)
def test_jax_in_double_precision_mode_changes_nothing(name):
    with jax.enable_x64(True):
        latents = sampled(name)
    assert latents.dtype == np.float32
    np.testing.assert_allclose(latents, sampled(name), rtol=0, atol=1e-3)


@settings(max_examples=30)
@given(st.integers(0, 999), st.data())
def test_choice(seed, data):
    config = dataclasses.replace(CONFIG, buffer_size=data.draw(st.integers(1, 5)))
    known = data.draw(st.integers(1, config.seq_len - 1))
    predicted = data.draw(st.integers(0, config.seq_len - known))
    previous = data.draw(st.integers(0, known))
    total = config.buffer_size + config.seq_len
    count = data.draw(st.integers(min(total, max(1, predicted + previous)), total))
    room = data.draw(st.integers(count, total))
    score = np.random.default_rng(seed).integers(0, 5, (BATCH, total)).astype(np.float32)  # many ties
    numbers = Rows(*(np.int32(number) for number in (known, predicted, 0, 0, previous, count)))
    step = dataclasses.make_dataclass("Step", ["config", "rows", "segment"])(
        config, numbers, Segment(1, known, predicted, previous, room)
    )
    active = choose(jnp.asarray(score), step)
    index, valid = np.asarray(active.index), np.asarray(active.valid)
    forced = set(range(config.buffer_size + known - previous, config.buffer_size + known + predicted))
    for row in range(BATCH):
        chosen = index[row][valid[row]]
        assert len(set(chosen)) == len(chosen) == count and forced <= set(chosen)
        rest = sorted(set(range(total)) - forced, key=lambda place, row=row: (-score[row, place], place))
        assert set(chosen) - forced == set(rest[: count - len(forced)])
