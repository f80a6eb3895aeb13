"""Which configuration a state dict belongs to: told by shapes, claimed by others, settled by options, or an error."""

from __future__ import annotations

import dataclasses

import pytest
from convert_helpers import HEADS, SMALL, SMALL_ARGS, golden_state, shapes_of

from marjax import convert_vae
from marjax.config import PRESETS, MARConfig, VAEConfig, get_preset
from marjax.convert import torch_shapes
from marjax.detection import detect_mar, detect_vae, kind, preset_name

BASE = get_preset("mar_base")
# The reference's command line for MAR-B, as far as it matters.
BASE_ARGS = {
    **{"model": "mar_base", "img_size": 256, "vae_embed_dim": 16, "vae_stride": 16, "patch_size": 1, "class_num": 1000},
    **{"buffer_size": 64, "diffloss_d": 6, "diffloss_w": 1024, "num_sampling_steps": "100", "cfg": 1.0},
}
VAE = VAEConfig(ch=32, ch_mult=(1, 2, 2), num_res_blocks=1, embed_dim=16)  # stride 4
CLOSED = {**HEADS, "patch_size": 1, "img_size": 16}  # options that leave nothing of SMALL open


def vae_shapes(config: VAEConfig) -> dict[str, tuple[int, ...]]:
    return torch_shapes(convert_vae.vae_template(config), convert_vae.vae_source)


def refused(config: MARConfig | dict, **sources) -> str:
    shapes = shapes_of(config) if isinstance(config, MARConfig) else config
    with pytest.raises(ValueError) as caught:
        detect_mar(shapes, **sources)
    return str(caught.value)


# What is found.


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_recognised_by_their_shapes(name):
    """So no two presets have the same shapes."""
    config = detect_mar(shapes_of(PRESETS[name]))
    assert config == PRESETS[name] and preset_name(config) == name


def test_arguments_of_a_training_run():
    config = detect_mar(shapes_of(SMALL), args=SMALL_ARGS, options=HEADS)
    assert config == dataclasses.replace(SMALL, num_sampling_steps="20") and preset_name(config) is None


@pytest.mark.parametrize("name", ["mar_base", "mar_large", "mar_huge"])
def test_the_reference_model_in_the_arguments_tells_the_heads(name):
    """Also with another head, image size and number of classes than the preset's."""
    wanted = dataclasses.replace(
        PRESETS[name], diffloss_d=3, img_size=512, vae_stride=32, vae=None, class_num=10, class_names=()
    )
    args = {**BASE_ARGS, "model": name, "diffloss_d": 3, "diffloss_w": wanted.diffloss_w}
    config = detect_mar(shapes_of(wanted), args={**args, "img_size": 512, "vae_stride": 32, "class_num": 10})
    assert config == dataclasses.replace(wanted, cfg=1.0)
    assert config.encoder_num_heads == PRESETS[name].encoder_num_heads and preset_name(config) is None


def test_published_model_with_its_arguments():
    """Sampling defaults are the preset's, not those of the training run's own evaluation."""
    config = detect_mar(shapes_of(BASE), args={**BASE_ARGS, "cfg": 1.0, "temperature": 0.9})
    assert config == BASE and config.cfg == 2.9 and config.vae == VAEConfig()
    assert detect_mar(shapes_of(BASE), args={**BASE_ARGS, "num_sampling_steps": "50"}).num_sampling_steps == "50"


def test_options_alone():
    assert detect_mar(shapes_of(SMALL), options=CLOSED) == SMALL
    config = detect_mar(shapes_of(SMALL), options={**HEADS, "vae_embed_dim": 4, "vae_stride": 8})
    assert (config.patch_size, config.vae_embed_dim, config.img_size, config.vae_stride) == (2, 4, 64, 8)
    free = {"cfg": 1.5, "class_names": ("a", "b", "c"), "clip_denoised": True, "temperature": 0.9, "mlp_ratio": 4.0}
    assert detect_mar(shapes_of(SMALL), options={**CLOSED, **free}) == dataclasses.replace(SMALL, **free)


