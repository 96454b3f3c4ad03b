"""A CLIP or SigLIP vision encoder with LLaVA's projector. It turns an image's pixels into the vectors that stand for
the image in a prompt.

Shape suffixes: B images, P positions of the encoder, H the encoder's width, N the decoder's hidden size, T tokens of a
batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from raytide.actors.engine.sequence import ImageSpan, ScheduledChunk
from raytide.actors.models.components.llava import VisionActivation, VisionSpec
from raytide.actors.models.quantized.model_weights import ModelWeights

Tensor = torch.Tensor

_MOST_KEPT_BYTES = 256 << 20
"""The most bytes of kept features of recent images. They serve later chunks of the same prompt, and the same image
again.
"""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The rows of a step's flat batch that stand for images, and the vectors that replace the embeddings of these
    rows.
    """

    rows_T: Tensor
    features_TN: Tensor


class VisionEncoder:
    """The weights and the computation of the vision encoder and the projector. Raises DataError for missing weights."""

    def __init__(self, spec: VisionSpec, hidden_size: int, weights: ModelWeights) -> None:
        self._spec, self._weights = spec, weights
        self._root = "vision_tower.vision_model."
        if f"{self._root}embeddings.patch_embedding.weight" not in weights:
            self._root = "vision_tower."  # transformers 5
        size, patch, width = spec.hidden_size, spec.patch_size, spec.ffn_size
        is_clip = spec.kind == "clip"
        get = self._get
        self._patches = get("embeddings.patch_embedding.weight", size, 3, patch, patch)
        self._patch_bias = None if is_clip else get("embeddings.patch_embedding.bias", size)
        self._class = get("embeddings.class_embedding", size) if is_clip else None
        self._positions = get("embeddings.position_embedding.weight", spec.num_positions, size)
        self._pre_norm = self._norm("pre_layrnorm") if is_clip else None  # spelled so
        self._layers = [
            (
                self._norm(f"{at}layer_norm1"),
                [self._linear(f"{at}self_attn.{name}_proj", size, size) for name in ("q", "k", "v", "out")],
                self._norm(f"{at}layer_norm2"),
                self._linear(f"{at}mlp.fc1", width, size),
                self._linear(f"{at}mlp.fc2", size, width),
            )
            for at in (f"encoder.layers.{index}." for index in range(spec.num_layers))
        ]
        self._root = "multi_modal_projector."
        self._project = [
            self._linear("linear_1", hidden_size, size, bias=spec.projector_bias),
            self._linear("linear_2", hidden_size, hidden_size, bias=spec.projector_bias),
        ]
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    @torch.inference_mode()
    def encode(self, pixels_BCHW: Tensor) -> Tensor:
        """Encodes images. Returns vectors of the shape [B, tokens per image, N], which replace the images in a
        prompt.
        """
        spec = self._spec
        x_BPH = F.conv2d(pixels_BCHW.to(self._patches), self._patches, self._patch_bias, stride=spec.patch_size)
        x_BPH = x_BPH.flatten(2).transpose(1, 2)
        if self._class is not None:
            x_BPH = torch.cat((self._class.expand(len(x_BPH), 1, -1), x_BPH), 1)
        x_BPH = x_BPH + self._positions
        if self._pre_norm is not None:
            x_BPH = self._normed(x_BPH, self._pre_norm)
        for norm1, attention, norm2, up, down in self._layers:
            x_BPH = x_BPH + self._attend(self._normed(x_BPH, norm1), attention)
            hidden = _ACTIVATIONS[spec.activation](F.linear(self._normed(x_BPH, norm2), *up))
            x_BPH = x_BPH + F.linear(hidden, *down)
        features = x_BPH[:, 1:] if spec.drops_first else x_BPH
        first, second = self._project
        return F.linear(_ACTIVATIONS[spec.projector_activation](F.linear(features, *first)), *second)

    def rows(self, chunks: Items[ScheduledChunk]) -> ImageRows | None:
        """Returns the rows of a step that stand for images, or None if there are no such rows."""
        rows, parts, offset = list[int](), list[Tensor](), 0
        for chunk in chunks:
            for span in chunk.seq.images:
                first = max(chunk.start, span.start)
                end = min(chunk.start + chunk.length, span.start + span.length)
                if first < end:
                    rows += range(offset + first - chunk.start, offset + end - chunk.start)
                    parts.append(self._features(span)[first - span.start : end - span.start])
            offset += chunk.length
        if not rows:
            return None
        return ImageRows(torch.tensor(rows, device=self._patches.device), torch.cat(parts))

    def _features(self, span: ImageSpan) -> Tensor:
        found = self._kept.pop(span.digest, None)
        if found is None:
            (found,) = self.encode(torch.from_numpy(span.pixels)[None].to(self._patches.device))
        self._kept[span.digest] = found
        while len(self._kept) > 1 and len(self._kept) * found.nbytes > _MOST_KEPT_BYTES:
            self._kept.popitem(last=False)
        return found

    def _attend(self, x_BPH: Tensor, attention: list[tuple[Tensor, Tensor | None]]) -> Tensor:
        q, k, v = (
            F.linear(x_BPH, *each).unflatten(-1, (self._spec.num_heads, -1)).transpose(1, 2) for each in attention[:3]
        )
        return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), *attention[3])

    def _normed(self, x_BPH: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
        return F.layer_norm(x_BPH, (x_BPH.shape[-1],), *norm, eps=self._spec.norm_eps)

    def _norm(self, path: str) -> tuple[Tensor, Tensor]:
        size = self._spec.hidden_size
        return self._get(f"{path}.weight", size), self._get(f"{path}.bias", size)

    def _linear(self, path: str, rows: int, columns: int, *, bias: bool = True) -> tuple[Tensor, Tensor | None]:
        return self._get(f"{path}.weight", rows, columns), self._get(f"{path}.bias", rows) if bias else None

    def _get(self, path: str, *shape: int) -> Tensor:
        return self._weights.get(self._root + path, *shape)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[VisionActivation, Callable[[Tensor], Tensor]] = {
    "quick_gelu": _quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
}
