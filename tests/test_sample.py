"""The sampling function: the loop against a plain re-statement, the (seed, index) contract, compilation, bad input."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import golden_params

import marjax
from marjax import codec, decode, diffusion_head, mar, vae
from marjax.arguments import label_list
from marjax.config import VAEConfig
from marjax.layers import dense
from marjax.noise_schedule import noise_schedule
from marjax.schedule import step_counts

sample = importlib.import_module("marjax.sample")  # the attribute of that name is the function

KEY = jax.random.key(7)
PARAMS = golden_params("tiny")
CONFIG = PARAMS.config
# 40 diffusion steps: with fewer, the first step multiplies rounding by thousands.
OPTIONS = {"num_iter": 3, "num_sampling_steps": 40, "cfg": 3.0, "temperature": 0.9, "dtype": "float32"}
LABELS = np.array([3, 1, 4, 1, 5, 9, 2, 6])


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def plain_conditioning(config, tree, class_emb, carry, n, stop):
    """z of tokens [n, stop) of one image from exactly its n known tokens."""
    tokens, order = carry
    positions = mar.gather_positions(tree, config, order[None])
    x = mar.embed(tree, tokens[None, :n], class_emb[None], positions.encoder[:, : config.buffer_size + n])
    x = mar.decoder_input(tree, config, mar.encode(tree, config, x, n), n, positions.decoder)
    x = mar.decode(tree, config, x)[:, config.buffer_size :]
    return mar.condition(tree, x[:, n:stop], positions.diffusion[:, n:stop])[0]


@functools.partial(jax.jit, static_argnums=(0, 2))
def plain_denoise(config, tree, steps, x, row, z, scale):
    """Noise and variance predictions, guided if there are two z."""
    head = diffusion_head.unstack(tree["diffloss"])
    time = diffusion_head.time_embedding(head, jnp.asarray(noise_schedule(steps).timestep_map)[row][None])
    eps, v = zip(
        *(jnp.split(diffusion_head.apply(head, x, time, dense(head["cond_embed"], part)), 2, -1) for part in z),
        strict=True,
    )
    return (eps[0] if len(z) == 1 else eps[1] + scale * (eps[0] - eps[1])), v[0]


def plain_sample_latents(params, rng, label, index, *, num_iter, cfg, cfg_schedule, temperature, steps, known=None):
    """`sample_latents` again, for one image: exact sizes, Python loops, no plan, no scan, no padding.

    `known`: tokens [S, D] in image order and which of them are given, for inpainting.
    """
    config, tree = params.config, params.mar
    schedule = noise_schedule(steps)
    key = jax.random.fold_in(rng, index)
    order = np.asarray(jax.random.permutation(jax.random.fold_in(key, 0), config.seq_len))
    embeddings = [tree["class_emb"][label]] + ([tree["fake_latent"][0]] if cfg != 1.0 else [])
    tokens, start = np.zeros((config.seq_len, config.token_dim), np.float32), 0
    if known is not None:
        order = np.array([p for p in order if known[1][p]] + [p for p in order if not known[1][p]])
        start = int(known[1].sum())
        tokens[:start] = np.asarray(known[0])[order[:start]]
    known, mask_len = step_counts(config.seq_len, num_iter, start)
    for step in range(num_iter):
        n, stop = int(known[step]), int(known[step + 1])
        z = [plain_conditioning(config, tree, embedding, (tokens, order), n, stop) for embedding in embeddings]
        share = (config.seq_len - mask_len[step]) / config.seq_len
        scale = cfg if cfg_schedule == "constant" else 1 + (cfg - 1) * share
        token_keys = [jax.random.fold_in(jax.random.fold_in(key, 1), g) for g in range(n, stop)]
        noise = np.stack([jax.random.normal(k, (schedule.num_steps + 1, config.token_dim)) for k in token_keys], axis=1)
        x = noise[0]
        for draw, row in enumerate(reversed(range(schedule.num_steps)), start=1):
            eps, v = (np.asarray(part) for part in plain_denoise(config, tree, steps, x, row, z, scale))
            x0 = np.float32(schedule.sqrt_recip_alphas_cumprod[row]) * x
            x0 = x0 - np.float32(schedule.sqrt_recipm1_alphas_cumprod[row]) * eps
            if config.clip_denoised:
                x0 = np.clip(x0, -1, 1)
            mean = (
                np.float32(schedule.posterior_mean_coef1[row]) * x0 + np.float32(schedule.posterior_mean_coef2[row]) * x
            )
            share = (v + 1) / 2
            log_variance = share * np.float32(schedule.log_betas[row])
            log_variance += (1 - share) * np.float32(schedule.posterior_log_variance_clipped[row])
            x = mean + (np.exp(0.5 * log_variance) * noise[draw] * np.float32(temperature) if row > 0 else 0.0)
        tokens[n:stop] = x
    image = np.zeros_like(tokens)
    image[np.asarray(order)] = tokens
    return codec.unpatchify(image[None], config.patch_size)[0]


@pytest.mark.parametrize(
    ("cfg", "cfg_schedule", "clip"), [(3.0, "linear", False), (2.0, "constant", True), (1.0, "linear", False)]
)
def test_scan_equals_plain_loop(cfg, cfg_schedule, clip):
    params = PARAMS.replace(config=dataclasses.replace(CONFIG, clip_denoised=clip))
    options = {**OPTIONS, "cfg": cfg, "cfg_schedule": cfg_schedule}
    got = marjax.sample_latents(params, KEY, [3, 8], indices=[5, 0], **options)
    assert got.shape == (2, 8, 8, 16)
    assert got.dtype == jnp.float32
    for image, (label, index) in zip(got, [(3, 5), (8, 0)], strict=True):
        expected = plain_sample_latents(
            params, KEY, label, index, num_iter=3, cfg=cfg, cfg_schedule=cfg_schedule, temperature=0.9, steps=40
        )
        np.testing.assert_allclose(image, expected, rtol=0, atol=1e-3)


@pytest.fixture(scope="module")
def batch():
    return marjax.sample_latents(PARAMS, KEY, LABELS, **OPTIONS)


def test_image_does_not_depend_on_its_batch(batch):
    alone = marjax.sample_latents(PARAMS, KEY, LABELS[[5]], indices=[5], **OPTIONS)
    np.testing.assert_allclose(alone[0], batch[5], rtol=0, atol=1e-3)
    assert np.abs(batch[1] - batch[3]).max() > 0.1  # one label, two indices: two images


def test_orders_and_noise_are_bit_equal_alone_and_in_a_batch():
    words = jax.random.key_data(KEY)
    keys, alone = decode.image_keys(words, jnp.arange(8)), decode.image_keys(words, jnp.array([5]))
    orders = decode.random_order(keys, CONFIG.seq_len)
    assert (np.sort(orders, axis=1) == np.arange(CONFIG.seq_len)).all()
    assert len({tuple(row) for row in np.asarray(orders)}) == 8
    np.testing.assert_array_equal(decode.random_order(alone, CONFIG.seq_len)[0], orders[5])
    whole = np.asarray(decode.random_noise(keys, 4, 16)(10, 6)).reshape(5, 8, 6, 16)
    part = np.asarray(decode.random_noise(alone, 4, 16)(12, 3)).reshape(5, 1, 3, 16)
    np.testing.assert_array_equal(part[:, 0], whole[:, 5, 2:5])
    assert abs(whole.std() - 1) < 0.05


def test_long_lists_run_in_batches_of_one_shape(batch):
    done, before = [], sample._run._cache_size()
    split = marjax.sample_latents(PARAMS, KEY, LABELS, batch_size=3, progress=done.append, **OPTIONS)
    np.testing.assert_allclose(split, batch, rtol=0, atol=1e-3)
    assert done == [3, 6, 8]
    assert sample._run._cache_size() == before + 1


def test_second_call_does_not_recompile(batch):
    before = sample._run._cache_size()
    for change in ({"cfg": 2.5}, {"temperature": 0.5}, {"indices": np.arange(8) + 100}):
        other = marjax.sample_latents(PARAMS, jax.random.key(8), LABELS[::-1], **{**OPTIONS, **change})
        assert np.abs(other - batch).max() > 0.1
    assert sample._run._cache_size() == before


def test_works_inside_a_users_jit(batch):
    @jax.jit
    def generate(params, rng, labels, cfg):
        return marjax.sample_latents(params, rng, labels, **{**OPTIONS, "cfg": cfg})

    np.testing.assert_allclose(generate(PARAMS, KEY, LABELS, 3.0), batch, rtol=0, atol=1e-3)
    unguided = marjax.sample_latents(PARAMS, KEY, LABELS, **{**OPTIONS, "cfg": 1.0})
    np.testing.assert_allclose(generate(PARAMS, KEY, LABELS, 1.0), unguided, rtol=0, atol=1e-3)
    assert np.isnan(generate(PARAMS, KEY, np.full(8, 10), 3.0)).all()


def test_users_jit_may_close_over_arrays_and_is_unguided_at_cfg_1(monkeypatch):
    """Inside a jit, jnp turns constants into tracers: checks and choices must not depend on that."""
    guided, run = [], sample._run
    monkeypatch.setattr(sample, "_run", lambda static, *rest: (guided.append(static.guided), run(static, *rest))[1])
    labels, wrong = jnp.array([3, 4]), jnp.array([9, 10])
    jax.eval_shape(lambda key: marjax.sample_latents(PARAMS, key, labels, **{**OPTIONS, "cfg": 1.0}), KEY)
    jax.eval_shape(lambda key: marjax.sample_latents(PARAMS, key, labels, **OPTIONS), KEY)
    assert guided == [False, True]
    with pytest.raises(ValueError, match="labels holds 10; expected 0 to 9"):
        jax.eval_shape(lambda key: marjax.sample_latents(PARAMS, key, wrong, **OPTIONS), KEY)


def test_jax_in_double_precision_mode_changes_nothing(batch):
    with jax.enable_x64(True):
        latents = marjax.sample_latents(PARAMS, KEY, LABELS, **OPTIONS)
    assert latents.dtype == jnp.float32
    np.testing.assert_allclose(latents, batch, rtol=0, atol=1e-3)


QUICK = {"num_iter": 2, "num_sampling_steps": 4, "cfg": 1.0, "dtype": "float32"}


@pytest.mark.parametrize("default", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_every_kind_of_key_works_whatever_the_default_kind(impl, default):
    """Typed or raw; and the (seed, index) contract holds for each."""
    key = jax.random.key(3, impl=impl)
    with jax.default_prng_impl(default):
        both = marjax.sample_latents(PARAMS, key, [1, 2], **QUICK)
        raw = marjax.sample_latents(PARAMS, jax.random.key_data(key), [1, 2], **QUICK)
    np.testing.assert_array_equal(both, raw)
    words = jax.random.key_data(key)
    pair, alone = decode.image_keys(words, jnp.arange(2)), decode.image_keys(words, jnp.array([1]))
    np.testing.assert_array_equal(decode.random_order(pair, 64)[1], decode.random_order(alone, 64)[0])
    noise = [np.asarray(decode.random_noise(keys, 4, 16)(5, 3)) for keys in (pair, alone)]
    np.testing.assert_array_equal(noise[0].reshape(5, 2, 3, 16)[:, 1], noise[1].reshape(5, 1, 3, 16)[:, 0])


def test_given_order_is_used():
    raster = np.arange(CONFIG.seq_len)
    one = marjax.sample_latents(PARAMS, KEY, [2, 2], indices=[4, 9], order=raster, **OPTIONS)
    two = marjax.sample_latents(PARAMS, KEY, [2, 2], indices=[4, 9], order=np.stack([raster, raster]), **OPTIONS)
    random = marjax.sample_latents(PARAMS, KEY, [2, 2], indices=[4, 9], **OPTIONS)
    np.testing.assert_array_equal(one, two)
    assert np.abs(one - random).max() > 0.1


@pytest.mark.parametrize("num_iter", [1, 64])
def test_fewest_and_most_steps(num_iter):
    latents = marjax.sample_latents(PARAMS, KEY, [0], **{**OPTIONS, "num_iter": num_iter})
    assert np.isfinite(latents).all()
    assert latents.std() > 0.1


def test_unconditional_sampling():
    latents = marjax.sample_latents(PARAMS, KEY, None, batch_size=2, num_iter=8, num_sampling_steps=4)
    named = marjax.sample_latents(PARAMS, KEY, None, indices=[0, 1], num_iter=8, num_sampling_steps=4, cfg=1.0)
    np.testing.assert_array_equal(latents, named)
    tree = {**PARAMS.mar, "class_emb": jnp.tile(PARAMS.mar["fake_latent"], (10, 1))}
    conditional = marjax.sample_latents(
        PARAMS.replace(mar=tree), KEY, [3, 4], num_iter=8, num_sampling_steps=4, cfg=1.0
    )
    np.testing.assert_allclose(latents, conditional, rtol=0, atol=1e-3)


def test_bfloat16_runs_bfloat16_products(monkeypatch, batch):
    """That its rounding stays small is shown part by part elsewhere: sampling amplifies it beyond comparison."""
    text = compiled_text(monkeypatch, PARAMS, dtype="bfloat16")
    leaves = jax.tree.leaves(PARAMS.mar["decoder_blocks"])
    kernels = {f"bf16[{','.join(map(str, leaf.shape[1:]))}]" for leaf in leaves if leaf.ndim == 3}
    products = [line for line in text.splitlines() if " dot(" in line]
    assert len(products) >= 8
    assert all(kernel in text for kernel in kernels)
    latents = marjax.sample_latents(PARAMS, KEY, LABELS, **{**OPTIONS, "dtype": "bfloat16"})
    assert latents.dtype == jnp.float32
    assert np.isfinite(latents).all()
    assert np.abs(latents - batch).max() > 1e-3


def test_images_of_a_pixel_model():
    config = dataclasses.replace(
        CONFIG, img_size=8, vae_stride=1, vae_embed_dim=4, patch_size=2, buffer_size=2, encoder_depth=1, decoder_depth=1
    )
    tree = jax.jit(lambda key: mar.init(config, key))(jax.random.key(0))
    params = marjax.MARParams(mar=tree, vae=None, config=config)
    images = marjax.sample(params, KEY, [0, 1], num_iter=4, num_sampling_steps=4)
    latents = marjax.sample_latents(params, KEY, [0, 1], num_iter=4, num_sampling_steps=4)
    assert images.shape == (2, 8, 8, 4)
    np.testing.assert_allclose(images, np.clip((latents + 1) / 2, 0, 1), atol=1e-6)


def test_images_of_a_latent_model():
    config = dataclasses.replace(CONFIG, vae=VAEConfig(ch=32, ch_mult=(1, 1, 1, 1), num_res_blocks=1))
    vae_tree = jax.jit(lambda key: vae.init(config.vae, key))(jax.random.key(0))
    params = PARAMS.replace(config=config, vae=vae_tree)
    images = marjax.sample(params, KEY, [0], **OPTIONS)
    latents = marjax.sample_latents(params, KEY, [0], **OPTIONS)
    decoded = vae.decode(vae_tree, config.vae, latents / config.vae.scale)
    assert images.shape == (1, 64, 64, 3)
    np.testing.assert_allclose(images, np.clip((decoded + 1) / 2, 0, 1), atol=1e-4)
    with pytest.raises(ValueError, match="carries no autoencoder; use sample_latents"):
        marjax.sample(params.replace(vae=None), KEY, [0], **OPTIONS)


def compiled_text(monkeypatch, params, labels=LABELS, **options) -> str:
    """The optimised HLO of the program that a sampling call runs."""
    calls, run = [], sample._run

    def capture(*arguments):
        calls.append(arguments)
        return run(*arguments)

    monkeypatch.setattr(sample, "_run", capture)
    marjax.sample_latents(params, KEY, labels, **{**OPTIONS, **options})
    (arguments,) = calls
    return run.lower(*arguments).compile().as_text()


def in_loops(text: str) -> list[str]:
    """The instructions of an HLO module that run inside a loop: those of while bodies and of what they call."""
    computations, reached = {}, set()
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?(\S+) .*\{$", line):
            lines = computations.setdefault(head[1], [])
        elif line.startswith("  "):
            lines.append(line.strip())
    todo = re.findall(r"\bbody=%?([\w.-]+)", text)
    while todo:
        if (name := todo.pop()) not in reached:
            reached.add(name)
            todo += re.findall(r"\b(?:calls|to_apply|body|condition)=%?([\w.-]+)", "\n".join(computations[name]))
    return [line for name in reached for line in computations[name]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_loop_calls_no_host_and_copies_no_weight_stack(dtype, monkeypatch):
    text = compiled_text(monkeypatch, PARAMS, dtype=dtype)
    assert not re.search(r"callback|outfeed|infeed|\bsend\b|\brecv\b", text)
    stacks = {
        f"{width}[{','.join(map(str, leaf.shape))}]"
        for width in ("f32", "bf16")
        for name in ("encoder_blocks", "decoder_blocks")
        for leaf in jax.tree.leaves(PARAMS.mar[name])
        if leaf.ndim == 3
    }
    looped = in_loops(text)
    assert sum("dynamic-slice(" in line for line in looped) > 10  # where stacks are used
    made = [line for line in looped if any(f"= {stack}" in line for stack in stacks)]
    passed_on = ("parameter(", "get-tuple-element(")
    assert [line for line in made if not any(kind in line for kind in passed_on)] == []


def with_four_devices(script: str, tmp_path: Path) -> dict[str, np.ndarray]:
    """Runs a script in a Python of its own that sees four devices; returns the arrays it saves."""
    out = tmp_path / "arrays.npz"
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", script, str(Path(__file__).parent), str(out)], check=True, env=environment)
    with np.load(out) as arrays:
        return dict(arrays)


DEVICES_SCRIPT = """
import re, sys
import jax, numpy as np
sys.path.insert(0, sys.argv[1])
jax.config.update("jax_default_matmul_precision", "highest")
import test_sample as t
from marjax import decode
assert jax.local_device_count() == 4
class Patch:
    def setattr(self, target, name, value):
        setattr(target, name, value)
