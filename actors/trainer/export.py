"""Write a model as a Hugging Face directory that transformers, vLLM and the native engine load."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from raytide.actors.trainer.data import TokenData
from raytide.actors.trainer.decoder import Decoder
from raytide.actors.trainer.group import Group
from raytide.actors.trainer.hf import to_hf
from raytide.actors.trainer.parallel import INIT_STD
from raytide.core.errors import RaytideError
from raytide.core.storage import full_disk_is_an_error
from raytide.core.tokens import TokenManifest
from raytide.core.train_spec import TrainSpec

_DTYPES = {"bf16": (torch.bfloat16, "bfloat16"), "fp32": (torch.float32, "float32")}


def export(parts: Sequence[Decoder], spec: TrainSpec, data: TokenData, group: Group) -> Path:
    """Gather the weights on rank 0 and write `out`/model there, whole or not at all. All ranks call it together."""
    (model,) = parts
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)  # empty on all ranks but the first
    own = {name: weight for name, weight in whole.items() if isinstance(weight, Tensor)}
    weights = to_hf(model.arch, own) if group.is_first else {}
    target = Path(spec.out) / "model"
    failed = group.from_first(_write(weights, spec, data, target) if group.is_first else None)
    if failed is not None:
        raise failed
    return target


def _write(weights: Mapping[str, Tensor], spec: TrainSpec, data: TokenData, target: Path) -> RaytideError | None:
    from safetensors.torch import save_file

    dtype, _ = _DTYPES[spec.precision]
    part = target.with_name(f".model.{uuid.uuid4().hex[:8]}.part")
    try:
        with full_disk_is_an_error(str(target)):
            part.mkdir(parents=True)
            save_file(
                {name: tensor.to(dtype).contiguous() for name, tensor in weights.items()},
                part / "model.safetensors",
                metadata={"format": "pt"},
            )
            (part / "model.safetensors").chmod(0o644)  # safetensors makes it the owner's alone
            config = hf_config(spec, data.manifest)
            _json(part / "config.json", config)
            generation = {"bos_token_id": data.manifest.eos_id, "eos_token_id": data.manifest.eos_id}
            _json(part / "generation_config.json", generation)
            for source, name in ((data.manifest.tokenizer, "tokenizer.json"), ("tokenizer_config.json",) * 2):
                if (data.path / source).is_file():
                    shutil.copyfile(data.path / source, part / name)
            if target.exists():
                shutil.rmtree(target)
            part.rename(target)
    except RaytideError as error:
        shutil.rmtree(part, ignore_errors=True)
        return error
    return None


def hf_config(spec: TrainSpec, manifest: TokenManifest) -> dict[str, object]:
    """LlamaForCausalLM's `config.json`. Documents are only ever separated by eos, which so is also what begins one."""
    model, eos_id = spec.model, manifest.eos_id
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size or manifest.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.n_ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": INIT_STD,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "use_cache": True,
        "torch_dtype": _DTYPES[spec.precision][1],
    }


def _json(path: Path, body: Mapping[str, object]) -> None:
    path.write_text(json.dumps(body, indent=2) + "\n")
