"""Losses between a student's and a teacher's predictions: forward KL, reverse KL, or the generalised Jensen-Shannon
divergence (Agarwal et al. 2024).

A loss covers the whole vocabulary, or only the teacher's most likely tokens. In the second case all other tokens form
one bucket.

Shapes: N tokens, V vocabulary, K tokens that are compared one by one, B batch, T time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import zlib
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raytide.actors.models.content import content_digest
from raytide.actors.models.families import architecture_of
from raytide.actors.models.model_config import read_json
from raytide.actors.trainer.model.loss import IGNORE, Micro
from raytide.actors.trainer.model.transformer import Transformer
from raytide.core.errors import ConfigError
from raytide.core.io.storage import FullDiskError, full_disk_is_an_error
from raytide.core.specs.model import DistillSpec

_log = logging.getLogger(__name__)

_LEAST_REST = 1e-6
"""The least probability of the bucket for all other tokens, so that its logarithm is finite."""
_DAMAGE = (OSError, ValueError, KeyError, EOFError, RuntimeError, BadZipFile, zlib.error)
"""The errors of numpy for a missing or damaged archive. RuntimeError stands for an unknown compression."""


class TopPredictions(NamedTuple):
    """A teacher's most likely tokens [..., K] and their log probabilities. All other tokens count as one bucket."""

    ids: Tensor
    log_p: Tensor


def distillation_sum(
    student_NV: Tensor, teacher: Tensor | TopPredictions, targets_N: Tensor, spec: DistillSpec
) -> Tensor:
    """Returns the divergence in float32, summed over the tokens whose target counts.

    `teacher` is the teacher's logits [N, V], or its most likely tokens at the spec's temperature. The logits of student
    and teacher are divided by the temperature. The result is not multiplied by the squared temperature.
    """
    counts_N = targets_N != IGNORE
    log_q_NV = F.log_softmax(student_NV[counts_N].float() / spec.temperature, -1)
    if isinstance(teacher, TopPredictions):
        log_p_NK = with_rest(teacher.log_p[counts_N].float())
        log_q_NV = with_rest(log_q_NV.gather(-1, teacher.ids[counts_N]))
    else:
        log_p_NK = F.log_softmax(teacher[counts_N].float() / spec.temperature, -1)
    if spec.loss == "forward_kl":
        return _kl(log_p_NK, log_q_NV)
    if spec.loss == "reverse_kl":
        return _kl(log_q_NV, log_p_NK)
    weights = torch.tensor([1 - spec.beta, spec.beta], device=log_q_NV.device).log()
    mixture = torch.logsumexp(torch.stack((log_q_NV + weights[0], log_p_NK + weights[1])), 0)
    return spec.beta * _kl(log_p_NK, mixture) + (1 - spec.beta) * _kl(log_q_NV, mixture)


def top_predictions(logits: Tensor, spec: DistillSpec) -> TopPredictions:
    """Returns the `top_k` most likely tokens of each row of logits [..., V]."""
    log_p, ids = F.log_softmax(logits.float() / spec.temperature, -1).topk(min(spec.top_k, logits.shape[-1]), -1)
    return TopPredictions(ids, log_p)