latents = t.marjax.sample_latents(t.PARAMS, t.KEY, t.LABELS[:6], **t.OPTIONS)
text = t.compiled_text(Patch(), t.PARAMS, labels=t.LABELS[:6])
keys = decode.image_keys(jax.random.key_data(t.KEY), jax.numpy.arange(6))
np.savez(
    sys.argv[2],
    latents=latents,
    order=decode.random_order(keys, 64),
    noise=decode.random_noise(keys, 4, 16)(0, 8),
    collectives=re.findall(r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter", text),
    partitions=re.findall(r"num_partitions=(\\d+)", text),
)
"""


def test_four_devices_give_the_same_images_without_a_collective(batch, tmp_path):
    """Six images on four devices: the shares are padded, the loop runs under shard_map."""
    four = with_four_devices(DEVICES_SCRIPT, tmp_path)
    assert four["partitions"].tolist() == ["4"]
    assert four["collectives"].tolist() == []
    keys = decode.image_keys(jax.random.key_data(KEY), jnp.arange(6))
    np.testing.assert_array_equal(four["order"], decode.random_order(keys, 64))
    np.testing.assert_array_equal(four["noise"], decode.random_noise(keys, 4, 16)(0, 8))
    np.testing.assert_allclose(four["latents"], batch[:6], rtol=0, atol=1e-3)


PLACEMENT_SCRIPT = """
import sys
import jax, numpy as np
sys.path.insert(0, sys.argv[1])
import test_sample as t
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()
options = {"num_iter": 2, "num_sampling_steps": 40, "cfg": 1.0, "dtype": "float32"}
labels = t.LABELS[:4]
def generate(params=t.PARAMS, key=t.KEY, labels=labels, **extra):
    return t.marjax.sample_latents(params, key, labels, **options, **extra)
mesh = Mesh(np.array(devices), ("x",))
second = jax.device_put(t.PARAMS, devices[1])
split = lambda shard: generate(labels=shard, indices=shard * 0)
images = {
    "everywhere": generate(),
    "committed_key": generate(key=jax.device_put(t.KEY, devices[2]), labels=jax.device_put(labels, devices[2])),
    "committed_weights": (on_second := generate(params=second, key=jax.device_put(t.KEY, devices[2]))),
    "replicated_weights": generate(params=jax.device_put(t.PARAMS, NamedSharding(mesh, P()))),
}
assert on_second.devices() == {devices[1]}
assert len(images["everywhere"].devices()) == 4 == len(images["replicated_weights"].devices())
with jax.set_mesh(mesh):
    images["users_mesh"] = generate()
jitted = jax.jit(lambda params, key: generate(params=params, key=key))
images["users_jit"] = jitted(t.PARAMS, t.KEY)
images["users_jit_of_committed_weights"] = jitted(second, t.KEY)
on_two = NamedSharding(Mesh(np.array(devices[:2]), ("x",)), P())
images["users_jit_of_weights_on_two"] = jitted(jax.device_put(t.PARAMS, on_two), t.KEY)
images["users_jit_of_a_committed_key"] = jitted(t.PARAMS, jax.device_put(t.KEY, devices[2]))
images["users_jit_that_closes_over_weights"] = jax.jit(lambda key: generate(key=key))(jax.device_put(t.KEY, devices[3]))
explicit = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(explicit):
    images["explicit_mesh"] = generate()
    try:
        jax.jit(lambda labels: generate(labels=labels))(jax.device_put(labels, NamedSharding(explicit, P("x"))))
    except ValueError as error:
        assert "split along Explicit axes of the mesh in scope; make the mesh with Auto axes" in str(error)
    else:
        raise AssertionError("labels split along an Explicit axis were accepted")
of_shards = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(labels)
np.savez(sys.argv[2], of_shards=of_shards, first_index=generate(indices=[0, 0, 0, 0]), **images)
"""


def test_devices_follow_the_weights_and_the_users_mesh(tmp_path):
    """Weights, key or labels that were put somewhere, a mesh of the caller's, a call inside the caller's shard_map."""
    results = with_four_devices(PLACEMENT_SCRIPT, tmp_path)
    np.testing.assert_allclose(results.pop("of_shards"), results.pop("first_index"), rtol=0, atol=1e-3)
    expected = results.pop("everywhere")
    assert len(results) == 10
    for name, images in results.items():
        np.testing.assert_allclose(images, expected, rtol=0, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0, 10], {}, r"labels holds 10; expected 0 to 9"),
        ([-1], {}, r"labels holds -1; expected 0 to 9"),
        ([0.5], {}, r"labels must be integers, got float64"),
        (["bag"], {}, r"labels must be integers, got <U3"),
        ([True], {}, r"labels must be integers, got bool"),
        ([[1], [2, 3]], {}, r"must be a list of integers"),
        ([], {}, r"labels must be a non-empty list"),
        ([[1, 2]], {}, r"non-empty list or 1-D array of integers, got shape \(1, 2\)"),
        (3, {}, r"got shape \(\)"),
        ([2**40], {}, r"labels holds 1099511627776; expected 0 to 9"),
        (None, {}, r"labels=None needs batch_size"),
        (None, {"batch_size": 2, "cfg": 3.0}, r"cfg=3.0 needs labels"),
        ([1], {"batch_size": 0}, r"batch_size=0 must be a positive integer"),
        ([1], {"indices": [0, 1]}, r"indices has 2 entries for 1 labels"),
        ([1], {"indices": [-2]}, r"indices holds -2; expected 0 to 2147483647"),
        ([1], {"num_iter": 0}, r"num_iter=0 must be an integer in \[1, 64\]"),
        ([1], {"num_iter": 65}, r"num_iter=65 must be an integer in \[1, 64\]"),
        ([1], {"num_iter": 2.0}, r"num_iter=2.0 must be an integer"),
        ([1], {"temperature": -0.1}, r"temperature=-0.1 must be finite and >= 0"),
        ([1], {"temperature": float("nan")}, r"temperature=nan must be finite"),
        ([1], {"temperature": "hot"}, r"temperature='hot' must be a number"),
        ([1], {"cfg": -1.0}, r"cfg=-1.0 must be finite and >= 0"),
        ([1], {"cfg": float("inf")}, r"cfg=inf must be finite"),
        ([1], {"cfg": 1e39}, r"cfg=1e\+39 must be finite"),
        ([1], {"cfg_schedule": "cosine"}, r"cfg_schedule='cosine' must be one of linear, constant"),
        ([1], {"num_sampling_steps": 1}, r"at least 2 steps"),
        ([1], {"num_sampling_steps": "many"}, r"num_sampling_steps='many'"),
        ([1], {"dtype": "float16"}, r"dtype='float16' must be None or one of float32, bfloat16"),
        ([1], {"accel": "warp"}, r"Unknown accel 'warp'; expected one of none"),
        ([1], {"accel": 3}, r"accel=3 must be a name or a marjax.Accel"),
        ([1], {"order": "spiral"}, r"order='spiral' must be 'random' or an array"),
        ([1], {"order": np.zeros(64, int)}, r"order row 0 is not a permutation of 0 to 63"),
        ([1], {"order": np.arange(63)}, r"expected integers, \[64\] or \[1, 64\]"),
        ([1], {"order": [[0, 1], [2]]}, r"order=\[\[0, 1\], \[2\]\] must be 'random' or an array"),
        ([1], {"noise": np.zeros((1, 64, 40, 16))}, r"expected \[B, S, T \+ 1, D\] = \(1, 64, 41, 16\)"),
        ([1], {"noise": [[0.0], [0.0, 1.0]]}, r"noise must be None or an array of numbers"),
        ([1], {"noise": np.zeros((1, 64, 41, 16), complex)}, r"noise must be floating point, got complex128"),
        ([1], {"cfg": [[1], [1, 2]]}, r"cfg=\[\[1\], \[1, 2\]\] must be a number"),
        ([1], {"cfg": "1.5"}, r"cfg='1.5' must be a number"),
        ([1], {"num_iter": True}, r"num_iter=True must be an integer"),
        ([1], {"batch_size": True}, r"batch_size=True must be a positive integer"),
        ([1], {"temperature": 1e38}, r"non-finite latents: .* or weights, cfg or temperature are too large"),
        ([1], {"noise": np.full((1, 64, 41, 16), np.nan)}, r"noise holds 41984 values that are NaN or infinite"),
        ([1], {"cfg": np.ones(2)}, r"cfg has shape \(2,\); expected one number"),
        (None, {"batch_size": 2, "cfg": "high"}, r"cfg='high' must be a number"),
    ],
)
def test_bad_input_gets_one_sentence(labels, options, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        marjax.sample_latents(PARAMS, KEY, labels, **{**OPTIONS, **options} if labels is not None else options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rng", [0, np.uint32(3), np.zeros(3, np.uint32), jax.random.split(KEY, 2)])
def test_what_is_no_key(rng):
    with pytest.raises(TypeError, match=r"^rng is .*; expected one PRNG key, such as jax.random.key\(0\)\.$"):
        marjax.sample_latents(PARAMS, rng, LABELS, **OPTIONS)


@pytest.mark.parametrize("function", [marjax.sample, marjax.sample_latents])
def test_what_is_no_model(function):
    with pytest.raises(TypeError, match=r"params is a dict; expected a marjax.MARParams, as marjax.load returns\."):
        function(PARAMS.mar, KEY, LABELS, **OPTIONS)


def test_lists_with_traced_entries_are_refused():
    with pytest.raises(TypeError, match=r"labels is a list with traced entries; give one array \(jnp.stack\)"):
        jax.eval_shape(lambda label: marjax.sample_latents(PARAMS, KEY, [label, 1], **OPTIONS), 3)


def test_traced_noise_may_be_of_any_float_dtype():
    noise = jax.ShapeDtypeStruct((1, 64, 41, 16), jnp.bfloat16)
    shape = jax.eval_shape(lambda noise: marjax.sample_latents(PARAMS, KEY, [3], noise=noise, **OPTIONS), noise)
    assert (shape.shape, shape.dtype) == ((1, 8, 8, 16), jnp.float32)


@pytest.mark.parametrize("name", ["cfg", "temperature"])
def test_traced_scales_must_be_scalars(name):
    with pytest.raises(ValueError, match=rf"{name} has shape \(2,\); expected one number"):
        jax.eval_shape(lambda x: marjax.sample_latents(PARAMS, KEY, LABELS, **{**OPTIONS, name: x}), np.ones(2))


def test_images_that_are_not_finite_are_refused(monkeypatch):
    """The autoencoder's part: the latents are finite."""
    config = dataclasses.replace(CONFIG, vae=VAEConfig(ch_mult=(1, 1, 1, 1)))
    monkeypatch.setattr(sample, "sample_latents", lambda *arguments, **options: jnp.zeros((1, 8, 8, 16)))
    monkeypatch.setattr(codec, "latents_to_images", lambda *arguments: jnp.full((1, 64, 64, 3), jnp.nan))
    with pytest.raises(ValueError, match="The model generated non-finite images: its weights hold NaN"):
        marjax.sample(PARAMS.replace(config=config, vae={}), KEY, [0])


def test_nan_weights_are_never_a_silent_picture():
    tree = {**PARAMS.mar, "z_proj": {**PARAMS.mar["z_proj"], "bias": jnp.full(48, jnp.nan)}}
    with pytest.raises(ValueError, match="non-finite latents: its weights hold NaN"):
        marjax.sample_latents(PARAMS.replace(mar=tree), KEY, LABELS, **OPTIONS)


def test_labels_by_name():
    names = ("t-shirt", "Bag", "ankle boot")
    assert label_list(names, 3, "bag, ankle boot,0") == [1, 2, 0]
    assert label_list(names, 3, "all") == [0, 1, 2]
    assert label_list((), 5, "4,4") == [4, 4]
    for text in ("hat", "3", "", "-1"):
        with pytest.raises(ValueError, match=r"Unknown label .*expected a number from 0 to 2 or one of t-shirt, Bag"):
            label_list(names, 3, text)
