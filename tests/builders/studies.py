"""Run directories of a small study, without training, for the tests."""

import json
from pathlib import Path

from pgtoolkit.runs.directory import RunDirectory

ENDS = {
    "grpo": [0.58, 0.60, 0.61, 0.61],
    "gspo": [0.582, 0.601, 0.613, 0.612],
    "cispo": [0.68, 0.71, 0.70, 0.71],
    "reinforce": [0.3, 0.9, 0.65, 0.5],
}


def four_losses(folder: Path) -> Path:
    """grpo ends at 0.60 on average, gspo the same but for 0.002, cispo 0.1 above, reinforce
    anywhere."""
    for loss, ends in ENDS.items():
        for seed, end in enumerate(ends):
            with RunDirectory(folder / f"{loss}-{seed}") as run:
                run.write_config(
                    {"seed": seed, "loss": {"name": loss}, "trainer": {"max_steps": 2}}, []
                )
                for step in (1, 2):
                    run.append_metrics(
                        step, {"reward": 0.5, "documents_seen": 8 * step, "num_tokens": 5}
                    )
                of_all = {
                    "time": 1.0,
                    "set": "held_out",
                    "avg": 0.1,
                    "documents": 0,
                    "prompts": 4,
                    "seconds": 1.0,
                }
                rows = [
                    {"step": step, "pass@1": end * step / 2, "completions_per_prompt": 2, **of_all}
                    for step in (0, 1, 2)
                ]
                (run.path / "evaluations.jsonl").write_text(
                    "".join(json.dumps(row) + "\n" for row in rows)
                )
                run.set_status("done", 2)
    return folder