def with_rest(log_NK: Tensor) -> Tensor:
    """Appends a column to log probabilities [N, K] and returns [N, K + 1]. The column is the logarithm of the total
    probability of all tokens that are not among the K.
    """
    rest_N1 = (1 - log_NK.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat((log_NK, rest_N1.log()), -1)


class Teacher:
    """A frozen model that predicts each microbatch. Every rank holds the whole model.

    With a cache, the most likely tokens of a sequence are computed once. Later epochs and runs read them from the
    cache.
    """

    def __init__(self, spec: DistillSpec, model: Transformer, weights_dtype: torch.dtype, device: torch.device) -> None:
        """`model` must have its weights already."""
        self.spec, self._device = spec, device
        self._model = model.to(device=device, dtype=weights_dtype).eval().requires_grad_(False)
        self._cache = None if not spec.cache else _Cache(spec)

    @torch.no_grad()
    def predict(self, micro: Micro) -> Tensor | TopPredictions:
        """Returns the teacher's logits [B, T, V]. If the spec sets `top_k`, returns the most likely tokens [B, T, K]
        instead.
        """
        if self._cache is None:
            logits_BTV: Tensor = self._model(micro.inputs, None, micro.documents)
            return top_predictions(logits_BTV, self.spec) if self.spec.top_k else logits_BTV
        keys = [self._cache.key(micro, row) for row in range(len(micro.inputs))]
        found = [self._cache.read(key) for key in keys]
        missing = [row for row, each in enumerate(found) if each is None]
        if missing:
            documents = None if micro.documents is None else micro.documents[missing]
            top = top_predictions(self._model(micro.inputs[missing], None, documents), self.spec)
            for at, row in enumerate(missing):
                found[row] = self._cache.write(keys[row], TopPredictions(top.ids[at].cpu(), top.log_p[at].cpu()))
        rows = [each for each in found if each is not None]
        return TopPredictions(
            torch.stack([each.ids for each in rows]).to(self._device),
            torch.stack([each.log_p for each in rows]).to(self._device),
        )


def check_teacher(spec: DistillSpec, vocab_size: int, seq_len: int) -> None:
    """Raises ConfigError if the teacher and the student have different vocabularies, or if the teacher's context is
    shorter than `seq_len`.
    """
    arch = architecture_of(read_json(Path(spec.teacher) / "config.json"), spec.teacher)
    if arch.vocab_size != vocab_size:
        raise ConfigError(
            f"the teacher {spec.teacher} has a vocabulary of {arch.vocab_size}, and the student one of {vocab_size}.",
            hint="Distil between models of one tokenizer.",
        )
    if arch.max_model_len < seq_len:
        raise ConfigError(
            f"seq_len {seq_len} is above the {arch.max_model_len} positions of the teacher {spec.teacher}.",
            hint="Lower seq_len.",
        )


class _Cache:
    """A cache with one file per sequence: 6 bytes for each of the `top_k` most likely tokens at each position."""

    def __init__(self, spec: DistillSpec) -> None:
        made_by = f"{content_digest(Path(spec.teacher))}-top{spec.top_k}-t{spec.temperature:g}"
        self._folder = Path(spec.cache) / made_by
        self._is_full = False

    def key(self, micro: Micro, row: int) -> str:
        digest = hashlib.blake2b(micro.inputs[row].cpu().numpy().tobytes(), digest_size=16)
        if micro.documents is not None:
            digest.update(micro.documents[row].cpu().numpy().tobytes())
        return digest.hexdigest()

    def read(self, key: str) -> TopPredictions | None:
        """Returns a sequence's predictions; None if there is no file or it is damaged."""
        try:
            with open(self._path(key), "rb") as body, np.load(body) as file:
                return TopPredictions(
                    torch.from_numpy(file["ids"].astype(np.int64)), torch.from_numpy(file["log_p"].astype(np.float32))
                )
        except _DAMAGE:
            return None

    def write(self, key: str, found: TopPredictions) -> TopPredictions:
        """Stores a sequence's predictions, and returns them as rounded as `read` will return them. While the disk is
        full nothing is stored, and a later epoch computes the predictions again.
        """
        ids, log_p = found.ids.numpy().astype(np.int32), found.log_p.numpy().astype(np.float16)
        path = self._path(key)
        staged = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.npz")
        try:
            with full_disk_is_an_error(str(self._folder)):
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    np.savez(staged, ids=ids, log_p=log_p)
                    os.replace(staged, path)
                finally:
                    staged.unlink(missing_ok=True)
        except FullDiskError as error:
            if not self._is_full:
                _log.warning("the teacher's predictions are not kept: %s", error)
            self._is_full = True
        return TopPredictions(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(log_p.astype(np.float32)))

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.npz"


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Returns KL(a | b), summed over all rows."""
    return F.kl_div(log_b, log_a, reduction="sum", log_target=True)
