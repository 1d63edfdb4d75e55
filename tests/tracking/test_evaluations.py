"""Evaluations in MLflow's store, each row once also after a resume, and their line of text."""

from builders.stores import append_steps, metric_history, start_tracker

from pgtoolkit.tracking.progress import evaluation_line


def rows(*steps: int, began: float = 1e9) -> list[dict]:
    """Return the rows of evaluations on two sets at these steps; `avg` is an eighth of the step."""
    return [
        {
            "step": step,
            "time": began + step,
            "documents": 64 * step,
            "set": name,
            "avg": step / 8,
            "prompts": 3,
            "completions_per_prompt": 2,
            "pass@1": 0.25,
            "pass@1_error": 0.1,
            "pass@2": 0.5,
            "length": 7.0,
            "seconds": 2.0,
        }
        for step in steps
        for name in ("held_out", "test")
    ]


def test_evaluations_are_delivered_once_although_a_resume_makes_one_again(uri, run):
    run.append_evaluations(rows(0))
    tracker = start_tracker(uri, run)
    append_steps(run, 1, 4)
    run.append_evaluations(rows(2, 4))
    assert tracker.finish("interrupted") == []
    run.drop_metrics_after(2)
    tracker = start_tracker(uri, run)
    append_steps(run, 3, 6)
    run.append_evaluations(rows(4, 6, began=1.1e9))
    assert tracker.finish("done") == []
    run_id = tracker.info["run_id"]
    for name in ("held_out", "test"):
        assert metric_history(uri, run_id, f"evaluation/{name}/avg") == [
            (step, step / 8) for step in (0, 2, 4, 6)
        ]
    for name, value in (
        ("pass_at_1", 0.25),
        ("pass_at_1_error", 0.1),
        ("pass_at_2", 0.5),
        ("length", 7.0),
    ):
        assert metric_history(uri, run_id, f"evaluation/test/{name}") == [
            (step, value) for step in (0, 2, 4, 6)
        ]
    assert metric_history(uri, run_id, "evaluation/test/documents") == []


def test_the_line_of_an_evaluation_has_its_numbers():
    line = evaluation_line(rows(4)[0], 300, is_best=True)
    assert line == (
        "step   4/300 held_out (best): pass@1 0.250±0.100 pass@2 0.500 avg 0.500 length 7.0 2.0 s"
    )
    failed = evaluation_line(rows(4)[0] | {"failed_score_fraction": 0.8}, 300, is_best=False)
    assert failed.endswith("avg 0.500 length 7.0 80% of scores failed 2.0 s")
