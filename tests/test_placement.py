"""Where sampling and encoding run: several devices without a collective, the caller's arrays, the caller's mesh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_images
from sample_helpers import KEY, LABELS, OPTIONS, PARAMS

import marjax
from marjax import decode


@pytest.fixture(scope="module")
def batch():
    return marjax.sample_latents(PARAMS, KEY, LABELS, **OPTIONS)


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
import sample_helpers as t
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


CACHES_SCRIPT = """
import re, sys
import jax, numpy as np
sys.path.insert(0, sys.argv[1])
jax.config.update("jax_default_matmul_precision", "highest")
import sample_helpers as t
class Patch:
    def setattr(self, target, name, value):
        setattr(target, name, value)
out, run = {}, t.sample._run
for name in ("lazymar:warmup=0,refresh_every=3", "marche:condition=on"):
    options = {**t.OPTIONS, "accel": name, "num_iter": 8}
    latents, trace = t.marjax.sample_latents(t.PARAMS, t.KEY, t.LABELS[:6], return_trace=True, **options)
    text = t.compiled_text(Patch(), t.PARAMS, labels=t.LABELS[:6], **options)
    t.sample._run = run
    kinds = r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    out |= {f"{name}/latents": latents, f"{name}/positions": trace.positions}
    out |= {f"{name}/collectives": re.findall(kinds, text), f"{name}/split": "num_partitions=4" in text}
np.savez(sys.argv[2], **out)
"""


@pytest.mark.slow
def test_caches_on_four_devices(tmp_path):
    """The choice of positions gathers nothing across devices, and the trace comes back whole."""
    four = with_four_devices(CACHES_SCRIPT, tmp_path)
    for name in ("lazymar:warmup=0,refresh_every=3", "marche:condition=on"):
        options = {**OPTIONS, "accel": name, "num_iter": 8, "return_trace": True}
        latents, trace = marjax.sample_latents(PARAMS, KEY, LABELS[:6], **options)
        assert four[f"{name}/split"] and four[f"{name}/collectives"].tolist() == []
        np.testing.assert_array_equal(four[f"{name}/positions"], trace.positions)
        np.testing.assert_allclose(four[f"{name}/latents"], latents, rtol=0, atol=1e-3)


PLACEMENT_SCRIPT = """
import sys
import jax, numpy as np
sys.path.insert(0, sys.argv[1])
import sample_helpers as t
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
elsewhere = jax.device_put(np.zeros((4, 8, 8, 16), np.float32), devices[2])
everything = {"latents": elsewhere, "mask": np.ones((8, 8), bool)}
images["inpainted_elsewhere"] = t.marjax.inpaint_latents(second, t.KEY, labels, **everything, **options)
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
    assert len(results) == 11
    for name, images in results.items():
        np.testing.assert_allclose(images, expected, rtol=0, atol=1e-3, err_msg=name)


@pytest.mark.slow
def test_four_devices_encode_as_one(tmp_path):
    """The real encoder, in a Python of its own: the moments of four devices are those of one."""
    root = make_images(tmp_path / "images", {"a": 5})
    code = (
        "import sys, jax; from pathlib import Path; from helpers import *; from marjax import encode, data;"
        "root, out = map(Path, sys.argv[1:]); source = data.ImageFolder(root, 8);"
        "encode.encode_folder(source, TINY_VAE, random_vae(), out, batch_size=3, scale=1.0); print(jax.device_count())"
    )
    outs = []
    for count in (1, 4):
        outs.append(tmp_path / str(count))
        env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "JAX_PLATFORMS": "cpu"}
        env["PYTHONPATH"] = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[1])))
        command = [sys.executable, "-c", code, str(root), str(outs[-1])]
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert child.stdout == f"{count}\n", child.stderr
    one, four = (np.load(out / "moments.npy") for out in outs)
    np.testing.assert_allclose(four, one, rtol=1e-5, atol=1e-5)
