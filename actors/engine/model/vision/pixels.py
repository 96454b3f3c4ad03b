"""Turns an image file into the pixels that a vision encoder reads, as the image processor's config in the model
directory says.

The files come from unknown clients. Their format, bytes and number of pixels are checked against limits before anything
is decoded.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raytide.actors.engine.limits import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from raytide.actors.models.components.llava import VisionSpec
from raytide.actors.models.model_config import Fields, read_json
from raytide.core.errors import ConfigError, UsageError

Pixels = npt.NDArray[np.float32]

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HINT = f"Send {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]} of at most {MAX_IMAGE_PIXELS >> 20} megapixels."


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """The pixels [3, S, S] of an image. Images with equal pixels have the same digest."""

    pixels: Pixels
    digest: bytes


class ImageProcessor:
    """Resizes, crops and scales images as transformers does for the same model."""

    def __init__(self, model_dir: Path, spec: VisionSpec) -> None:
        """Raises ConfigError for an image processor with a step that is not supported."""
        self.spec, is_clip = spec, spec.kind == "clip"
        fields, self._size = _processor_fields(model_dir), spec.image_size
        if fields.flag("do_pad", False):
            raise ConfigError(f"{fields.where}: do_pad is not supported.", hint="Set it to false and crop instead.")
        self._resamples = fields.whole("resample", 3)
        self._mean = _triple(fields, "image_mean", _CLIP_MEAN if is_clip else (0.5, 0.5, 0.5))
        self._std = _triple(fields, "image_std", _CLIP_STD if is_clip else (0.5, 0.5, 0.5))
        self._scale = fields.number("rescale_factor", 1 / 255, above=0)
        self._crops = fields.flag("do_center_crop", is_clip)
        size = fields.body.get("size")
        self._short = size if isinstance(size, int) else fields.section("size").body.get("shortest_edge")
        height = fields.section("size").body.get("height", spec.image_size) if isinstance(size, dict) else None
        found = self._short if self._short is not None else height
        if found not in (None, spec.image_size) or (self._short is not None and not self._crops):
            raise ConfigError(
                f"{fields.where}: images of {found} pixels do not fit the vision tower's {spec.image_size}.",
                hint="Export the model with its own image processor.",
            )

    def prepare(self, data: bytes, index: int = 0) -> PreparedImage:
        """Returns an image's pixels. Raises UsageError if the data is not an image in a supported format, or if the
        image is too large or too narrow.
        """
        pixels = self._scaled(self._resized(_decoded(data, f"image {index}")))
        return PreparedImage(pixels, blake2b(pixels.tobytes(), digest_size=16).digest())

    def _resized(self, image: Any) -> npt.NDArray[np.uint8]:
        size, (width, height) = self._size, image.size
        if self._short is None:
            return np.asarray(image.resize((size, size), self._resamples))
        short, long = sorted((width, height))
        longer = int(size * long / short)
        shape = (size, longer) if width <= height else (longer, size)
        whole = np.asarray(image.resize(shape, self._resamples))
        top, left = (whole.shape[0] - size) // 2, (whole.shape[1] - size) // 2
        return whole[top : top + size, left : left + size]

    def _scaled(self, image_HWC: npt.NDArray[np.uint8]) -> Pixels:
        scaled = (image_HWC.astype(np.float64) * self._scale).astype(np.float32)
        return np.ascontiguousarray(((scaled - self._mean) / self._std).transpose(2, 0, 1))


def _decoded(data: bytes, who: str) -> Any:
    """Returns the image in RGB, rotated upright as its EXIF data says."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ConfigError("images need the package pillow.", hint="Run pip install pillow.") from None
    if len(data) > MAX_IMAGE_BYTES:
        raise UsageError(
            f"{who} has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are read.", hint="Send a smaller one."
        )
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_IMAGE_PIXELS:
                raise UsageError(f"{who} has {width} times {height} pixels.", hint=_HINT)
            if max(width, height) > _MOST_RATIO * min(width, height):
                raise UsageError(f"{who} is {width} times {height}: too narrow.", hint="Crop it.")
            return ImageOps.exif_transpose(image).convert("RGB")
    except UsageError:
        raise
    except Exception as error:  # the library raises a dozen kinds for broken files
        raise UsageError(f"{who} cannot be read: {type(error).__name__}.", hint=_HINT) from None


_MOST_RATIO = 200
"""The largest ratio of an image's longer side to its shorter one. Resizing keeps the ratio, so that a longer image
would take too much memory.
"""


def _processor_fields(model_dir: Path) -> Fields:
    path = model_dir / "preprocessor_config.json"
    if path.exists():
        return Fields(read_json(path), str(path))
    path = model_dir / "processor_config.json"
    return Fields(read_json(path), str(path)).section("image_processor") if path.exists() else Fields({}, str(path))


def _triple(fields: Fields, name: str, default: tuple[float, float, float]) -> Pixels:
    values = fields.numbers(name, 3) if fields.body.get(name) is not None else default
    return np.array(values, np.float32)
