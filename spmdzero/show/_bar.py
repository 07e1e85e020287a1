"""A bar that is divided into parts, as text and as HTML."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

# Colours of the parts, in order. They can be distinguished in light and dark mode, also by people
# who can't distinguish red from green (Okabe and Ito's, and two more).
HUES = (
    "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#b8ad1c", "#7b5ea7", "#d55e00",
    "#a98467", "#999999",
)  # fmt: skip
_WIDTH = 40


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a bar.

    Attributes:
        label: the part's name.
        value: the part's size, as text.
        share: the part's share of the whole, 0 to 1.
    """

    label: str
    value: str
    share: float


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Parts of one whole; HTML shows them side by side, text shows each on a line.

    Attributes:
        title: the line above the bar.
        segments: the parts; a part keeps its colour if others are empty and so not shown.
        notes: the lines below the bar.
    """

    title: str
    segments: Sequence[Segment]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """A line for each part, with a length relative to the longest part."""
        shown = [segment for segment in self.segments if segment.share]
        longest = max((segment.share for segment in shown), default=0.0)
        labels = max((len(segment.label) for segment in shown), default=0)
        values = max((len(segment.value) for segment in shown), default=0)
        lines = [
            f" {s.label:<{labels}}  {s.value:>{values}}  {100 * s.share:5.1f} %  "
            f"{'█' * round(_WIDTH * s.share / longest)}".rstrip()
            for s in shown
        ]
        return "\n".join([self.title, *lines, *(f"  {note}" for note in self.notes)])

    def html(self) -> str:
        """A bar with a legend below, without a stylesheet."""
        parts = "".join(
            f'<span title="{escape(said(segment))}" style="background:{hue};'
            f'width:{100 * segment.share:.3f}%"></span>'
            for segment, hue in zip(self.segments, HUES, strict=False)
            if segment.share
        )
        notes = "".join(f"<p><small>{escape(note)}</small></p>" for note in self.notes)
        return (
            f'<div style="color:inherit"><p>{escape(self.title)}</p>'
            '<div style="display:flex;height:1.6em;border:1px solid rgba(128,128,128,.6)" '
            f'role="img" aria-label="{escape(self.title)}">{parts}</div>'
            f"{legend(map(said, self.segments))}{notes}</div>"
        )


def said(segment: Segment) -> str:
    """A part in words, such as ``matmul: 16.638 ms, 18.1 %``; "" for an empty part."""
    text = f"{segment.label}: {segment.value}, {100 * segment.share:.1f} %"
    return text if segment.share else ""


def legend(parts: Iterable[str], *, limit: str = "") -> str:
    """The legend of a bar: the colour of each named part, and the meaning of the limit's line."""
    square = "display:inline-block;width:.8em;height:.8em;margin-right:.4em"
    shown = [
        f'<span style="{square};background:{hue}"></span>{escape(part)}'
        for part, hue in zip(parts, HUES, strict=False)
        if part
    ]
    if limit:
        line = "display:inline-block;height:1em;border-left:3px solid currentColor"
        shown.append(f'<span style="{line};margin-right:.6em"></span>limit: {escape(limit)}')
    entries = (
        f'<span style="white-space:nowrap;margin-right:1.4em">{entry}</span>' for entry in shown
    )
    return f'<p style="line-height:1.8">{" ".join(entries)}</p>'
