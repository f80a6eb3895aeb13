"""The transformer against the reference's taps, and what must hold of it for any input."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import generation_order, golden_config, golden_params, jit, relative_error, to_generation
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import erf

from marjax import codec, layers, mar, products
from marjax.config import get_preset
from marjax.types import cast_matrices, count_params

ATOL = 2e-5  # reference against an independent implementation: 5e-6
NAMES = ("tiny", "tiny_p2")


def forward(params, config, tokens, class_emb, order, num_known, room):
    """Encoder and decoder: tokens [B, S, D] in generation order, of which the encoder is given the first `room`."""
    positions = mar.gather_positions(params, config, order)
    enc_in = mar.embed(params, tokens[:, :room], class_emb, positions.encoder[:, : config.buffer_size + room])
    enc = mar.encode(params, config, enc_in, num_known)
    dec_in = mar.decoder_input(params, config, enc, num_known, positions.decoder)
    dec = mar.decode(params, config, dec_in)
    z = mar.condition(params, dec[:, config.buffer_size :], positions.diffusion)
    return {"enc_in": enc_in, "enc": enc, "dec_in": dec_in, "z": z}


exact = jit(forward, static_argnames=("config", "num_known", "room"))
padded = jit(forward, static_argnames=("config", "room"))


@functools.partial(jit, static_argnames="config")
def first_blocks(params, config, enc_in, dec_in):
    """The output of the first block of either stack."""
    enc = mar.run_blocks(params["encoder_blocks"], enc_in, num_heads=config.encoder_num_heads, stop=1)
    dec = mar.run_blocks(params["decoder_blocks"], dec_in, num_heads=config.decoder_num_heads, stop=1)
    return {"enc_block0": enc, "dec_block0": dec}


@functools.cache
def case(name, golden, tag):
    """A golden case: configuration, parameters, arrays, order, and tokens in generation order."""
    config, arrays = golden_config(name), golden(f"{name}_encdec.npz")
    order = generation_order(arrays[f"{tag}_mask"])
    num_known = int((arrays[f"{tag}_mask"][0] == 0).sum())
    return config, golden_params(name).mar, arrays, order, to_generation(arrays["tokens"], order), num_known


def golden_taps(arrays, tag, config, order):
    """The taps of a case that the golden file has, in generation order; the encoder's are packed, as ours."""
    taps = {name: arrays[f"{tag}_{name}"] for name in ("enc_in", "enc_block0", "enc") if f"{tag}_{name}" in arrays}
    for name in ("dec_in", "dec_block0"):
        if f"{tag}_{name}" in arrays:
            taps[name] = to_generation(arrays[f"{tag}_{name}"], order, config.buffer_size)
    return taps | {"z": to_generation(arrays[f"{tag}_z"], order)}


def assert_taps(taps, expected, atol=ATOL):
    for name, value in expected.items():
        np.testing.assert_allclose(taps[name], value, rtol=0, atol=atol, err_msg=name)


