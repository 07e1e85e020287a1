"""Writes small diffusion models and captioned pictures, which scripts would download."""

import json
import string
from pathlib import Path
from typing import Any

# Five batches of eight.
ROWS = 40
_LETTERS = string.ascii_lowercase


def write(folder: Path) -> Path:
    """Writes the folder.

    ``unet`` is a config of a UNet alone, ``sd`` and ``sd3`` are pipelines of random weights, and
    ``pictures`` has captions.
    """
    folder.mkdir()
    _write_pictures(folder / "pictures")
    _write_unet(folder / "unet")
    _write_sd(folder / "sd")
    _write_sd3(folder / "sd3")
    return folder


def _write_pictures(folder: Path) -> None:
    import numpy
    from PIL import Image

    folder.mkdir()
    draw, told = numpy.random.default_rng(0), []
    for row in range(ROWS):
        pixels = draw.integers(0, 96, (40, 40, 3), dtype=numpy.uint8)
        pixels[:, :, row % 3] += 128
        Image.fromarray(pixels).save(folder / f"{row}.png")
        told.append(json.dumps({"file_name": f"{row}.png", "text": "rgb"[row % 3]}))
    (folder / "metadata.jsonl").write_text("\n".join(told) + "\n")


def _write_unet(folder: Path) -> None:
    from diffusers import UNet2DModel

    UNet2DModel(
        sample_size=32, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    ).save_config(folder)  # fmt: skip


def _write_sd(folder: Path) -> None:
    import diffusers
    import torch
    import transformers

    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8,
    )  # fmt: skip
    _write_tokenizer(folder / "words")
    diffusers.StableDiffusionPipeline(
        vae=_vae(4), unet=unet, safety_checker=None, feature_extractor=None,
        text_encoder=transformers.CLIPTextModel(_clip(transformers.CLIPTextConfig, 32)),
        tokenizer=transformers.CLIPTokenizer.from_pretrained(folder / "words"),
        scheduler=diffusers.DDPMScheduler(
            beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
        ),
        requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip


def _write_sd3(folder: Path) -> None:
    import diffusers
    import torch
    import transformers

    torch.manual_seed(0)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=64, caption_projection_dim=32,
        pooled_projection_dim=64, out_channels=4, pos_embed_max_size=16,
    )  # fmt: skip
    encoders = [
        transformers.CLIPTextModelWithProjection(_clip(transformers.CLIPTextConfig, 32))
        for _ in range(2)
    ]
    t5 = transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=64, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0
        )
    )
    _write_tokenizer(folder / "words")
    clip = transformers.CLIPTokenizer.from_pretrained(folder / "words")
    diffusers.StableDiffusion3Pipeline(
        transformer=transformer, vae=_vae(4), text_encoder=encoders[0], text_encoder_2=encoders[1],
        text_encoder_3=t5, tokenizer=clip, tokenizer_2=clip,
        tokenizer_3=_t5_tokenizer(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    ).save_pretrained(folder)  # fmt: skip


def _vae(channels: int) -> Any:
    import diffusers

    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32), latent_channels=channels, norm_num_groups=8, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        shift_factor=0.1,
    )  # fmt: skip


def _clip(config: Any, width: int) -> Any:
    begin, end = 2 * len(_LETTERS), 2 * len(_LETTERS) + 1
    return config(
        vocab_size=end + 1, hidden_size=width, intermediate_size=64, projection_dim=width,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=77,
        bos_token_id=begin, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip


def _write_tokenizer(folder: Path) -> None:
    """Writes CLIP's tokenizer with a token for each letter."""
    folder.mkdir(parents=True)
    letters = [*_LETTERS, *(f"{letter}</w>" for letter in _LETTERS)]
    names = [*letters, "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 77}))


def _t5_tokenizer() -> Any:
    import transformers

    scores = [(name, -1.0) for name in ("<pad>", "</s>", "<unk>", "▁", *_LETTERS)]
    return transformers.T5TokenizerFast(vocab=scores, extra_ids=0)
