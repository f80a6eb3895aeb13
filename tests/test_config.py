"""Model configurations: derived sizes, published parameter counts, and values they refuse."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import pytest

from marjax import mar
from marjax.config import FASHION_MNIST_CLASSES, PRESETS, MARConfig, VAEConfig, get_preset
from marjax.types import count_params


def test_unknown_preset():
    expected = "Unknown preset 'mar_small'; expected one of mar_base, mar_large, mar_huge, fashion_mnist, tiny."
    with pytest.raises(ValueError, match=expected):
        get_preset("mar_small")


@pytest.mark.parametrize("name", PRESETS)
def test_preset_round_trip(name):
    config = get_preset(name)
    text = json.dumps(config.to_dict())
    assert MARConfig.from_dict(json.loads(text)) == config
    assert hash(MARConfig.from_dict(json.loads(text))) == hash(config)
    assert MARConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("name", "grid_size", "seq_len", "token_dim", "latent_size"),
    [
        ("mar_base", 16, 256, 16, 16),
        ("mar_large", 16, 256, 16, 16),
        ("mar_huge", 16, 256, 16, 16),
        ("fashion_mnist", 14, 196, 4, 28),
        ("tiny", 8, 64, 16, 8),
    ],
)
def test_derived_sizes(name, grid_size, seq_len, token_dim, latent_size):
    config = get_preset(name)
    assert (config.grid_size, config.seq_len, config.token_dim) == (grid_size, seq_len, token_dim)
    assert config.latent_size == latent_size


def test_derived_sizes_with_patches():
    config = MARConfig(img_size=64, vae_stride=8, patch_size=2, vae_embed_dim=3)
    assert (config.grid_size, config.seq_len, config.token_dim, config.latent_size) == (4, 16, 12, 8)


@pytest.mark.parametrize(("name", "millions"), [("mar_base", 208), ("mar_large", 479), ("mar_huge", 943)])
def test_parameter_counts(name, millions):
    """The counts of the paper's Table 3 (in millions, rounded up), and a count by hand of every part."""
    config = get_preset(name)
    count = count_params(jax.eval_shape(lambda key: mar.init(config, key), jax.random.key(0)))
    assert math.ceil(count / 1e6) == millions

    e, depth, w, head_depth = config.encoder_embed_dim, config.encoder_depth, config.diffloss_w, config.diffloss_d
    embeddings = e * (1000 + 1 + 320 + 1 + 320 + 256)  # classes, unconditional, encoder, mask, decoder, diffusion
    around = (16 * e + e) + (e * e + e) + 3 * 2 * e  # z_proj, decoder_embed, three norms
    block = (e * 3 * e + 3 * e) + (e * e + e) + (e * 4 * e + 4 * e) + (4 * e * e + e) + 2 * 2 * e
    head_block = 2 * w + 2 * (w * w + w) + (w * 3 * w + 3 * w)
    ends = (256 * w + w) + (w * w + w) + (e * w + w) + (16 * w + w) + (w * 32 + 32) + (w * 2 * w + 2 * w)
    assert count == embeddings + around + 2 * depth * block + head_depth * head_block + ends
    assert name != "mar_base" or count == 207_924_768


