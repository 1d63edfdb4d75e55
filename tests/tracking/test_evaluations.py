"""Evaluations in MLflow: each row once, also where a resume has made it again; and in the
terminal."""

from builders.stores import append_steps, metric_history, start_tracker

from pgtoolkit.tracking.progress import evaluation_line


def rows(*steps, began=1e9):
    numbers = {
        "prompts": 3,
        "completions_per_prompt": 2,
        "pass@1": 0.25,
        "pass@1_error": 0.1,
        "pass@2": 0.5,
    }
    return [
        {
            "step": s,
            "time": began + s,
            "documents": 64 * s,
            "set": name,
            "avg": s / 8,
            **numbers,
            "length": 7.0,
            "seconds": 2.0,
        }
        for s in steps
        for name in ("held_out", "test")
    ]


def test_evaluations_are_delivered_once(uri, run):
    run.append_evaluations(rows(0))
    tracker = start_tracker(uri, run)
    append_steps(run, 1, 4)
    run.append_evaluations(rows(2, 4))
    assert tracker.finish("interrupted") == []
    run.drop_metrics_after(2)
    assert [row["step"] for row in rows(0, 2)] == [0, 0, 2, 2]
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


def test_the_line_of_an_evaluation():
    line = evaluation_line(rows(4)[0], 300, is_best=True)
    assert line == (
        "step   4/300 held_out (best): pass@1 0.250±0.100 pass@2 0.500 avg 0.500 length 7.0 2.0 s"
    )