def test_options_stand_above_claims_and_presets():
    config = detect_mar(shapes_of(BASE), options={"encoder_num_heads": 24, "patch_size": 2, "vae_stride": 8})
    assert (config.encoder_num_heads, config.decoder_num_heads) == (24, 12)
    assert (config.vae_embed_dim, config.img_size, config.vae) == (4, 256, None) and preset_name(config) is None
    config = detect_mar(shapes_of(SMALL), args={**SMALL_ARGS, "vae_stride": 7}, options={**HEADS, "vae_stride": 4})
    assert config == dataclasses.replace(SMALL, num_sampling_steps="20")
    # Wrong claims about what the arrays tell are settled by the option with the right value.
    assert detect_mar(shapes_of(SMALL), args={**SMALL_ARGS, "class_num": 9}, options={**HEADS, "class_num": 3})


def test_a_recorded_configuration_tells_everything():
    recorded = dataclasses.replace(SMALL, cfg=2.5, class_names=("x", "y", "z"), vae=VAE, clip_denoised=True)
    assert detect_mar(shapes_of(SMALL), recorded=recorded) == recorded
    # MLP widths are rounded down, so several ratios give the same shapes.
    odd = dataclasses.replace(SMALL, mlp_ratio=2.53)
    assert detect_mar(shapes_of(odd), recorded=odd) == odd
    assert shapes_of(detect_mar(shapes_of(odd), options=CLOSED)) == shapes_of(odd)


def test_the_autoencoder_tells_channels_and_stride():
    config = detect_mar(shapes_of(SMALL), options=HEADS, vae=VAE)
    assert config == dataclasses.replace(SMALL, vae=VAE)
    config = detect_mar(shapes_of(SMALL), options=HEADS, vae=dataclasses.replace(VAE, embed_dim=4))
    assert (config.patch_size, config.img_size) == (2, 32)
    assert detect_mar(shapes_of(BASE), vae=VAEConfig()) == BASE


def test_one_patch_size_only():
    """Three values per token are three channels, whatever anyone says."""
    three = dataclasses.replace(SMALL, vae_embed_dim=3)
    assert detect_mar(shapes_of(three), options={**HEADS, "img_size": 16}) == three


@pytest.mark.parametrize("ratio", [4.0, 2.5, 1.3, 0.7])
def test_mlp_ratio(ratio):
    config = dataclasses.replace(SMALL, mlp_ratio=ratio)
    found = detect_mar(shapes_of(config), options=CLOSED)
    assert shapes_of(found) == shapes_of(config) and found.mlp_ratio <= ratio + 1e-12


# What stays open.


def test_heads_stay_open():
    expected = "encoder_num_heads cannot be told from the arrays, and no preset has exactly these; give --num-heads, a"
    assert refused(SMALL, args=SMALL_ARGS) == f"{expected} divisor of 24"
    almost = dataclasses.replace(BASE, class_num=999, class_names=())
    assert refused(almost) == f"{expected} divisor of 768"
    options = {"encoder_num_heads": 3, "patch_size": 1, "img_size": 16}
    assert "decoder_num_heads cannot be told from the arrays" in refused(SMALL, options=options)


def test_patch_size_stays_open():
    assert refused(SMALL, options={**HEADS, "img_size": 16}) == (
        "its 16 values per token can be patch_size 1 with vae_embed_dim 16, patch_size 2 with vae_embed_dim 4, "
        "patch_size 4 with vae_embed_dim 1; give --patch-size"
    )


def test_image_size_stays_open():
    assert refused(SMALL, options={**HEADS, "patch_size": 2}) == (
        "its 4 x 4 tokens are 8 x 8 latents, of an image size that the arrays do not tell; give --img-size or "
        "--vae-stride"
    )
    assert "its 16 x 16 tokens are 32 x 32 latents" in refused(BASE, options={"patch_size": 2})


