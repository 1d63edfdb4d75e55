"""Measure how fast recorded rollouts are indexed, and how much memory that takes.

    python benchmarks/recorded_index.py [ROWS] [TOKENS]

Writes made-up rollouts into a temporary folder, in groups of eight: Parquet without and with a
column of texts, and JSONL. Each file is indexed in a process of its own. Rates are of the first
pass, which checks and digests every row, and of a start that finds the index kept by the run.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

VOCABULARY = 151936
BLOCK = 1024
"""Rows of a row group."""


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 512
    # JSONL is slow enough to be measured by a tenth of the rows.
    files = (
        ("rows.parquet", count, 0),
        ("with_texts.parquet", count, 4 * tokens),
        ("rows.jsonl", count // 10, 0),
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, num_rows, text in files:
            file = Path(folder) / name
            write(file, num_rows, tokens, text)
            made = subprocess.run(
                [sys.executable, __file__, "--index", file],
                capture_output=True,
                check=True,
                text=True,
            )
            print(f"{name}, {file.stat().st_size / 1e6:.0f} MB: {made.stdout.strip()}", flush=True)


def write(path: Path, count: int, tokens: int, text: int) -> None:
    """Write made-up rollouts. text: characters of a column that no training reads."""
    draw = np.random.default_rng(0)
    writer = None
    with path.open("wb") as file:
        for start in range(0, count, BLOCK):
            mask = np.arange(tokens) >= tokens // 3
            rows = [
                {
                    "token_ids": draw.integers(0, VOCABULARY, tokens, np.int32),
                    "loss_mask": mask,
                    "old_log_probs": np.where(mask, -draw.exponential(0.5, tokens), 0).astype(
                        np.float32
                    ),
                    "reward": float(draw.random()),
                    "group_id": number // 8,
                    **({"text": draw.bytes(text // 2).hex()} if text else {}),
                }
                for number in range(start, min(count, start + BLOCK))
            ]
            if path.suffix == ".parquet":
                table = pa.Table.from_pylist(rows)
                writer = writer or pq.ParquetWriter(file, table.schema, write_page_checksum=True)
                writer.write_table(table)
            else:
                for row in rows:
                    plain = {
                        name: x.tolist() if isinstance(x, np.ndarray) else x
                        for name, x in row.items()
                    }
                    file.write(json.dumps(plain).encode() + b"\n")
        if writer is not None:
            writer.close()


def index(path: Path) -> None:
    from pgtoolkit.rollouts.estimator import Estimator
    from pgtoolkit.rollouts.recorded import RecordedRollouts
    from pgtoolkit.rollouts.settings import RecordedRolloutSettings, TrainedTurns, Truncated
    from pgtoolkit.tasks.settings import Chat, TooLong

    config = RecordedRolloutSettings(
        name="recorded",
        path=str(path),
        temperature=1.0,
        epochs=1,
        shuffle=True,
        group_size=None,
        max_completion_length=None,
        chat=Chat.auto,
        trained_turns=TrainedTurns.all,
        too_long=TooLong.refuse,
        truncated=Truncated.train,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for pass_name in ("indexed", "found"):
        started = time.perf_counter()
        started_cpu = time.process_time()
        rollouts = RecordedRollouts(config, Estimator("grpo"), VOCABULARY, run_dir=path.parent)
        seconds = time.perf_counter() - started
        cpu = time.process_time() - started_cpu
        rate = (
            f"{rollouts.batch_size / seconds:,.0f} rows a second "
            f"({rollouts.batch_size / cpu:,.0f} of CPU time)"
        )
        print(f"{pass_name} {rollouts.batch_size} rows in {seconds:.2f} s, {rate}", end="; ")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{grown / 1024:.0f} MB of memory")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--index"]:
        index(Path(sys.argv[2]))
    else:
        main()
