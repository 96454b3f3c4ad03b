"""The perplexity of a text under a small language model, computed on the CPU with the trainer's model code."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from raytide.core.errors import DataError
from raytide.core.io.private_paths import check_path
from raytide.core.specs.cleaning import PerplexityRule

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from raytide.actors.trainer.model.transformer import Transformer


def perplexity_rule(text: str, rule: PerplexityRule) -> str | None:
    """Returns the reason to drop the text, or None to keep it. Texts of fewer than two tokens are kept."""
    perplexity = perplexity_of(text, rule.model, rule.max_tokens)
    if perplexity > rule.max_perplexity:
        return "perplexity_high"
    return "perplexity_low" if perplexity < rule.min_perplexity else None


def perplexity_of(text: str, model: str, max_tokens: int) -> float:
    """Returns the perplexity exp(L) of a text, or NaN if the text has fewer than two tokens.

    L is the mean negative log-likelihood, in nats, of tokens 2 to `max_tokens`. Each text is scored alone and on one
    thread, so no value depends on the batch or on the machine's load.
    """
    import torch
    import torch.nn.functional as F

    network, tokenizer = _load(model)
    # Four bytes a token is a high estimate: a longer start has at least `max_tokens` tokens.
    ids = tokenizer.encode(text[: max_tokens * 16], add_special_tokens=False).ids[: min(max_tokens, network.max_len)]
    if len(ids) < 2:
        return math.nan
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            ids_BT = torch.tensor([ids])
            logits_TV = network(ids_BT[:, :-1])[0].float()
            return math.exp(min(F.cross_entropy(logits_TV, ids_BT[0, 1:]).item(), 700.0))
    finally:
        torch.set_num_threads(threads)


def check_model(model: str) -> Path:
    """Returns the folder of a model. Raises DataError if its config or tokenizer is missing, and DeniedError for a
    private path.
    """
    check_path(model, f"perplexity model {model}")
    for folder in (Path(model), Path(model) / "model"):
        if (folder / "config.json").is_file():
            if (folder / "tokenizer.json").is_file():
                return folder
            raise DataError(f"{folder} has no tokenizer.json.", hint="Copy the model's tokenizer there.")
    raise DataError(f"perplexity model {model} has no config.json.", hint="Give a Hugging Face model directory.")


@lru_cache(maxsize=1)
def _load(model: str) -> tuple[Transformer, Tokenizer]:
    """Returns the model in fp32 and its tokenizer, loaded once a process."""
    import torch

    from raytide.actors.models.families import architecture_of
    from raytide.actors.models.model_config import read_json
    from raytide.actors.trainer.hf.init_weights import cut_block
    from raytide.actors.trainer.hf.weight_mapping import HfWeights
    from raytide.actors.trainer.model.transformer import Transformer
    from raytide.pipelines.tokenizer.bpe import load_bpe

    folder = check_model(model)
    config = folder / "config.json"
    arch = architecture_of(read_json(config), str(config))
    network, weights = Transformer(arch, arch.max_model_len), HfWeights(folder, arch)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(weights.read(name, cut_block(parameter.shape, ())))
    where = folder / "tokenizer.json"
    return network.eval(), load_bpe(where.read_bytes(), str(where))
