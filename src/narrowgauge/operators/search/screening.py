"""Which operators may take which format: what is to be judged next, and what follows from it.

Operators of equal signature are judged together, and alone only if that fails; then all that are
left are judged at once, as harm may add up or need two; if that fails, bisecting finds the operator
that makes those before it harmful. The trade-off: one step judges one batch; so the last word has
an epoch of training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from narrowgauge.operators.recording import Recording
from narrowgauge.operators.signals import Signal


class Screening:
    """The state of the first stage; every change is an event, so that it can be made again.

    Args:
        recording: the operators.
        formats: candidates, the preferred first.
        simulated: whether they are, so that operators that write into their input take them too.
        bound: largest relative error of the gradient that is harmless.
        confirmations: steps on which all that are left must be harmless together.
    """

    def __init__(
        self,
        recording: Recording,
        formats: Sequence[str],
        *,
        simulated: bool,
        bound: float,
        confirmations: int = 2,
    ) -> None:
        self.formats = list(formats)
        self.bound = bound
        self.signals: dict[tuple[str, str], Signal] = {}
        self.excluded: dict[tuple[str, str], str] = {}
        self.together: Signal | None = None
        self._names = [call.name for call in recording if simulated or not call.in_place]
        self._groups: dict[str, list[str]] = {}
        for call in recording:
            if simulated or not call.in_place:
                self._groups.setdefault(call.signature, []).append(call.name)
        self._suspects: tuple[list[str], str] = ([], "")
        self._queue = self._sets()
        self.judged_sets, self.sets = 0, len(self._queue) + confirmations
        self._confirmations = confirmations
        self._left = confirmations
        self._more = 0  # to exclude besides the culprit
        self._kept: tuple[int, int] | None = None  # bounds of the bisection

    def _sets(self) -> list[tuple[str, list[str]]]:
        """What is not excluded, as sets of equal signature by format."""
        sets = [
            (format, [name for name in names if (name, format) not in self.excluded])
            for format in self.formats
            for names in self._groups.values()
        ]
        return [(format, names) for format, names in sets if names]

    @property
    def over(self) -> bool:
        """Whether nothing is left to be judged."""
        return not self._queue and (self._left <= 0 or not self.survivors())

    def upcoming(self, sets: int) -> set[str]:
        """Operators in the next sets that are judged alone, or in a group of one signature."""
        return {name for _, names in self._queue[:sets] for name in names}

    def survivors(self) -> dict[str, str]:
        """The preferred format of each operator among those that were not found harmful."""
        found = {}
        for name in self._names:
            for format in self.formats:
                if (name, format) not in self.excluded:
                    found[name] = format
                    break
        return found

    def allowed(self) -> dict[str, list[str]]:
        """All formats of each operator that were not found harmful."""
        return {
            name: [f for f in self.formats if (name, f) not in self.excluded]
            for name in self._names
        }

    def next(self) -> dict[str, str]:
        """The operators to be judged next, and their formats."""
        if self._queue:
            format, names = self._queue[0]
            return dict.fromkeys(names, format)
        ranked = self.ranked()
        keep = len(ranked) if self._kept is None else (self._kept[0] + self._kept[1] + 1) // 2
        return dict(ranked[:keep])

    def ranked(self) -> list[tuple[str, str]]:
        """Survivors and their formats, the least harmful first."""
        items = self.survivors().items()
        return sorted(items, key=lambda item: self.signals[item].gradient_error)

    def judged(self, signal: Signal) -> None:
        """Take over what was found about :meth:`next`."""
        self.judged_sets += 1
        if self._queue:
            self._judged_alone(signal)
            self._give_up()
        else:
            self._judged_together(signal)

    def _judged_alone(self, signal: Signal) -> None:
        format, names = self._queue.pop(0)
        harmful = signal.gradient_error > self.bound or signal.loss_change > 1
        if harmful and len(names) > 1:
            self._queue[:0] = [(format, [name]) for name in names]
            self.sets += len(names)
            return
        for name in names:
            self.signals[name, format] = signal
            if harmful:
                self.excluded[name, format] = _harm(signal, "alone")

    def harmful_together(self, signal: Signal) -> bool:
        """Whether what many operators do is too much; twice what one may."""
        return signal.gradient_error > 2 * self.bound or signal.loss_change > 1

    def _judged_together(self, signal: Signal) -> None:
        harmful = self.harmful_together(signal)
        tried = len(self.next())
        if self._kept is None:
            if not harmful:
                self.together = signal if self.together is None else self.together.worst(signal)
                self._left -= 1
                return
            self._kept = (0, tried - 1)
        elif harmful:
            self._kept = (self._kept[0], tried - 1)
        else:
            self._kept = (tried, self._kept[1])
        if self._kept[0] >= self._kept[1]:
            ranked = self.ranked()
            culprit, rest = ranked[self._kept[0]], ranked[self._kept[0] + 1 :]
            for item in [culprit, *rest[len(rest) - self._more :]]:
                self.excluded[item] = _harm(signal, "together with others that are less so")
            self._more = 2 * self._more + 1  # harm that many add up to should not take as long
            self._kept, self._left = None, self._confirmations

    def leave_out(self, items: Mapping[tuple[str, str], str]) -> None:
        """Exclude operators in formats for another reason than harm, before any is judged."""
        self.excluded.update(items)
        self._queue = self._sets()
        self.sets = len(self._queue) + self._confirmations

    def begin_again(self, suspects: Collection[str], reason: str) -> None:
        """Judge all that is left once more: harm changes as the training goes on.

        If nothing new is found, the more harmful half of the suspects is given up.

        Args:
            suspects: operators that were found harmful together by other means.
            reason: how.
        """
        self._suspects = [name for name in suspects if name in self.survivors()], reason
        self._queue = self._sets()
        self.sets += len(self._queue) + self._confirmations
        self._left, self._kept, self.together = self._confirmations, None, None
        self._give_up()

    def _give_up(self) -> None:
        """Once all were judged again: if nothing new was found, exclude the worst suspects."""
        if self._queue or not self._suspects[0]:
            return
        names, reason = self._suspects
        if all(name in self.survivors() for name in names):
            ranked = [item for item in self.ranked() if item[0] in names]
            for item in ranked[len(ranked) // 2 :]:
                self.excluded[item] = reason
        self._suspects = [], ""

    def evidence(self, name: str) -> dict[str, Any]:
        """What is known of an operator, as JSON."""
        return {
            "signals": {
                format: {
                    key: value if abs(value) != float("inf") else "infinite"
                    for key, value in self.signals[name, format].as_dict().items()
                }
                for format in self.formats
                if (name, format) in self.signals
            },
            "excluded": {
                format: self.excluded[name, format]
                for format in self.formats
                if (name, format) in self.excluded
            },
        }


def _harm(signal: Signal, how: str) -> str:
    """Why, in a sentence."""
    text = f"{how}, it turns the gradient by {signal.gradient_error:.2g} of its length"
    if signal.gradient_error == float("inf"):
        text = f"{how}, it makes the gradient infinite or NaN"
    if signal.loss_change > 1:
        text += f" and changes the loss by {signal.loss_change:.2g} of its value"
    if signal.overflow:
        text += f"; {signal.overflow} numbers overflow"
    if signal.underflow:
        text += f"; {signal.underflow} numbers become zero"
    return text


def signal_from(event: Mapping[str, float]) -> Signal:
    """A signal as it was written to a journal."""
    return Signal(
        float(event["gradient_error"]),
        float(event["loss_change"]),
        int(event["overflow"]),
        int(event["underflow"]),
    )
