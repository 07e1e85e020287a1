"""The shards of a tensor as text and as a drawing."""

from html import escape
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmdzero.inspect._shards import Shard, ShardView

# A miniature's longer and shorter side in pixels, and the least that a thin part is drawn with.
_LONG, _SHORT, _THIN = 72, 40, 1.5
# Successive hues this far apart stay apart however many parts there are (the golden angle).
_HUE_STEP = 137.5


def shards_text(view: "ShardView") -> str:
    """One line for each part, with the devices that hold it."""
    lines = [summary(view)]
    for part in view.parts:
        devices = ", ".join(shard.device for shard in view.shards if shard.slices == part)
        lines.append(f"  {_index(part, view.shape):<24} {devices}")
    return "\n".join(lines)


def shards_html(view: "ShardView") -> str:
    """A miniature of the tensor for each device, its part filled; devices that agree share a hue.

    Inline SVG. Text and outlines take the page's own colour, and fills are half transparent, so
    it reads on light and on dark.
    """
    parts = view.parts
    figures = "".join(_figure(view, shard, parts.index(shard.slices)) for shard in view.shards)
    return (
        f'<div style="color:inherit"><p>{escape(summary(view))}</p>'
        f'<div style="display:flex;flex-wrap:wrap;gap:12px">{figures}</div></div>'
    )


def summary(view: "ShardView") -> str:
    """Shape, number of parts, and bytes per device, in one line."""
    whole = prod(view.shape) * view.element_bytes
    count, parts = len(view.shards), len(view.parts)
    named = f"{view.dtype} {list(view.shape)}"
    if parts == 1:
        return f"{named}, whole on each of {count} devices: {whole:,} bytes per device"
    return (
        f"{named}, {parts} parts on {count} devices: "
        f"{view.bytes_per_device:,} of {whole:,} bytes per device"
    )


def _index(part: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    written = (
        ":" if (own.start, own.stop) == (0, length) else f"{own.start}:{own.stop}"
        for own, length in zip(part, shape, strict=True)
    )
    return f"[{', '.join(written)}]"


def _figure(view: "ShardView", shard: "Shard", part: int) -> str:
    width, height, (x, y, w, h) = _geometry(view, shard)
    index = escape(_index(shard.slices, view.shape))
    hue = f"hsl({part * _HUE_STEP % 360:.0f},65%,50%)"
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
    view: "ShardView", shard: "Shard"
) -> tuple[int, int, tuple[float, float, float, float]]:
    """Width and height of the miniature, and where in it (x, y, width, height) the part lies.

    Two dims are drawn as a matrix is printed. Of more, the first that is split runs downwards and
    the others lie together across, where the part is then whole.
    """
    spans = [
        (own.start / length, own.stop / length) if length else (0.0, 1.0)
        for own, length in zip(shard.slices, view.shape, strict=True)
    ]
    lengths = list(view.shape)
    if len(spans) < 2:
        spans, lengths = [(0.0, 1.0)] * (2 - len(spans)) + spans, [1] * (2 - len(lengths)) + lengths
    if len(spans) > 2:
        down = next((dim for dim, span in enumerate(spans) if span != (0.0, 1.0)), 0)
        lengths = [lengths[down], prod(lengths) // max(lengths[down], 1)]
        spans = [spans[down], (0.0, 1.0)]
    tall = lengths[0] > lengths[1]
    width, height = (_SHORT, _LONG) if tall else (_LONG, _SHORT)
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
