"""Tiny random LLaVA models as transformers writes them, and images for them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from tests.actors.engine.tiny import EOS, VOCAB, save_tokenizer
from tokenizers import AddedToken, Tokenizer
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)

SIZE, PATCH = 28, 7
IMAGE_TOKEN = VOCAB
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_llava(path: Path, tower: Literal["clip", "siglip"] = "clip", **overrides: Any) -> Any:
    """Returns the model itself, the reference."""
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}
    vision = (CLIPVisionConfig if tower == "clip" else SiglipVisionConfig)(
        **shape, image_size=SIZE, patch_size=PATCH, initializer_range=0.3
    )
    decoder = Qwen2Config if tower == "siglip" else LlamaConfig
    text = decoder(
        vocab_size=VOCAB + 8,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    strategy = "default" if tower == "clip" else "full"
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE_TOKEN,
        vision_feature_select_strategy=strategy,
        **overrides,
    )
    model = LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases start at 0 or 1, where mistakes do not show
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.1)
    model.save_pretrained(path)
    save_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    processor: dict[str, object] = {"size": {"height": SIZE, "width": SIZE}, "resample": 3}
    if tower == "clip":
        processor = {"size": {"shortest_edge": SIZE}, "crop_size": {"height": SIZE, "width": SIZE}, "resample": 3}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def picture(seed: int, width: int = 40, height: int = 31, form: str = "PNG") -> bytes:
    """Returns an image file of smooth noise."""
    noise = np.random.default_rng(seed).integers(0, 255, (6, 6, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, form)
    return file.getvalue()


def data_url(image: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