# --- Parity with the reference -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_class_embedding(name, golden):
    params, arrays = golden_params(name).mar, golden(f"{name}_encdec.npz")
    labelled = jit(mar.class_embedding, static_argnums=2)(params, arrays["labels"], 3)
    np.testing.assert_array_equal(labelled, arrays["class_embedding"])
    np.testing.assert_array_equal(mar.class_embedding(params, None, 3), np.tile(arrays["fake_latent"], (3, 1)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tag", ["part", "all"])
def test_taps(name, tag, golden):
    config, params, arrays, order, tokens, num_known = case(name, golden, tag)
    expected = golden_taps(arrays, tag, config, order)
    packed = np.nonzero(np.pad(arrays[f"{tag}_mask"] == 0, ((0, 0), (config.buffer_size, 0)), constant_values=True))
    np.testing.assert_array_equal(packed[1].reshape(3, -1), arrays[f"{tag}_keep_index"])

    taps = exact(params, config, tokens, arrays["class_embedding"], order, num_known, num_known)
    if tag == "part":
        assert set(expected) == {"enc_in", "enc_block0", "enc", "dec_in", "dec_block0", "z"}
        taps |= first_blocks(params, config, taps["enc_in"], taps["dec_in"])
    assert_taps(taps, expected)


@pytest.mark.parametrize("name", NAMES)
def test_unconditional(name, golden):
    config, params, arrays, order, tokens, num_known = case(name, golden, "part")
    unconditional = mar.class_embedding(params, None, 3)
    taps = exact(params, config, tokens, unconditional, order, num_known, num_known)
    assert_taps(taps, {"z": to_generation(arrays["part_z_uncond"], order)})


@pytest.mark.parametrize("name", NAMES)
def test_padded_prefix(name, golden):
    """One program with room for K > num_known tokens; what stands in the padding must not matter."""
    for tag in ("part", "all"):
        config, params, arrays, order, tokens, num_known = case(name, golden, tag)
        room = case(name, golden, "part")[-1] + 3
        expected = golden_taps(arrays, tag, config, order)
        tokens = np.where(np.arange(config.seq_len)[:, None] < num_known, tokens, 1e3).astype(np.float32)
        taps = padded(params, config, tokens, arrays["class_embedding"], order, jnp.int32(num_known), room)
        assert taps["enc"].shape[1] == config.buffer_size + room
        assert_taps({**taps, "enc": taps["enc"][:, : config.buffer_size + num_known]}, {"enc": expected["enc"]})
        assert_taps(taps, {"z": expected["z"]})


def test_doubled_batch(golden):
    """Guided halves share tokens and positions; together they give what each gives alone."""
    config, params, arrays, order, tokens, num_known = case("tiny_p2", golden, "part")
    both = np.concatenate([arrays["class_embedding"], np.tile(arrays["fake_latent"], (3, 1))])
    taps = exact(params, config, tokens, both, order, num_known, num_known)
    for half, rows in enumerate((slice(0, 3), slice(3, 6))):
        alone = exact(params, config, tokens, both[rows], order, num_known, num_known)
        assert_taps({tap: value[rows] for tap, value in taps.items()}, alone, atol=1e-5)
        reference = arrays[("part_z", "part_z_uncond")[half]]
        assert_taps({"z": taps["z"][rows]}, {"z": to_generation(reference, order)})


def test_order_of_known_tokens_does_not_matter(golden):
    """The transformer sees a set of positions: shuffling the known and the unknown tokens shuffles z."""
    config, params, arrays, order, tokens, num_known = case("tiny", golden, "part")
    rng = np.random.default_rng(0)
    shuffle = np.stack(
        [np.concatenate([rng.permutation(num_known), num_known + rng.permutation(64 - num_known)]) for _ in order]
    )
    taps = exact(
        params,
        config,
        np.take_along_axis(tokens, shuffle[..., None], axis=1),
        arrays["class_embedding"],
        np.take_along_axis(order, shuffle, axis=1),
        num_known,
        num_known,
    )
    expected = to_generation(arrays["part_z"], np.take_along_axis(order, shuffle, axis=1))
    assert_taps(taps, {"z": expected})


# --- Labels ------------------------------------------------------------------------------------------------------


def test_label_outside_the_table_gives_nan():
    params = golden_params("tiny").mar
    rows = jit(mar.class_embedding, static_argnums=2)(params, np.array([-11, -10, -1, 0, 9, 10, 2**31 - 1]), 7)
    assert np.isnan(rows).all(axis=1).tolist() == [True, True, True, False, False, True, True]
    np.testing.assert_array_equal(rows[3:5], params["class_emb"][np.array([0, 9])])


# --- Stacks of blocks --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack():
    """Blocks of tiny_p2 (four layers) with a function that runs them, jitted over the stack and the input."""
    config = golden_config("tiny_p2")
    blocks = golden_params("tiny_p2").mar["decoder_blocks"]
    x = np.random.default_rng(1).normal(size=(2, 9, config.decoder_embed_dim)).astype(np.float32)
    run = functools.partial(mar.run_blocks, num_heads=config.decoder_num_heads)
    return blocks, x, run


def test_run_blocks_composes(stack):
    blocks, x, run = stack

    @jit
    def runs(blocks, x):
        split = run(blocks, run(blocks, x, stop=1), start=1)
        return run(blocks, x), split, run(blocks, x, start=2, stop=2), run(blocks, x, outputs=np.array([7, 0, 7]))

    whole, split, empty, few = runs(blocks, x)
    assert relative_error(x, whole) > 0.1
    np.testing.assert_allclose(split, whole, atol=1e-5)
    np.testing.assert_array_equal(empty, x)
    np.testing.assert_allclose(few, whole[:, [7, 0, 7]], atol=1e-5)


def test_training_runs_the_same_blocks(stack):
    """Without dropout, however it is unrolled; and the fast form has the gradients of the one that training uses."""
    blocks, x, run = stack
    mask = np.arange(9)[None] < np.array([[9], [6]])
    train = functools.partial(mar.train_blocks, num_heads=run.keywords["num_heads"])

    def value_and_grad(f):
        return jit(jax.value_and_grad(lambda blocks, x: jnp.sum(jnp.sin(f(blocks, x, key_mask=mask))), argnums=(0, 1)))

    expected, gradients = value_and_grad(train)(blocks, x)
    for other in (run, functools.partial(train, unroll=3), functools.partial(train, remat=True)):
        value, found = value_and_grad(other)(blocks, x)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max()), found, gradients
        )


