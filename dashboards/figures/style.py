"""The style of all figures, and their conversion to SVG, PNG or an HTML page.

In SVG, text and axes take the colour of the surrounding text. A figure in a notebook or on a page is therefore readable
in light and dark mode. Text stays text: it can be selected, searched and read by a screen reader.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from raytide.core.errors import UsageError
from raytide.core.io.storage import full_disk_is_an_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, VIOLET, GREY = "#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#94a3b8"
"""Colours with enough contrast on white and on black."""
FORMATS = (".svg", ".png", ".html")
_INK = "#010203"
"""A placeholder for the colour of the text around a figure."""
_INCH = 96.0
_PNG_DPI = 160
_STYLE: Mapping[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": _INK,
    "axes.facecolor": "none",
    "axes.formatter.use_mathtext": False,
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.unicode_minus": False,
    "figure.facecolor": "none",
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans"],
    "grid.alpha": 0.15,
    "grid.color": _INK,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "path.simplify": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "raytide",
    "text.color": _INK,
    "text.parse_math": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_PAGE = (
    "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    "<title>{title}</title><style>:root{{color-scheme:light dark}}body{{margin:2em auto;max-width:{width}px;"
    "padding:0 1em;font:14px/1.5 system-ui,sans-serif;background:Canvas;color:CanvasText}}</style>"
    "<body>{body}</body></html>\n"
)


class Picture:
    """A drawn figure. A notebook displays it, `str()` returns its SVG, and `save` writes a .svg, .png or .html file."""

    def __init__(self, draw: Callable[[Figure], None], title: str, *, width: int = 860, height: int = 480) -> None:
        self._draw, self._title, self._size = draw, title, (width, height)

    def svg(self) -> str:
        text = self._saved("svg").decode()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
        text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
        text = re.sub(r'<g id="hover-([0-9a-f]*)">', lambda found: f"<g><title>{_unhidden(found[1])}</title>", text)
        text = text.replace("*{stroke-linejoin", ".raytide-figure *{stroke-linejoin", 1).replace(_INK, "currentColor")
        about = f'class="raytide-figure" role="img" aria-label="{escape(self._title)}"'
        style = f"max-width:100%;width:{self._size[0]}px;height:auto;font-family:system-ui,sans-serif"
        return re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', rf'<svg {about} style="{style}" \1', text, count=1)

    def png(self) -> bytes:
        """Returns the figure as PNG, on a white background."""
        return self._saved("png", dpi=_PNG_DPI, facecolor="white")

    def html(self) -> str:
        """Returns an HTML page with the figure, in light or dark mode like the reader's system."""
        return _PAGE.format(title=escape(self._title), width=self._size[0], body=self.svg())

    def save(self, path: str | Path) -> Path:
        """Writes the figure as a .svg, .png or .html file, by the suffix of `path`."""
        path = Path(path)
        check_format(path)
        with full_disk_is_an_error(str(path)):
            if path.suffix == ".png":
                path.write_bytes(self.png())
            elif path.suffix == ".html":
                path.write_text(self.html(), encoding="utf-8")
            else:
                ground = 'style="color:#1f2328;background:#fff;'
                path.write_text(self.svg().replace('style="', ground, 1) + "\n", encoding="utf-8")
        return path

    def __str__(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return self.svg()

    def _saved(self, kind: str, **options: Any) -> bytes:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        with rc_context(cast(Any, _STYLE)):
            size = self._size[0] / _INCH, self._size[1] / _INCH
            figure = Figure(figsize=size, layout="constrained")
            self._draw(figure)
            figure.suptitle(self._title, x=0.01, ha="left", fontsize=11, fontweight="bold")
            written = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(written, format=kind, metadata=metadata, **options)
            return written.getvalue()


def check_format(path: Path) -> None:
    """Raises UsageError if a figure cannot be written to a file with this suffix."""
    if path.suffix not in FORMATS:
        raise UsageError(f"cannot draw into {path}.", hint=f"Name a {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file.")


def label(axes: Axes, title: str, *, x: str = "", y: str = "") -> None:
    """Sets a panel's title and the labels of its axes, with units."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def line_at(axes: Axes, x: float, colour: str, text: str) -> None:
    """Draws a vertical line. In SVG the line shows `text` while the pointer is over it."""
    axes.axvline(x, color=colour, linewidth=1.1, alpha=0.8, zorder=1).set_gid(f"hover-{text.encode().hex()}")


def distribution(axes: Axes, values: Sequence[float], colour: str, name: str = "") -> None:
    """Draws the cumulative distribution of the values: for each x, the share of values that are at most x. Draws
    nothing if there are no values.
    """
    if not values:
        return
    ordered = sorted(values)
    shares = [(at + 1) / len(ordered) for at in range(len(ordered))]
    axes.step([ordered[0], *ordered], [0.0, *shares], where="post", color=colour, label=name or None)
    axes.set_ylim(0, 1.02)


def _unhidden(text: str) -> str:
    return escape(bytes.fromhex(text).decode())
