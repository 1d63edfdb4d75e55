"""Measures the kernels on this machine (`python -m benchmarks.kernels`): one table; CSV and chart
go to a folder."""

from __future__ import annotations

import argparse
import platform
import sys
from datetime import datetime
from pathlib import Path


def main(argv: list[str]) -> int:
    """Run the benchmark with command-line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument(
        "--output", type=Path, help="folder for bench.csv and bench.png (outputs/bench-TIME)"
    )
    parser.add_argument(
        "--section", choices=("logits", "head", "families"), help="measure this section only"
    )
    parser.add_argument(
        "--repetitions", type=int, default=9, help="calls of which the median is taken (9)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one shape of each section, without the grid of shapes"
    )
    options = parser.parse_args(argv)

    import torch

    from benchmarks.kernels.families import every_family
    from benchmarks.kernels.report import heading, line, write_chart, write_csv
    from benchmarks.kernels.sections import fused_head, given_logits

    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU ({platform.machine()}), a small version"
    )
    title = (
        f"{machine}; torch {torch.__version__}; {_version('triton')}; {_version('liger-kernel')}"
    )
    print(title)
    large = [(8192, 151936)] if device == "cuda" else [(256, 4096)]
    grid = (
        [(t, v) for v in (32768, 128256, 151936) for t in (8192, 16384)]
        if device == "cuda"
        else [(128, 1024)]
    )
    shapes = large + ([] if options.quick else [shape for shape in grid if shape not in large])
    rows = []
    if options.section in (None, "logits"):
        print(heading("logits"))
        for shape in shapes:
            for row in given_logits(*shape, device, options.repetitions, everything=shape in large):
                rows.append(row)
                print(line(row), flush=True)
    for section, measured in (("head", fused_head), ("families", every_family)):
        if options.section in (None, section):
            print(heading(section))
            tokens, vocabulary = large[0]
            for row in measured(
                tokens, 4096 if device == "cuda" else 64, vocabulary, device, options.repetitions
            ):
                rows.append(row)
                print(line(row), flush=True)
    folder = options.output or Path("outputs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(rows, folder / "bench.csv")
    write_chart(rows, folder / "bench.png", title)
    print(f"\nwrote {folder}/bench.csv and bench.png")
    return 0


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} not installed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