def test_key_mask(stack):
    """Masked positions are not attended: they may hold anything, and an all-True mask is no mask."""
    blocks, x, run = stack
    masked = jit(lambda blocks, x, mask: run(blocks, x, key_mask=mask))
    mask = np.arange(9)[None] < np.array([[9], [6]])
    changed = np.where(mask[..., None], x, -50.0).astype(np.float32)
    first, second = masked(blocks, x, mask), masked(blocks, changed, mask)
    np.testing.assert_allclose(second[1, :6], first[1, :6], atol=1e-5)
    np.testing.assert_allclose(first[0], jit(run)(blocks, x)[0], atol=1e-5)
    assert np.abs(first[1, :6] - masked(blocks, x, mask | True)[1, :6]).max() > 1e-3


def test_dropout_of_blocks(stack):
    blocks, x, run = stack
    run = functools.partial(mar.train_blocks, **run.keywords)

    @functools.partial(jit, static_argnames=("attn", "proj"))
    def dropped(blocks, x, key, attn, proj):
        return run(blocks, x, dropout=mar.Dropout(attn, proj), key=key)

    plain = jit(run)(blocks, x)
    one, two = jax.random.split(jax.random.key(0, impl="unsafe_rbg"))
    np.testing.assert_allclose(dropped(blocks, x, one, attn=0.0, proj=0.0), plain, rtol=0, atol=2e-5)
    for rates in ({"attn": 0.5, "proj": 0.0}, {"attn": 0.0, "proj": 0.5}):
        first = dropped(blocks, x, one, **rates)
        np.testing.assert_array_equal(dropped(blocks, x, one, **rates), first)
        assert relative_error(first, plain) > 0.01
        assert relative_error(dropped(blocks, x, two, **rates), first) > 0.01


# --- Layers and products -----------------------------------------------------------------------------------------


