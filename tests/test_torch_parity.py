"""Against a reference written here in plain PyTorch, with stacks of unequal sizes, which the golden models lack."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import generation_order, jit, to_generation

from marjax import codec, convert, diffusion_head, mar
from marjax.config import MARConfig
from marjax.layers import dense

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
nn, F = torch.nn, torch.nn.functional
pytestmark = pytest.mark.torch

ATOL = 2e-5  # as for the golden arrays
BATCH = 3
EPS = 1e-6  # of every LayerNorm

CONFIGS = {
    "wide encoder, patch 1": MARConfig(
        **{"img_size": 8, "vae_stride": 2, "patch_size": 1, "vae_embed_dim": 5, "class_num": 4, "buffer_size": 3},
        **{"encoder_embed_dim": 48, "encoder_depth": 3, "encoder_num_heads": 4, "mlp_ratio": 4.0},
        **{"decoder_embed_dim": 20, "decoder_depth": 2, "decoder_num_heads": 2, "diffloss_d": 2, "diffloss_w": 24},
    ),
    "wide decoder, patch 2": MARConfig(
        **{"img_size": 12, "vae_stride": 2, "patch_size": 2, "vae_embed_dim": 3, "class_num": 2, "buffer_size": 5},
        **{"encoder_embed_dim": 24, "encoder_depth": 1, "encoder_num_heads": 1, "mlp_ratio": 2.5},
        **{"decoder_embed_dim": 40, "decoder_depth": 4, "decoder_num_heads": 5, "diffloss_d": 3, "diffloss_w": 16},
    ),
}


# --- The reference: names of its parameters, and its computations in image order ---------------------------------


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim, heads, mlp_ratio):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, EPS), nn.LayerNorm(dim, EPS)
        self.attn, self.mlp = Attention(dim, heads), Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def perceptron(width_in, width):
    return nn.Sequential(nn.Linear(width_in, width), nn.SiLU(), nn.Linear(width, width))


class TimestepEmbedder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = perceptron(256, width)

    def forward(self, t):
        angles = t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(128) / 128)
        return self.mlp(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1))


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.in_ln, self.mlp = nn.LayerNorm(width, EPS), perceptron(width, width)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x, y):
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, dim=-1)
        return x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)


class FinalLayer(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, EPS, elementwise_affine=False)
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x, y):
        shift, scale = self.adaLN_modulation(y).chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class SimpleMLPAdaLN(nn.Module):
    def __init__(self, token_dim, cond_dim, depth, width):
        super().__init__()
        self.time_embed, self.cond_embed = TimestepEmbedder(width), nn.Linear(cond_dim, width)
        self.input_proj = nn.Linear(token_dim, width)
        self.res_blocks = nn.ModuleList(ResBlock(width) for _ in range(depth))
        self.final_layer = FinalLayer(width, 2 * token_dim)

    def forward(self, x, t, c):
        x, y = self.input_proj(x), self.time_embed(t) + self.cond_embed(c)
        for block in self.res_blocks:
            x = block(x, y)
        return self.final_layer(x, y)


class DiffLoss(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.net = SimpleMLPAdaLN(*sizes)


class MAR(nn.Module):
    """Encoder, decoder and head; masks are [B, S], 1 where a token is not known."""

    def __init__(self, config):
        super().__init__()
        e, d, s = config.encoder_embed_dim, config.decoder_embed_dim, config.seq_len
        n, ratio = config.buffer_size + s, config.mlp_ratio
        self.buffer_size, self.patch_size = config.buffer_size, config.patch_size

        def parameter(*shape):
            return nn.Parameter(torch.zeros(shape))

        self.class_emb, self.fake_latent = nn.Embedding(config.class_num, e), parameter(1, e)
        self.z_proj, self.z_proj_ln = nn.Linear(config.token_dim, e), nn.LayerNorm(e, EPS)
        self.encoder_pos_embed_learned = parameter(1, n, e)
        self.encoder_blocks = nn.ModuleList(
            Block(e, config.encoder_num_heads, ratio) for _ in range(config.encoder_depth)
        )
        self.encoder_norm, self.decoder_embed = nn.LayerNorm(e, EPS), nn.Linear(e, d)
        self.mask_token, self.decoder_pos_embed_learned = parameter(1, 1, d), parameter(1, n, d)
        self.decoder_blocks = nn.ModuleList(
            Block(d, config.decoder_num_heads, ratio) for _ in range(config.decoder_depth)
        )
        self.decoder_norm, self.diffusion_pos_embed_learned = nn.LayerNorm(d, EPS), parameter(1, s, d)
        self.diffloss = DiffLoss(config.token_dim, d, config.diffloss_d, config.diffloss_w)

    def patchify(self, x):
        b, c, h, w = x.shape
        p = self.patch_size
        x = torch.einsum("nchpwq->nhwcpq", x.reshape(b, c, h // p, p, w // p, p))
        return x.reshape(b, h // p * (w // p), c * p**2)

    def class_embedding(self, labels, drop):
        return torch.where(drop[:, None], self.fake_latent, self.class_emb(labels))

    def encoder(self, tokens, mask, class_emb):
        x = self.z_proj(tokens)
        x = torch.cat([class_emb[:, None].repeat(1, self.buffer_size, 1), x], dim=1)
        x = self.z_proj_ln(x + self.encoder_pos_embed_learned)
        x = x[self.kept(mask)].reshape(len(x), -1, x.shape[-1])
        for block in self.encoder_blocks:
            x = block(x)
        return self.encoder_norm(x)

    def decoder(self, x, mask):
        x = self.decoder_embed(x)
        kept = self.kept(mask)
        full = self.mask_token.repeat(*kept.shape, 1)
        full[kept] = x.reshape(-1, x.shape[-1])
        x = full + self.decoder_pos_embed_learned
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_norm(x)[:, self.buffer_size :] + self.diffusion_pos_embed_learned

    def kept(self, mask):
        return F.pad(mask, (self.buffer_size, 0)) == 0


@functools.cache
def reference(config):
    """A reference model in which every parameter is random and matters."""
    model, generator = MAR(config).requires_grad_(False), torch.Generator().manual_seed(0)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm):
                mean, std = float(name == "weight"), 0.1
            elif isinstance(module, nn.Linear):
                mean, std = 0.0, module.in_features**-0.5 if name == "weight" else 0.1
            else:
                mean, std = 0.0, 0.5
            parameter.normal_(mean, std, generator=generator)
    return model


def numpy_state(model):
    return {key: tensor.numpy() for key, tensor in model.state_dict().items()}


# --- Parity ------------------------------------------------------------------------------------------------------


@functools.partial(jit, static_argnames="config")
def transformer(params, config, latents, labels, drop, order, num_known):
    """Tokens in image order; encoder output (buffers first) and z in generation order, with room for every token."""
    image_order = codec.patchify(latents, config.patch_size)
    tokens = jnp.take_along_axis(image_order, order[..., None], axis=1)
    labelled = mar.class_embedding(params, labels, BATCH)
    class_emb = jnp.where(drop[:, None], mar.class_embedding(params, None, BATCH), labelled)
    positions = mar.gather_positions(params, config, order)
    encoded = mar.encode(params, config, mar.embed(params, tokens, class_emb, positions.encoder), num_known)
    x = mar.decode(params, config, mar.decoder_input(params, config, encoded, num_known, positions.decoder))
    return image_order, encoded, mar.condition(params, x[:, config.buffer_size :], positions.diffusion)


@jit
def head(params, x, t, z):
    time, cond = diffusion_head.time_embedding(params, t), dense(params["cond_embed"], z)
    return diffusion_head.apply(diffusion_head.unstack(params), x, time, cond)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformer(name):
    config = CONFIGS[name]
    model = reference(config)
    params, rng = convert.from_state_dict(numpy_state(model), config).mar, np.random.default_rng(0)
    for num_known in (0, 1, config.seq_len // 3, config.seq_len - 1, config.seq_len):
        size = config.latent_size
        latents = rng.normal(size=(BATCH, size, size, config.vae_embed_dim)).astype(np.float32)
        labels, drop = rng.integers(0, config.class_num, BATCH), np.arange(BATCH) == 1
        ranks = np.stack([rng.permutation(config.seq_len) for _ in range(BATCH)])
        mask = (ranks >= num_known).astype(np.float32)
        order = generation_order(mask)
        tokens, encoded, z = transformer(params, config, latents, labels, drop, order, np.int32(num_known))

        expected_tokens = model.patchify(torch.from_numpy(latents).permute(0, 3, 1, 2))
        class_emb = model.class_embedding(torch.from_numpy(labels), torch.from_numpy(drop))
        expected = model.encoder(expected_tokens, torch.from_numpy(mask), class_emb)
        expected_z = to_generation(model.decoder(expected, torch.from_numpy(mask)).numpy(), order)
        np.testing.assert_array_equal(tokens, expected_tokens.numpy())
        np.testing.assert_allclose(encoded[:, : config.buffer_size + num_known], expected.numpy(), rtol=0, atol=ATOL)
        np.testing.assert_allclose(z, expected_z, rtol=0, atol=ATOL)
        assert expected_z.std() > 0.5


@pytest.mark.parametrize("name", CONFIGS)
def test_head(name):
    config, rows, rng = CONFIGS[name], 40, np.random.default_rng(1)
    model = reference(config)
    params = convert.from_state_dict(numpy_state(model), config).mar["diffloss"]
    x, z = (rng.normal(size=(rows, n)).astype(np.float32) for n in (config.token_dim, config.decoder_embed_dim))
    t = np.concatenate([[0, 999], rng.integers(0, 1000, rows - 2)])
    expected = model.diffloss.net(*map(torch.from_numpy, (x, t, z))).numpy()
    np.testing.assert_allclose(head(params, x, t, z), expected, rtol=0, atol=ATOL)
    assert expected.shape == (rows, 2 * config.token_dim) and expected.std() > 0.5


@pytest.mark.parametrize("name", CONFIGS)
def test_back(name):
    """What we write loads into the reference with nothing missing and nothing left over, and is what we read."""
    config = CONFIGS[name]
    model, other = reference(config), MAR(config)
    state = convert.to_state_dict(convert.from_state_dict(numpy_state(model), config))
    other.load_state_dict({key: torch.from_numpy(array.copy()) for key, array in state.items()}, strict=True)
    for (key, tensor), (other_key, got) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert key == other_key and torch.equal(tensor, got), key


def test_fresh_weights_load_into_the_reference():
    """Shapes follow the configuration in both libraries, down to an MLP whose width is rounded down."""
    for config in CONFIGS.values():
        shapes = jax.eval_shape(functools.partial(mar.init, config), jax.random.key(0))
        expected = {key: tuple(tensor.shape) for key, tensor in reference(config).state_dict().items()}
        assert convert.torch_shapes(shapes, convert.mar_source) == expected