# What contradicts.


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"class_num": 9},
            {},
            "class_num=9 according to its args, but its arrays have class_num=3; if these are right, give "
            "--class-num 3",
        ),
        ({"buffer_size": 9}, {}, "buffer_size=9 according to its args, but its arrays have buffer_size=2; if these"),
        ({"diffloss_d": 9}, {}, "diffloss_d=9 according to its args, but its arrays have diffloss_d=1; if these"),
        ({"diffloss_w": 9}, {}, "diffloss_w=9 according to its args, but its arrays have diffloss_w=8; if these"),
        (
            {"model": "mar_large"},
            {},
            "encoder_embed_dim=1024 according to its args, but its arrays have encoder_embed_dim=24; if these are "
            "right, give --encoder-embed-dim 24",
        ),
        (
            {"patch_size": 2},
            {},
            "vae_embed_dim=16 and patch_size=2 do not make its 16 values per token; give --vae-embed-dim and "
            "--patch-size",
        ),
        ({}, {"patch_size": 2}, "vae_embed_dim=16 and patch_size=2 do not make its 16 values per token"),
        ({}, {"vae_embed_dim": 5}, "vae_embed_dim=5 and patch_size=1 do not make its 16 values per token"),
        (
            {"img_size": 20},
            {},
            "img_size=20 and vae_stride=4 do not make its 4 x 4 latents; give --img-size and --vae-stride",
        ),
        ({}, {"vae_stride": 8}, "img_size=16 and vae_stride=8 do not make its 4 x 4 latents"),
        ({"img_size": "16"}, {}, "img_size='16' according to its args, expected a positive integer; give --img-size"),
        ({"vae_stride": True}, {}, "vae_stride=True according to its args, expected a positive integer"),
        ({"patch_size": 0}, {}, "patch_size=0 according to its args, expected a positive integer"),
        ({"num_sampling_steps": "x"}, {}, "num_sampling_steps"),
        ({}, {"class_num": 4}, "class_num=4 is asked for, but its arrays have class_num=3"),
        ({}, {"encoder_depth": 3}, "encoder_depth=3 is asked for, but its arrays have encoder_depth=2"),
        ({}, {"mlp_ratio": 3.0}, "mlp_ratio=3.0 is asked for, but its arrays have mlp_ratio=4.0"),
        ({}, {"encoder_num_heads": 5}, "encoder_num_heads=5 does not divide encoder_embed_dim=24"),
        ({}, {"encoder_num_heads": 0}, "encoder_num_heads=0 does not divide encoder_embed_dim=24"),
        ({}, {"patch_size": 0}, "patch_size=0 must be a positive integer"),
        ({}, {"vae_stride": -4}, "img_size=16 and vae_stride=-4 do not make"),
        ({}, {"cfg": -1.0}, "cfg=-1.0 must be finite"),
    ],
)
def test_contradictions(changes, options, message):
    assert message in refused(SMALL, args={**SMALL_ARGS, **changes}, options={**HEADS, **options})


def test_claims_that_differ():
    message = refused(SMALL, args={**SMALL_ARGS, "vae_stride": 8, "img_size": 32}, options=HEADS, vae=VAE)
    assert (
        message == "vae_stride=8 according to its args and vae_stride=4 according to the autoencoder; give --vae-stride"
    )
    message = refused(SMALL, args=SMALL_ARGS, recorded=dataclasses.replace(SMALL, patch_size=2, vae_embed_dim=4))
    assert message.startswith("vae_embed_dim=16 according to its args and vae_embed_dim=4 according to its recorded")
    message = refused(SMALL, recorded=dataclasses.replace(SMALL, diffloss_w=9))
    assert message.startswith("diffloss_w=9 according to its recorded configuration, but its arrays have diffloss_w=8")


def test_options_against_the_autoencoder():
    options = {**HEADS, "vae_stride": 2, "img_size": 8}
    assert "the autoencoder has stride 4, but --vae-stride is 2" in refused(SMALL, options=options, vae=VAE)
    options = {**HEADS, "vae_embed_dim": 4, "patch_size": 2}
    assert "vae.embed_dim=16 must equal vae_embed_dim=4" in refused(SMALL, options=options, vae=VAE)