def test_block_parts_against_numpy():
    """A block as the definition says, in float64: pre-norm, exact GELU, softmax over Dh^-0.5 scaled scores."""
    rng = np.random.default_rng(2)
    block = layers.Block(8, 2, 24)
    x = rng.normal(size=(2, 5, 8))
    shapes = jax.eval_shape(block.init, jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), shapes)
    got = jit(block.apply)({"params": jax.tree.map(jnp.float32, params)}, x.astype(np.float32))

    def norm(p, x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    def dense(p, x):
        return x @ p["kernel"] + p["bias"]

    qkv = dense(params["qkv"], norm(params["norm1"], x)).reshape(2, 5, 3, 2, 4)
    scores = np.einsum("bmhd,bnhd->bhmn", qkv[:, :, 0], qkv[:, :, 1]) / np.sqrt(4)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    y = x + dense(params["proj"], np.einsum("bhmn,bnhd->bmhd", weights, qkv[:, :, 2]).reshape(2, 5, 8))
    hidden = dense(params["fc1"], norm(params["norm2"], y))
    assert hidden.shape[-1] == 24
    y = y + dense(params["fc2"], hidden * 0.5 * (1 + erf(hidden / np.sqrt(2))))
    assert relative_error(got, y) < 1e-5


def test_dropout_keeps_the_mean():
    x = jnp.ones((200, 200))
    y = np.asarray(layers.dropout(x, 0.25, jax.random.key(0)))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert abs(y.mean() - 1) < 0.01
    assert layers.dropout(x, 0.25, None) is x and layers.dropout(x, 0.0, jax.random.key(0)) is x


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((6, 5), (5, 4)), ((2, 3, 5), (5, 4)), ((3, 6, 5), (3, 5, 4)), ((2, 3, 6, 5), (2, 3, 5, 4))],
    ids=["matrix", "rows", "batched", "heads"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2)], ids=["f32", "bf16"])
def test_matmul(a_shape, b_shape, dtype, tolerance):
    """Values and gradients of `matmul` against `jnp.matmul` in float32 on the same rounded operands."""
    rng = np.random.default_rng(4)
    a, b = (jnp.asarray(rng.normal(size=shape), dtype) for shape in (a_shape, b_shape))
    weight = rng.normal(size=(*a_shape[:-1], b_shape[-1])).astype(np.float32)

    @functools.partial(jit, static_argnums=0)
    def value_and_grads(product, a, b):
        def value(a, b):
            y = product(a, b)
            return jnp.sum(y * weight), y

        (_, y), grads = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(a, b)
        return y, *grads

    got = value_and_grads(products.matmul, a, b)
    expected = value_and_grads(jnp.matmul, a.astype(jnp.float32), b.astype(jnp.float32))
    assert [array.dtype for array in got] == [jnp.float32, dtype, dtype]
    for array, reference in zip(got, expected, strict=True):
        assert array.shape == reference.shape
        assert relative_error(array, reference) < tolerance
    assert relative_error(got[0], expected[0]) < 1e-6, "products of rounded operands accumulate in float32"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_transposed(dtype):
    x = jnp.arange(24.0).reshape(2, 3, 4).astype(dtype)
    weight = jnp.arange(24.0).reshape(2, 4, 3)[::-1].astype(dtype)
    swapped, pullback = jit(lambda x: jax.vjp(products.transposed, x))(x)
    np.testing.assert_array_equal(swapped, np.swapaxes(np.asarray(x), 1, 2))
    np.testing.assert_array_equal(pullback(weight)[0], np.swapaxes(np.asarray(weight), 1, 2))
    assert swapped.dtype == dtype


def test_bfloat16_kernels(golden):
    config, params, arrays, order, tokens, num_known = case("tiny", golden, "part")
    narrow = cast_matrices(params, jnp.bfloat16)
    dtypes = {path[-1].key: leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(narrow)}
    assert {key for key, dtype in dtypes.items() if dtype == jnp.bfloat16} == {"kernel"}
    assert count_params(narrow) == count_params(params)
    taps = exact(narrow, config, tokens, arrays["class_embedding"], order, num_known, num_known)
    assert {tap.dtype for tap in taps.values()} == {jnp.dtype(jnp.float32)}
    expected = golden_taps(arrays, "part", config, order)
    for tap, value in taps.items():
        assert 1e-5 < relative_error(value, expected[tap]) < 2e-2, tap


