"""A model that reads images against transformers, and what may be shared between prompts with images."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.actors.engine.model.vision.llava import IMAGE_TOKEN, PATCH, SIZE, picture, save_llava
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from raytide.actors.engine import LLM, EngineConfig, limits
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.output_processor import RequestFailure
from raytide.actors.engine.model.parallel.shard import check_divides
from raytide.actors.engine.model.vision.pixels import ImageProcessor
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.sequence import ScheduledChunk
from raytide.actors.engine.types import GenChunk, GenRequest, Message
from raytide.actors.models.families import read_architecture
from raytide.core.errors import ConfigError, UsageError

TOKENS = (SIZE // PATCH) ** 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def core_of(path: Path, **options: object) -> EngineCore:
    fields = {"block_size": 8, "max_running": 4, "num_blocks": 40, "device": "cpu", **options}
    return EngineCore(EngineConfig(model_dir=str(path), **fields))  # type: ignore[arg-type]


def prompt_of(*images: object) -> list[int]:
    """Returns a prompt with this many images among its words."""
    tokens = [5, 6, 7]
    for place, _ in enumerate(images):
        tokens += [*[IMAGE_TOKEN] * TOKENS, 30 + place, 31, 32]
    return tokens


def answer(core: EngineCore, prompt: list[int], *images: bytes, **options: Any) -> tuple[list[int], int]:
    """Returns the tokens of an answer, and those of its prompt that were cached."""
    core.add(GenRequest(request_id="it", prompt=prompt, images=images, sampling=GREEDY, **options), prompt)
    tokens, cached = list[int](), 0
    while core.has_work:
        for output in core.step():
            assert isinstance(output, GenChunk), output
            tokens += output.token_ids
            if output.usage is not None:
                assert output.usage.prompt_tokens == len(prompt)
                cached = output.usage.cached_tokens
    return tokens, cached


def theirs(core: EngineCore, model: Any, prompt: list[int], *images: bytes) -> dict[str, torch.Tensor]:
    processor = core.input_processor._images
    assert processor is not None
    pixels = np.stack([processor.prepare(image).pixels for image in images])
    return {"input_ids": torch.tensor([prompt]), "pixel_values": torch.from_numpy(pixels)}


@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path: Path, tower: Any) -> None:
    model, images = save_llava(tmp_path, tower), (picture(1), picture(2, 90, 33, "JPEG"))
    core, prompt = core_of(tmp_path), prompt_of(*images)
    inputs = theirs(core, model, prompt, *images)
    with torch.inference_mode():
        logits = model(**inputs).logits[0]
        generated = model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(prompt) :]
    request = GenRequest(request_id="it", prompt=prompt, images=images)
    (seq,) = core.input_processor.sequences(request, prompt, b"", 0.0)
    seq.block_ids = core.pool.allocate(core.pool.blocks_for(len(prompt)))
    ours = core.runner.logits([ScheduledChunk(seq, 0, len(prompt))], range(len(prompt)))[1:]
    core.runner.release(seq)
    core.pool.free(seq.block_ids)
    assert (ours - logits).abs().max() < 1e-4
    for budget in (64, 5):  # a chunk begins and ends within an image
        small = core_of(tmp_path, max_batch_tokens=budget)
        assert answer(small, prompt, *images)[0] == generated.tolist()


def test_two_images_never_share_a_block_and_the_same_image_does(tmp_path: Path) -> None:
    save_llava(tmp_path)
    core, one, other = core_of(tmp_path), picture(1), picture(2)
    alone = {image: answer(core_of(tmp_path, prefix_cache=False), prompt_of(image), image)[0] for image in (one, other)}
    assert alone[one] != alone[other]
    prompt = prompt_of(one)
    assert answer(core, prompt, one) == (alone[one], 0)
    assert answer(core, prompt, other) == (alone[other], 0)
    assert answer(core, prompt, one) == (alone[one], len(prompt) // 8 * 8 - (len(prompt) % 8 == 0) * 8)
    again, cached = answer(core, prompt_of(one, other), one, other)  # the conversation goes on with another image
    assert cached == 16
    assert again == answer(core_of(tmp_path, prefix_cache=False), prompt_of(one, other), one, other)[0]
    assert answer(core, prompt, one, cache_salt="another team")[1] == 0
    converted = io.BytesIO()
    Image.open(io.BytesIO(one)).save(converted, "WEBP", lossless=True)
    assert answer(core, prompt, converted.getvalue())[1] > 0  # equal pixels


def test_prompts_with_images_that_are_evicted_and_batched_say_the_same(tmp_path: Path) -> None:
    save_llava(tmp_path)
    images = [picture(seed) for seed in range(4)]
    expected = [answer(core_of(tmp_path), prompt_of(image), image)[0] for image in images]
    core = core_of(tmp_path, num_blocks=9, max_batch_tokens=16)
    found: dict[str, list[int]] = {}
    for index, image in enumerate(images):  # each is more urgent than those before it
        prompt = prompt_of(image)
        request = GenRequest(request_id=f"{index}", prompt=prompt, images=(image,), sampling=GREEDY, priority=9 - index)
        core.add(request, prompt)
        for _ in range(3 if index < 3 else 200):
            for output in core.step():
                assert isinstance(output, GenChunk)
                found.setdefault(output.request_id, []).extend(output.token_ids)
    assert [found[str(index)] for index in range(4)] == expected
    assert core.stats().preemptions > 0


def test_the_offline_engine_answers_about_an_image(tmp_path: Path) -> None:
    save_llava(tmp_path)
    llm = LLM(tmp_path, device="cpu", num_blocks=40)
    turn = Message("user", "what is this?", parts=("what is this?", None))
    one, other = (llm.chat([turn], GREEDY, images=[picture(seed)]) for seed in (1, 2))
    assert one.token_ids != other.token_ids
    assert one.usage.prompt_tokens == other.usage.prompt_tokens > TOKENS


def test_image_tokens_without_their_images_are_refused(tmp_path: Path) -> None:
    save_llava(tmp_path)
    core, image = core_of(tmp_path), picture(1)
    for prompt, images in (
        (prompt_of(1), ()),
        ([5, 6], (image,)),
        (prompt_of(1), (image, image)),
        ([IMAGE_TOKEN] * 3, (image,)),
        ([*[IMAGE_TOKEN] * (TOKENS - 1), 5, IMAGE_TOKEN], (image,)),
    ):
        with pytest.raises(UsageError, match=r"image tokens in the prompt, but \d images"):
            core.add(GenRequest(request_id="it", prompt=prompt, images=images), prompt)
    assert not core.has_work


def test_a_chat_shows_images_by_the_template_and_a_message_cannot_forge_one(tmp_path: Path) -> None:
    save_llava(tmp_path)
    core = core_of(tmp_path)
    turn = Message("user", "what is <image>?", parts=("what is <image>?", None, "this"))
    prompt = core.tokenizer.chat_prompt([turn])
    assert prompt.count(IMAGE_TOKEN) == TOKENS
    before = core.tokenizer.encode("user: what is ")
    assert prompt[: len(before)] == before
    (tmp_path / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    assert core_of(tmp_path).tokenizer.chat_prompt([turn]).count(IMAGE_TOKEN) == TOKENS
    (tmp_path / "chat_template.jinja").write_text("{% for each in messages %}type{% endfor %}")
    with pytest.raises(UsageError, match="shows 0 of 1 images"):
        core_of(tmp_path).tokenizer.chat_prompt([turn])


@pytest.mark.parametrize(("width", "height"), [(28, 28), (300, 41), (41, 300), (9, 11)])
@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_pixels_are_those_of_transformers(tmp_path: Path, tower: Any, width: int, height: int) -> None:
    save_llava(tmp_path, tower)
    spec = read_architecture(tmp_path, serves=True).vision
    assert spec is not None
    fields = json.loads((tmp_path / "preprocessor_config.json").read_text())
    processor = (CLIPImageProcessorPil if tower == "clip" else SiglipImageProcessorPil)(**fields)
    data = picture(4, width, height)
    expected = processor(Image.open(io.BytesIO(data)), return_tensors="np")["pixel_values"][0]
    assert np.abs(ImageProcessor(tmp_path, spec).prepare(data).pixels - expected).max() < 1e-5


def test_files_that_are_no_images_or_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llava(tmp_path)
    core, whole = core_of(tmp_path), picture(1)
    chance = random.Random(5)
    broken = [b"", b"\x89PNG\r\n\x1a\n", chance.randbytes(500), whole[: len(whole) // 2], b"GIF89a" + bytes(50)]
    for data in broken:
        with pytest.raises(UsageError, match="image 0 cannot be read"):
            answer(core, prompt_of(1), data)
    with pytest.raises(UsageError, match="too narrow"):
        answer(core, prompt_of(1), picture(1, 900, 2))
    monkeypatch.setattr("raytide.actors.engine.model.vision.pixels.MAX_IMAGE_PIXELS", 40 * 31 - 1)
    with pytest.raises(UsageError, match="40 times 31 pixels"):
        answer(core, prompt_of(1), whole)
    with pytest.raises(UsageError, match="bytes; at most"):
        answer(core, prompt_of(1), bytes(limits.MAX_IMAGE_BYTES + 1))


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("config.json", {"vision_feature_layer": [-2, -3]}, "vision_feature_layer"),
        ("config.json", {"vision_feature_layer": -1}, "vision_feature_layer"),
        ("config.json", {"vision_config": {"model_type": "pixtral"}}, "tower pixtral"),
        ("config.json", {"text_config": {"model_type": "mamba"}}, "decoder mamba"),
        ("preprocessor_config.json", {"do_pad": True}, "do_pad"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 99}}, "99 pixels do not fit"),
    ],
)
def test_what_is_not_supported_is_refused_at_start(tmp_path: Path, file: str, change: Any, said: str) -> None:
    save_llava(tmp_path)
    body = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(body | change))
    with pytest.raises(ConfigError, match=said):
        core_of(tmp_path)


def test_what_trains_or_compresses_models_refuses_one_that_reads_images(tmp_path: Path) -> None:
    save_llava(tmp_path)
    with pytest.raises(ConfigError, match="reads images, which only the native engine does"):
        read_architecture(tmp_path)


def test_several_processes_refuse_a_model_that_reads_images(tmp_path: Path) -> None:
    save_llava(tmp_path)
    arch = read_architecture(tmp_path, serves=True)
    check_divides(arch, 1)
    with pytest.raises(ConfigError, match="a model that reads images runs in one process"):
        check_divides(arch, 2)
    with pytest.raises(ConfigError, match="a model that reads images keeps its weights"):
        LLM(tmp_path, weights_memory_gb=1.0)


def test_a_failure_in_the_tower_ends_its_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llava(tmp_path)
    core, image = core_of(tmp_path), picture(1)
    assert core.runner._loaded.vision is not None

    def fail(*_: object) -> torch.Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(core.runner._loaded.vision, "encode", fail)
    core.add(GenRequest(request_id="it", prompt=prompt_of(1), images=(image,), sampling=GREEDY), prompt_of(1))
    core.add(GenRequest(request_id="other", prompt=[5, 6], sampling=GREEDY), [5, 6])
    outputs = [each for _ in range(15) for each in core.step()]
    assert [each.request_id for each in outputs if isinstance(each, RequestFailure)] == ["it"]
    assert sum(len(each.token_ids) for each in outputs if isinstance(each, GenChunk)) == 12
