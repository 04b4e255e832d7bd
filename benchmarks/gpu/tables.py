"""Tables of all cases, and of the figures that there are targets for, RFA beside softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from .models import FEATURES, RFA, SOFTMAX
from .trial import FAILED, LEFT_OUT, Results


@dataclass(frozen=True)
class Target:
    """A figure that RFA is to reach.

    Attributes:
        part: of the cases.
        conditions: the same.
        figure: its name in the cases.
        most: the largest value that is wanted, or None.
        least: the smallest, or None.
        is_ratio: whether the value is RFA's figure over softmax's, and not RFA's own.
        contestant: the form of RFA.
    """

    part: str
    conditions: str
    figure: str
    most: float | None = None
    least: float | None = None
    is_ratio: bool = False
    contestant: str = RFA

    def row(self, results: Results) -> tuple[str, ...]:
        """Return what is shown: the figure, RFA's, softmax's, their ratio, and the target with whether it is met."""
        contestants = results.get(self.part, {}).get(self.conditions, {})
        rfa, softmax = (contestants.get(name, {}).get(self.figure) for name in (self.contestant, SOFTMAX))
        ratio = rfa / softmax if rfa is not None and softmax else None
        value = ratio if self.is_ratio else rfa
        target = (f"≤ {self.most:g}" if self.least is None else f"≥ {self.least:g}") + " ×" * self.is_ratio
        if value is not None:
            is_met = (self.most is None or value <= self.most) and (self.least is None or value >= self.least)
            target += ", met" if is_met else ", missed"
        name = f"{self.part}, {self.conditions}: {self.figure}" + f", {self.contestant}" * (self.contestant != RFA)
        return name, _number(rfa), _number(softmax), "" if ratio is None else f"{ratio:.2f} ×", target


TARGETS = [
    Target("training", "8 × 2,048", "s", most=1.3, is_ratio=True),
    Target("training", "8 × 2,048", "s", most=2, is_ratio=True, contestant=FEATURES),
    Target("training", "8 × 2,048, layers compiled", "s", most=1.3, is_ratio=True),
    Target("training", "8 × 2,048, layers compiled", "s", most=2, is_ratio=True, contestant=FEATURES),
    Target("attention", "8 × 2,048", "forward, ms", most=3, is_ratio=True),
    Target("attention", "1 × 32,768", "forward, ms", most=0.25, is_ratio=True),
    Target(
        "attention",
        "16 × 4,096, 12 heads, features alone",
        "forward and backward, ms",
        most=6,
        contestant=f"{RFA}, 128 features",
    ),
    Target("generation", "1 × 128", "ms a token", most=2),
    Target("generation", "1 × 32,768", "ms a token", most=2),
    Target("generation", "32 × 8,192", "tokens/s", least=3, is_ratio=True),
    Target("conversion", "calibrated", "s", most=15),
]


def show(results: Results, console: Console) -> None:
    """Print a table a part, and that of the targets."""
    for part, by_conditions in results.items():
        rows = [(where, who, row) for where, contestants in by_conditions.items() for who, row in contestants.items()]
        names = [name for *_, row in rows for name, value in row.items() if isinstance(value, int | float)]
        figures = dict.fromkeys(sorted(names, key="seconds".__eq__))  # of the case as a whole, last
        table = Table("", "", *figures, title=part)
        for where, who, row in rows:
            state = next((f" ({state})" for state in (FAILED, LEFT_OUT) if state in row), "")
            table.add_row(where, who + state, *(_number(row.get(name)) for name in figures))
        console.print(table)
    summary = Table("", "RFA", "softmax", "ratio", "target", title="targets")
    for target in TARGETS:
        summary.add_row(*target.row(results))
    console.print(summary)


def _number(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "" if value is None else "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