# Shapes of no model.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"z_proj.weight": None}, "its arrays are not those of one model of this kind: missing key z_proj.weight"),
        ({"z_proj.bias": None}, "its arrays are not those of one MAR model: missing key z_proj.bias"),
        ({"class_emb.weight": (3,)}, "key class_emb.weight has shape (3,), expected 2 axes"),
        ({"extra": (3,), "other": (1,)}, "unused key extra; unused key other"),
        ({"encoder_blocks.7.norm1.weight": (24,)}, "unused key encoder_blocks.7.norm1.weight"),
        ({"z_proj.bias": (25,)}, "key z_proj.bias has shape (25,), expected (24,)"),
        ({"diffusion_pos_embed_learned": (1, 15, 16)}, "18 positions and 15 tokens, expected a square number"),
        ({"diffusion_pos_embed_learned": (1, 25, 16)}, "18 positions and 25 tokens, expected a square number"),
        ({"encoder_blocks.0.mlp.fc1.weight": (95, 24)}, "its MLPs have widths [95, 64] in blocks of widths [24, 16]"),
        ({"class_emb.weight": (0, 24)}, "class_num=0 must be a positive integer"),
        ({"z_proj.weight": (24, 0)}, "vae_embed_dim=0 must be a positive integer"),
        ({"encoder_pos_embed_learned": (1, 18, 0)}, "its MLPs have widths [96, 64] in blocks of widths [0, 16]"),
    ],
)
def test_shapes_of_no_model(changes, message):
    shapes = {key: shape for key, shape in {**shapes_of(SMALL), **changes}.items() if shape is not None}
    assert message in refused(shapes, options=CLOSED)


def test_many_problems_are_cut_short():
    shapes = {key: shape for key, shape in shapes_of(SMALL).items() if "norm" not in key}
    message = refused(shapes, options=CLOSED)
    assert message.count("missing key") == 6 and message.endswith("; and 10 more")


# Autoencoders, and neither.


@pytest.mark.parametrize("config", [VAEConfig(), VAE, VAEConfig(ch=32, ch_mult=(1, 1, 1, 1, 2))])
def test_autoencoders(config):
    assert detect_vae(vae_shapes(config)) == config
    assert detect_vae(vae_shapes(config), 0.5) == dataclasses.replace(config, scale=0.5)
    assert kind(vae_shapes(config)) == "vae"


def test_golden_autoencoder():
    shapes = {key: array.shape for key, array in golden_state("vae_small").items()}
    assert detect_vae(shapes) == VAEConfig(ch=32, ch_mult=(1, 1, 1, 1, 2), num_res_blocks=2, embed_dim=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_conv.bias": None}, "its arrays are not those of one autoencoder: missing key quant_conv.bias"),
        ({"encoder.conv_in.weight": None}, "missing key encoder.conv_in.weight"),
        ({"encoder.conv_in.weight": (31, 3, 3, 3)}, "ch=31 must be a multiple of 32"),
        ({"encoder.conv_in.weight": (0, 3, 3, 3)}, "ch=0 must be a positive integer"),
        ({"post_quant_conv.weight": (8, 8, 1, 1)}, "key quant_conv.weight has shape (32, 32, 1, 1), expected (16, 16"),
        ({"post_quant_conv.weight": (16, 16)}, "key post_quant_conv.weight has shape (16, 16), expected 4 axes"),
        ({"loss.logvar": ()}, "has loss.logvar, so it is an autoencoder of latent-diffusion"),
        ({"decoder.up.2.attn.0.norm.weight": (64,)}, "so it is an autoencoder of latent-diffusion"),
    ],
)
def test_other_autoencoders(changes, message):
    shapes = {key: shape for key, shape in {**vae_shapes(VAE), **changes}.items() if shape is not None}
    with pytest.raises(ValueError) as caught:
        detect_vae(shapes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["encoder.down_blocks.0.resnets.0.conv1.weight"], "an autoencoder in the layout of diffusers"),
        (["first_stage_model.quant_conv.weight", "model_ema.decay"], "a whole latent-diffusion model"),
        (["x_embedder.proj.weight", "blocks.0.attn.qkv.weight"], "a diffusion transformer"),
        (["module.encoder_blocks.0.norm1.weight"], "the state dict of a wrapper, whose keys start with 'module.'"),
        (["mar/z_proj/kernel"], "a checkpoint of marjax, expected a MAR model or MAR's autoencoder; give that file"),
        (["pos_embed", "cls_token"], "it is neither a MAR model nor MAR's autoencoder (its keys: cls_token, pos_emb"),
        ([], "(its keys: nothing, ...); give such a file"),
    ],
)
def test_foreign_files(keys, message):
    with pytest.raises(ValueError) as caught:
        kind(keys)
    assert message in str(caught.value)
