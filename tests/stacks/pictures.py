"""Small vision-language models and pictures with captions, as files."""

import json
import random
from pathlib import Path
from typing import Any

ROWS = 48
_COLOURS = {"red": (230, 20, 20), "green": (20, 200, 40), "blue": (30, 40, 230), "grey": (128,) * 3}
_WORDS = [
    *_COLOURS,
    "a",
    "square",
    "on",
    "what",
    "is",
    "this",
    "user",
    "assistant",
    "the",
    "colour",
]
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}"
    "{% if message['content'] is string %}{{ message['content'] + ' ' }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ 'IMAGE ' }}{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '</s> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def write_model(folder: Path, kind: str, ids: dict[str, int] | None = None) -> Path:
    """Writes a model of two blocks in fp32 with its processor.

    Args:
        kind: "qwen2_5_vl", "qwen3_vl" or "llava".
        ids: ids of special tokens that a program takes for granted, of Qwen's models.
    """
    import torch

    torch.manual_seed(0)
    if kind == "llava":
        _llava(folder)
    else:
        _qwen(folder, kind, ids or {})
    return folder


def _tokenizer(specials: list[str], ids: dict[str, int]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", *specials, *_WORDS]
    numbers = {n: i for i, n in enumerate(names)} | ids
    words = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=list(dict.fromkeys([*specials, *ids])), model_max_length=256,
        padding_side="right",
    )  # fmt: skip


def _text(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": max(tokenizer.get_vocab().values()) + 1, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _qwen(folder: Path, kind: str, known: dict[str, int]) -> None:
    import transformers

    marks = [f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")]
    tokenizer = _tokenizer(marks, known)
    start, end, image, video = tokenizer.convert_tokens_to_ids(marks)
    ids = {
        "image_token_id": image, "video_token_id": video,
        "vision_start_token_id": start, "vision_end_token_id": end,
    }  # fmt: skip
    text = _text(tokenizer) | {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3],
        },
    }  # fmt: skip
    if kind == "qwen2_5_vl":
        vision = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "patch_size": 4, "spatial_merge_size": 2, "out_hidden_size": 64, "window_size": 16,
            "fullatt_block_indexes": [1],
        }  # fmt: skip
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
        whole = transformers.Qwen2_5_VLForConditionalGeneration
        processor = transformers.Qwen2_5_VLProcessor
        from transformers import Qwen2VLVideoProcessor as Videos
    else:
        vision = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "patch_size": 4, "spatial_merge_size": 2, "out_hidden_size": 64,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        }  # fmt: skip
        text |= {"head_dim": 16}
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
        whole = transformers.Qwen3VLForConditionalGeneration
        processor = transformers.Qwen3VLProcessor
        from transformers import Qwen3VLVideoProcessor as Videos

    whole(config).save_pretrained(folder)
    sizes = {"patch_size": 4, "merge_size": 2}
    template = _TEMPLATE.replace("IMAGE", " ".join(marks[i] for i in (0, 2, 1)))
    processor(
        image_processor=transformers.Qwen2VLImageProcessor(
            **sizes, size={"shortest_edge": 64, "longest_edge": 64 * 64}
        ),
        tokenizer=tokenizer,
        video_processor=Videos(**sizes),
        chat_template=template,
    ).save_pretrained(folder)


def _llava(folder: Path) -> None:
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = _tokenizer(["<image>"], {})
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=4, projection_dim=32,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**_text(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    LlavaProcessor(
        image_processor=CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16),
        tokenizer=tokenizer, patch_size=4, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=_TEMPLATE.replace("IMAGE", "<image>"),
    ).save_pretrained(folder)  # fmt: skip


def write_data(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    """Writes `train.jsonl` and `test.jsonl` with `messages` and `images`, and the pictures.

    Args:
        sizes: of the pictures, in turn, width before height.
    """
    from PIL import Image

    (folder / "pictures").mkdir(parents=True)
    for part, seed in (("train", 0), ("test", 1)):
        draw, lines = random.Random(seed), list[str]()
        for row in range(ROWS):
            name, colour = f"pictures/{part}_{row}.png", draw.choice(list(_COLOURS))
            width, height = sizes[row % len(sizes)]
            picture = Image.new("RGB", (width, height), _COLOURS["grey"])
            corner = draw.randrange(width // 2), draw.randrange(height // 2)
            picture.paste(_COLOURS[colour], (*corner, corner[0] + 8, corner[1] + 8))
            picture.save(folder / name)
            asked = draw.choice(["what is this", "what is the colour", "what"])
            # Qwen-VL's loss is the mean over a device's labels: let each row have as many.
            said = f"a {colour} square on grey"
            messages = [
                {"role": "user", "content": [
                    {"type": "image"}, {"type": "text", "text": asked}]},
                {"role": "assistant", "content": [{"type": "text", "text": said}]},
            ]  # fmt: skip
            lines.append(json.dumps({"messages": messages, "images": [name]}))
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_table(folder: Path, data: Path) -> Path:
    """Writes the training rows of `write_data` as a data set of prompts, completions and images."""
    import datasets

    def worded(message: dict[str, Any]) -> list[dict[str, str]]:
        text = message["content"][-1]["text"]
        return [{"role": message["role"], "content": text}]

    rows = list[dict[str, Any]]()
    for line in (data / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        asked, said = map(worded, row["messages"])
        images = [str(data / name) for name in row["images"]]
        rows.append({"prompt": asked, "completion": said, "images": images})
    table = datasets.Dataset.from_list(rows)
    table = table.cast_column("images", datasets.Sequence(datasets.Image()))
    folder.mkdir()
    table.to_parquet(folder / "train.parquet")
    return folder
