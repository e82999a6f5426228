"""Plot the loss curves of several runs, and how far each is from the first, to a PNG.

    python examples/plot_losses.py runs/alone runs/sp2 runs/sp2dp2 --png losses.png

Needs matplotlib, the extra `plot`: `pip install -e '.[plot]'`.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="--out folders of finetune.py")
    parser.add_argument("--png", type=Path, default=Path("losses.png"))
    arguments = parser.parse_args(words)
    plot({run.name: read(run / "losses.csv") for run in arguments.runs}, arguments.png)


def read(path: Path) -> dict[int, float]:
    """The loss by step."""
    with path.open() as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


def plot(curves: dict[str, dict[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    (first, reference), *others = curves.items()
    above.plot(list(reference), list(reference.values()), "k", linewidth=4, alpha=0.3, label=first)
    for name, curve in others:
        steps = [step for step in curve if step in reference]
        above.plot(steps, [curve[step] for step in steps], label=name)
        differences = [abs(curve[step] - reference[step]) for step in steps]
        below.plot(steps, differences, marker="o", linestyle="", label=name)
    above.set_ylabel("loss")
    above.legend()
    below.set_ylabel(f"|difference| from {first}")
    below.set_yscale("symlog", linthresh=1e-7)
    below.set_xlabel("step")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
