"""Pages of the shards of a tensor, as lines and as a drawing."""

from dataclasses import dataclass
from html import escape
from math import prod

from spmdzero._display import page_of
from spmdzero.inspect import Shard, ShardView
from spmdzero.show._page import Lines, Page

# A miniature's longer and shorter side in pixels, and the smallest width of a thin part.
_LONG, _SHORT, _THIN = 72, 40, 1.5
# Successive hues at this distance stay distinct for any number of parts (the golden angle). The
# first is a blue, which is that of a whole copy too.
_HUE, _HUE_STEP = 207, 137.5
# Captions of different widths would else put the devices of two rows out of line.
_GRID = "display:grid;grid-template-columns:repeat(auto-fill,minmax(9em,1fr));gap:12px"


@page_of.register
def shards_page(view: ShardView) -> Page:
    """A page with each part and the devices that hold it."""
    return Page((_Shards(view),))


@dataclass(frozen=True)
class _Shards:
    view: ShardView

    def text(self) -> str:
        """One line for each part, with the devices that hold it."""
        lines = [self.view.summary]
        for part in self.view.parts:
            devices = ", ".join(s.device for s in self.view.shards if s.slices == part)
            lines.append(f"  {_index(part, self.view.shape):<24} {devices}")
        return "\n".join(lines)

    def html(self) -> str:
        """A miniature of the tensor for each device; devices that hold the same part share a hue.

        It is inline SVG. Outlines have the page's own colour, and fills are half transparent, so
        that it suits light and dark pages.
        """
        parts = self.view.parts
        figures = (_figure(self.view.shape, s, parts.index(s.slices)) for s in self.view.shards)
        drawn = f'<div style="{_GRID}">{"".join(figures)}</div>'
        return f'<div style="color:inherit">{Lines([self.view.summary]).html()}{drawn}</div>'


def _index(part: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    written = (
        ":" if (own.start, own.stop) == (0, length) else f"{own.start}:{own.stop}"
        for own, length in zip(part, shape, strict=True)
    )
    return f"[{', '.join(written)}]"


def _figure(shape: tuple[int, ...], shard: Shard, part: int) -> str:
    width, height, (x, y, w, h) = _geometry(shape, shard)
    index = escape(_index(shard.slices, shape))
    hue = f"hsl({(_HUE + part * _HUE_STEP) % 360:.0f},65%,50%)"
    return (
        '<div style="text-align:center;font-size:85%">'
        f'<svg width="{width + 2}" height="{height + 2}" role="img" aria-label="{index}">'
        f'<rect x="{1 + x:.1f}" y="{1 + y:.1f}" width="{w:.1f}" height="{h:.1f}" '
        f'fill="{hue}" fill-opacity="0.75"/>'
        f'<rect x="1" y="1" width="{width}" height="{height}" fill="none" '
        'stroke="currentColor" stroke-opacity="0.5"/></svg>'
        f"<div>{escape(shard.device)}</div><code>{index}</code></div>"
    )


def _geometry(
    shape: tuple[int, ...], shard: Shard
) -> tuple[int, int, tuple[float, float, float, float]]:
    """Width and height of the miniature, and the part's place (x, y, width, height) in it.

    Two dims are drawn as a matrix is printed. Of more dims, the first split dim runs downwards, and
    the others run across together, where the part is whole.
    """
    spans = [
        (own.start / length, own.stop / length) if length else (0.0, 1.0)
        for own, length in zip(shard.slices, shape, strict=True)
    ]
    missing = max(0, 2 - len(spans))
    spans, lengths = [(0.0, 1.0)] * missing + spans, [1] * missing + list(shape)
    if len(spans) > 2:
        down = next((dim for dim, span in enumerate(spans) if span != (0.0, 1.0)), 0)
        lengths = [lengths[down], prod(lengths) // max(lengths[down], 1)]
        spans = [spans[down], (0.0, 1.0)]
    width, height = (_SHORT, _LONG) if lengths[0] > lengths[1] else (_LONG, _SHORT)
    if lengths[0] == 1:
        height = _SHORT // 2
    (top, bottom), (left, right) = spans
    drawn = (
        left * width,
        top * height,
        max((right - left) * width, _THIN if right > left else 0),
        max((bottom - top) * height, _THIN if bottom > top else 0),
    )
    return width, height, drawn
