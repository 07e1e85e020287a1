"""The card that tells whether a step fits: a sum, changes that would help, and a bar."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from spmdzero.explain import CHIPS, Explanation, StepTime, Verdict
from spmdzero.plan import sized
from spmdzero.show._bar import HUES, legend
from spmdzero.show._time import and_calibrated, rate, short, utilisation

_GOOD, _BAD, _NEITHER = "#3a9a5b", "#d64545", "#888888"
_SAID = {True: "Fits", False: "Doesn't fit"}
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


@dataclass(frozen=True, kw_only=True)
class Card:
    """The first part of an explanation's page.

    Attributes:
        verdict: the verdict for one target.
        time: the time of a step on that target, or None.
        work: tokens or rows of a step on all devices, and which of the two.
        devices: number of devices.
        problems: number of problems of the whole explanation.
    """

    verdict: Verdict
    time: StepTime | None
    work: tuple[int, str]
    devices: int
    problems: int

    def text(self) -> str:
        """One sentence with the sum, then one line for each change that would make it fit."""
        figures = [f"{figure[0].upper()}{figure[1:]}" for figure in self._figures]
        lines = [f"{'. '.join([f'{self._headline}: {self._sum}', *figures])}."]
        if self.verdict.changes:
            lines.append("What would make it fit, each alone:")
            lines += [f"  - {line}" for line in self._changes()]
        elif self.verdict.fits is False:
            lines.append(_NOTHING)
        return "\n".join(lines)

    def html(self) -> str:
        """A box with the headline, figures, a bar of the memory, and changes that would help."""
        hue = {True: _GOOD, False: _BAD, None: _NEITHER}[self.verdict.fits]
        figures = "".join(
            f'<span style="margin-right:2em;white-space:nowrap">{escape(figure)}</span> '
            for figure in (self._memory, *self._figures)
        )
        items = "".join(f"<li>{escape(line)}</li>" for line in self._changes())
        more = ""
        if items:
            more = f"<p>What would make it fit, each alone:</p><ul>{items}</ul>"
        elif self.verdict.fits is False:
            more = f"<p>{_NOTHING}</p>"
        return (
            f'<div style="border-left:6px solid {hue};background:rgba(128,128,128,.1);'
            'padding:.8em 1em;margin:1em 0;color:inherit;overflow-wrap:anywhere">'
            f'<div style="font-size:1.3em;color:inherit"><b>{escape(self._headline)}</b></div>'
            f'<div style="font-size:1.1em;margin:.3em 0 .6em">{figures}</div>'
            f"{self._bar()}{more}</div>"
        )

    @property
    def _headline(self) -> str:
        verdict = self.verdict
        if verdict.fits is None:
            return f"No TPU is named (--tpu v5e:2x4); a device of {verdict.target} needs about"
        return f"{_SAID[verdict.fits]} {verdict.target}"

    @property
    def _memory(self) -> str:
        """The memory in words, such as ``22.1 of 16 GiB``."""
        peak = sized(self.verdict.peak)
        if self.verdict.hbm_bytes is None:
            return peak
        number, unit = peak.split()
        has = f"{self.verdict.hbm_bytes / 2**30:.0f} GiB"
        return f"{number} of {has}" if unit == "GiB" else f"{peak} of {has}"

    @property
    def _sum(self) -> str:
        unit = sized(self.verdict.peak).split()[1]
        parts = (f"{name} {short(size / _UNITS[unit])}" for name, size in self._parts())
        return f"{self._memory} = {' + '.join(parts)}{'' if self.verdict.hbm_bytes else ' ' + unit}"

    def _parts(self) -> Iterator[tuple[str, int]]:
        verdict = self.verdict
        yield "parameters", verdict.parameters
        yield "states", verdict.states
        yield "gradients", verdict.gradients
        yield "the rest", verdict.rest

    @property
    def _figures(self) -> list[str]:
        figures = []
        if self.verdict.fits is None:
            enough = [chip for chip in CHIPS.values() if chip.hbm_bytes >= self.verdict.peak]
            has = ", ".join(f"{chip.name} ({sized(chip.hbm_bytes)})" for chip in enough)
            figures.append(f"Enough has {has}" if has else "No chip has as much")
        if self.time is not None:
            figures += [
                and_calibrated(f"{short(1e3 * self.time.seconds)} ms a step", self.time.calibrated),
                self._rate(self.time),
                utilisation(self.time),
            ]
        if self.verdict.on_host:
            there = sized(self.verdict.on_host)
            figures.append(f"{there} a device rest in host memory{self._took}")
        if self.verdict.without_offloading is not None:
            room = f"{(self.verdict.hbm_bytes or 0) / 2**30:.0f} GiB"
            about = sized(self.verdict.without_offloading)
            figures.append(f"Offloading buys nothing: it fits without, about {about} of {room}")
        plural = "s" * (self.problems > 1)
        figures.append(f"{self.problems or 'no'} problem{plural}")
        return figures

    def _rate(self, time: StepTime) -> str:
        """The rate in words, such as ``12,800 tokens/s a device, 102,400 in all``."""
        count, counted = self.work
        in_all = count / time.seconds if time.seconds else 0.0
        return f"{short(in_all / self.devices)} {counted}s/s a device, {short(in_all)} in all"

    @property
    def _took(self) -> str:
        """How long a step waits for the host's memory, where that is known."""
        if self.time is None:
            return ""
        waits = f"{short(1e3 * self.time.host_exposed)} ms"
        return f", for which a step waits {waits} at {rate(self.time.host_rate)} each way"

    def _changes(self) -> Iterator[str]:
        for change in self.verdict.changes:
            if change.peak is None:
                yield change.what
            else:
                about = "" if change.by == "compiler" else "about "
                yield f"{change.what}: {about}{sized(change.peak)}"

    def _bar(self) -> str:
        room = self.verdict.hbm_bytes or self.verdict.peak
        whole = max(room, self.verdict.peak, 1)
        parts = list(self._parts())
        drawn = "".join(
            f'<span style="background:{hue};width:{100 * size / whole:.3f}%"></span>'
            for (_, size), hue in zip(parts, HUES, strict=False)
        )
        limit = ""
        if self.verdict.hbm_bytes is not None:
            limit = (
                '<span style="position:absolute;top:-.4em;bottom:-.4em;width:0;'
                f'left:{100 * room / whole:.3f}%;border-left:3px solid currentColor"></span>'
            )
        said = f"{self._memory} a device"
        return (
            f'<div role="img" aria-label="{escape(said)}" style="position:relative;display:flex;'
            f'height:1.6em;border:1px solid rgba(128,128,128,.6)">{drawn}{limit}</div>'
            + legend(
                [f"{name} {sized(size)}" for name, size in parts],
                limit=f"{room / 2**30:.0f} GiB, {100 * self.verdict.peak / room:.3g} % of it used"
                if limit
                else "",
            )
        )


_NOTHING = (
    "No single change of these is known to be enough: a higher ZeRO stage, recomputation, fewer "
    "rows a device, more chips, another chip. Several together may be."
)


def cards(explanation: Explanation) -> Iterator[Card]:
    """Yields a card for each verdict, with the time of its target."""
    by_target = {time.target: time for time in explanation.times}
    work = (explanation.tokens * explanation.devices, explanation.counted)
    for verdict in explanation.verdicts:
        yield Card(
            verdict=verdict,
            time=by_target.get(verdict.target),
            work=work,
            devices=explanation.devices,
            problems=len(explanation.problems),
        )