def test_presets_of_the_paper():
    sizes = {
        "mar_base": (768, 12, 12, 6, 1024, 2.9),
        "mar_large": (1024, 16, 16, 8, 1280, 3.0),
        "mar_huge": (1280, 20, 16, 12, 1536, 3.2),
    }
    for name, (dim, depth, heads, head_depth, head_width, cfg) in sizes.items():
        config = get_preset(name)
        for stack in ("encoder", "decoder"):
            got = (getattr(config, f"{stack}_{part}") for part in ("embed_dim", "depth", "num_heads"))
            assert tuple(got) == (dim, depth, heads)
        assert (config.diffloss_d, config.diffloss_w, config.cfg) == (head_depth, head_width, cfg)
        assert (config.buffer_size, config.class_num, config.num_sampling_steps) == (64, 1000, "100")
        assert not config.clip_denoised and config.vae == VAEConfig()
        names = [config.class_names[label] for label in (0, 207, 281, 817, 999)]
        assert names == ["tench", "Golden Retriever", "tabby cat", "sports car", "toilet paper"]
        assert "tench" not in repr(config)
    assert get_preset("fashion_mnist").class_names == FASHION_MNIST_CLASSES


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"img_size": 0}, "img_size=0 must be a positive integer"),
        ({"buffer_size": -1}, "buffer_size=-1 must be a positive integer"),
        ({"class_num": 10.0}, "class_num=10.0 must be a positive integer"),
        ({"diffloss_d": True}, "diffloss_d=True must be a positive integer"),
        ({"encoder_depth": "12"}, "encoder_depth='12' must be a positive integer"),
        ({"img_size": 250}, r"img_size=250 must be a multiple of vae_stride \* patch_size = 16 \* 1"),
        ({"patch_size": 3}, r"img_size=256 must be a multiple of vae_stride \* patch_size = 16 \* 3"),
        ({"encoder_num_heads": 7}, "encoder_embed_dim=768 must be a multiple of encoder_num_heads=7"),
        ({"decoder_embed_dim": 770}, "decoder_embed_dim=770 must be a multiple of decoder_num_heads=12"),
        ({"cfg_schedule": "cosine"}, "cfg_schedule='cosine' must be one of linear, constant"),
        ({"num_sampling_steps": "many"}, 'num_sampling_steps=.many.: expected a count such as 100, a list "a,b,c"'),
        ({"num_sampling_steps": "1"}, "num_sampling_steps='1'.* with at least 2 steps in all"),
        ({"vae": VAEConfig(ch_mult=(1, 2))}, r"vae.ch_mult=\(1, 2\) has 2 levels, so vae_stride=16 must be 2"),
        ({"num_sampling_steps": 50}, "num_sampling_steps=50 must be a string"),
        ({"mlp_ratio": 0.0}, "mlp_ratio=0.0 must be finite and > 0"),
        ({"cfg": -0.5}, "cfg=-0.5 must be finite and >= 0"),
        ({"cfg": float("inf")}, "cfg=inf must be finite and >= 0"),
        ({"cfg": "2.9"}, "cfg='2.9' must be finite and >= 0"),
        ({"temperature": float("nan")}, "temperature=nan must be finite and >= 0"),
        ({"temperature": None}, "temperature=None must be finite and >= 0"),
        ({"class_names": ("a", "b"), "class_num": 3}, "class_names has 2 entries, expected class_num=3"),
        ({"vae": VAEConfig(embed_dim=4)}, "vae.embed_dim=4 must equal vae_embed_dim=16"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_values(values, message):
    with pytest.raises(ValueError, match=message):
        MARConfig(**values)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MARConfig(), **values)


def test_edges_that_are_allowed():
    config = MARConfig(cfg=0.0, temperature=0.0, cfg_schedule="constant", mlp_ratio=0.5)
    assert (config.cfg, config.temperature, config.cfg_schedule) == (0.0, 0.0, "constant")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ch": 0}, "ch=0 must be a positive integer"),
        ({"num_res_blocks": 1.5}, "num_res_blocks=1.5 must be a positive integer"),
        ({"embed_dim": -4}, "embed_dim=-4 must be a positive integer"),
        ({"ch_mult": ()}, r"ch_mult=\(\) must be a non-empty tuple of positive integers"),
        ({"ch_mult": (1, 0)}, r"ch_mult=\(1, 0\) must be a non-empty tuple of positive integers"),
        ({"ch_mult": (1, 1.5)}, r"ch_mult=\(1, 1.5\) must be a non-empty tuple of positive integers"),
        ({"ch_mult": "12"}, "ch_mult=12 must be a non-empty tuple of positive integers"),
        ({"scale": "0.2"}, "scale='0.2' must be a positive finite number"),
        ({"scale": 0.0}, "scale=0.0 must be a positive finite number"),
        ({"scale": float("nan")}, "scale=nan must be a positive finite number"),
    ],
)
def test_bad_vae_values(values, message):
    with pytest.raises(ValueError, match=message):
        VAEConfig(**values)


def test_from_dict_refuses_what_does_not_fit():
    values = get_preset("mar_base").to_dict()
    with pytest.raises(ValueError, match="A model config must be a JSON object, got list"):
        MARConfig.from_dict([values])
    unfit = {key: value for key, value in values.items() if key not in ("cfg", "img_size")} | {"depth": 3, "lr": 1}
    expected = r"MARConfig: unknown fields \['depth', 'lr'\], missing fields \['cfg', 'img_size'\]"
    with pytest.raises(ValueError, match=expected):
        MARConfig.from_dict(unfit)
    expected = r"VAEConfig: unknown fields \['zdim'\], missing fields \['ch', 'embed_dim'\]"
    vae = {key: value for key, value in values["vae"].items() if key not in ("ch", "embed_dim")} | {"zdim": 1}
    with pytest.raises(ValueError, match=expected):
        MARConfig.from_dict(values | {"vae": vae})
    with pytest.raises(ValueError, match="img_size=-1 must be a positive integer"):
        MARConfig.from_dict(values | {"img_size": -1})


def test_configs_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_preset("tiny").cfg = 2.0