# --- Initialisation ----------------------------------------------------------------------------------------------


def test_init_follows_the_reference():
    init = jit(mar.init, static_argnums=0)
    params, again = (init(get_preset("tiny"), jax.random.key(seed, impl="unsafe_rbg")) for seed in range(2))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [part.key for part in path]
        name, leaf = "/".join(names), np.asarray(leaf)
        assert leaf.dtype == np.float32
        other = functools.reduce(lambda tree, key: tree[key], names, again)
        if names[-1] == "bias" or "adaLN" in names or name.startswith("diffloss/final_layer"):
            assert not leaf.any(), name
        elif names[-1] == "scale":
            assert (leaf == 1).all(), name
        elif names[-1] == "kernel" and "time_embed" not in names:  # Xavier uniform
            bound = np.sqrt(6 / sum(leaf.shape[-2:]))
            assert 0.9 * bound < np.abs(leaf).max() <= bound, name
        else:  # normal(0.02)
            assert abs(leaf.std() / 0.02 - 1) < 4 / np.sqrt(2 * leaf.size), name
        if leaf.any() and names[-1] != "scale":
            assert not (leaf == other).any(), name
    for stacked in ("encoder_blocks", "decoder_blocks"):
        kernel = np.asarray(params[stacked]["fc1"]["kernel"])
        assert not np.isclose(kernel[0], kernel[1]).all()


# --- Between images, latents and tokens --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_patchify_golden(name, golden):
    """The reference's latents are NCHW, ours NHWC."""
    arrays, patch_size = golden(f"{name}_encdec.npz"), golden_config(name).patch_size
    latents = arrays["patch_latent"].transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(codec.patchify(latents, patch_size), arrays["patch_tokens"])
    np.testing.assert_array_equal(codec.unpatchify(arrays["patch_tokens"], patch_size), latents)


@given(batch=st.integers(0, 3), side=st.integers(1, 6), patch_size=st.integers(1, 4), channels=st.integers(1, 5))
def test_patchify_round_trip(batch, side, patch_size, channels):
    size = side * patch_size
    latents = np.arange(batch * size * size * channels, dtype=np.float32).reshape(batch, size, size, channels)
    tokens = codec.patchify(latents, patch_size)
    assert tokens.shape == (batch, side**2, channels * patch_size**2)
    np.testing.assert_array_equal(codec.unpatchify(tokens, patch_size), latents)
    # Token (row, column) holds patch (row, column), channel-major.
    if batch:
        corner = latents[0, :patch_size, -patch_size:].transpose(2, 0, 1).reshape(-1)
        np.testing.assert_array_equal(tokens[0, side - 1], corner)


def test_pixel_codec():
    pixels = np.random.default_rng(5).integers(0, 256, size=(2, 28, 28, 1), dtype=np.uint8)
    encode, decode = jit(codec.encode_pixels), jit(codec.decode_pixels)
    latents = np.asarray(encode(pixels))
    assert latents.dtype == np.float32 and latents.min() >= -1 and latents.max() <= 1
    np.testing.assert_allclose(latents, encode(pixels / np.float32(255)), atol=1e-6)
    np.testing.assert_array_equal(np.round(np.asarray(decode(latents)) * 255), pixels)
    np.testing.assert_array_equal(decode(np.array([-9.0, -1.0, 0.0, 1.0, 9.0])), [0, 0, 0.5, 1, 1])
    tokens = jit(codec.images_to_tokens, static_argnums=0)(get_preset("fashion_mnist"), pixels)
    np.testing.assert_array_equal(tokens[1, 15], latents[1, 2:4, 2:4].reshape(-1))
    assert tokens.shape == (2, 196, 4)
