"""What `pgtk check` passes starts: rows, folders, numbers of documents and processes are looked at before."""

import json
from pathlib import Path

import pytest
from builders.models import save_with_tokenizer, small_llama

from pgtoolkit.cli import main

ROW = {"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "old_log_probs": [0, -1.0, -2.0]}
GROUP = [ROW | {"reward": reward, "group_id": 0} for reward in (0, 1)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def problem(capsys, *overrides):
    status = main(["check", *overrides])
    said = capsys.readouterr().out.partition("\nProblems")[2].partition("\n")[2].strip()
    assert status == (0 if said == "none" else 2)
    return said


def write(rows):
    with open("rows.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("rows", "overrides", "says"),
    [
        (GROUP, "", "none"),
        ([], "", "needs at least one row"),
        ([ROW, ROW], "", "rows.jsonl:1:reward: is missing"),
        ([GROUP[0], GROUP[1] | {"token_ids": [1, 2, 99]}], "", "rows.jsonl:2:token_ids: is 99 at position 2"),
        (GROUP, "accumulation.max_tokens=2", "has 3 tokens and at most 2 fit"),
        (GROUP, "correction=token_mask", "rows.jsonl:1:sampling_log_probs: is missing"),
        (GROUP, "kl=k3 kl.coefficient=0.1 kl.reference=recorded", "rows.jsonl:1:ref_log_probs: is missing"),
        ([ROW | {"old_log_probs": [0, 1, 2]}], "advantage=given", "is 1 at position 1; a log-prob is at most 0"),
        ([ROW], "experiment=sft", "none"),
    ],
)
def test_recorded_rows_are_looked_at(capsys, rows, overrides, says):
    write(rows)
    said = problem(capsys, "rollout=recorded", "rollout.path=rows.jsonl", *overrides.split())
    assert says in said
    if said != "none":  # the run refuses them, too
        assert main(["rollout=recorded", "rollout.path=rows.jsonl", "tracking=none", *overrides.split()]) == 3


def test_more_documents_than_a_batch_can_hold_are_refused(capsys):
    said = problem(capsys, "rollout.prompts_per_batch=100000", "rollout.group_size=100000")
    assert "needs at most 1000000 documents a batch (got 10000000000" in said
    assert problem(capsys, "rollout.prompts_per_batch=10", "rollout.group_size=100000") == "none"


def test_more_processes_than_this_machine_has_room_for_are_refused(capsys, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    said = problem(capsys, "parallelism=ddp", "parallelism.data_parallel=1000")
    assert said.startswith("parallelism.data_parallel=1000 needs at most 32 processes on this machine (got 1000")
    assert problem(capsys, "parallelism=ddp", "parallelism.data_parallel=32") == "none"


def test_the_sweep_of_a_real_model_has_nothing_to_complain_of(capsys):
    """With files made as its comments say."""
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    save_with_tokenizer(small_llama(max_position_embeddings=1024), Path("qwen-sft"), template)
    for name in ("prompts", "test"):
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": f"{name} 12", "answer": "144"}) + "\n")
    assert main(["check", "sweep", "real_model"]) == 0
    page = capsys.readouterr().out
    assert "Sweep of 6 runs" in page
    assert "varies: loss = grpo, gspo, cispo" in page
    assert "rollouts: 64 prompts x 8 completions = 512 documents a batch" in page
    assert "  model.lora_rank = 32\n" in page
    assert page.rstrip().endswith("Problems\n  none")
