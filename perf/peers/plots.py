"""Bar charts of the servers' rates, one image for each comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from perf.peers.comparison import Contender, Spread
from perf.peers.environments import OURS
from perf.peers.inputs import SCENARIOS, Scenario
from perf.tools.report import number


def plot(contenders: Sequence[Contender], clients: Mapping[Scenario, tuple[int, ...]], title: str, to: Path) -> None:
    """Write an SVG with the median rate and spread of each server, by scenario.

    Each scenario is shown with its largest number of clients.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    shown = {
        scenario: bars
        for scenario in SCENARIOS
        if clients[scenario] and (bars := _bars(contenders, scenario, clients[scenario][-1]))
    }
    if not shown:
        return
    heights = [len(bars) + 1.5 for bars in shown.values()]
    figure, grid = plt.subplots(
        len(shown), 1, figsize=(7, 0.28 * sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for axes, (scenario, bars) in zip(grid[:, 0], shown.items(), strict=True):
        names, spreads = [name for name, _ in bars], [spread for _, spread in bars]
        medians = [spread.median for spread in spreads]
        reach = [[s.median - s.least for s in spreads], [s.most - s.median for s in spreads]]
        colours = ["tab:blue" if name.startswith(f"{OURS} ") else "tab:grey" for name in names]
        drawn = axes.barh(names, medians, xerr=reach, color=colours, ecolor="black")
        axes.bar_label(drawn, labels=[number(median) for median in medians], padding=6, fontsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(
            f"{SCENARIOS[scenario]}; {clients[scenario][-1]} clients, per second", fontsize="small", loc="left"
        )
        axes.tick_params(labelsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(to)
    plt.close(figure)


def _bars(contenders: Sequence[Contender], scenario: Scenario, clients: int) -> list[tuple[str, Spread]]:
    spreads = [(contender.name, Spread.of(contender.rates(scenario, clients))) for contender in contenders]
    return [(name, spread) for name, spread in spreads if spread is not None]
