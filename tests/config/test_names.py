"""Names of runs: what their overrides change, in the letters of a directory's name."""

import re

from pgtoolkit.config.names import name_from


def test_run_names():
    defaults = {"loss": "gspo", "aggregation": "sample_mean"}
    assert name_from([], defaults) == "default"
    assert name_from(["loss=gspo", "aggregation=constant"], defaults) == "aggregation-constant"
    assert name_from(["loss=gspo", "experiment=dapo"], defaults) == "loss-gspo_dapo"
    assert name_from(["optimizer.learning_rate=3e-4", "seed=1"], defaults) == "learning-rate-3e-4_seed-1"
    assert name_from(["tracking=none", "hydra.run.dir=x", "hydra/launcher=joblib"], defaults) == "default"
    assert name_from(["model.path=/home/me/../some model"], defaults) == "some-model"
    on_the_hub = ["model=huggingface", "model.path=Qwen/Qwen3-0.6B", "task=prompts", "task.path=~/data/gsm8k.jsonl"]
    assert name_from([*on_the_hub, "loss=grpo"], defaults) == "Qwen3-0.6B_gsm8k.jsonl_loss-grpo"
    answers = ["task.verifier=math_verify", "rollout.max_completion_length=1024", "trainer.max_steps=2000"]
    both = [name_from([*on_the_hub, *answers, "loss=grpo", f"seed={seed}"], defaults) for seed in (3, 4)]
    assert both[0].startswith("max-steps-2000_loss-grpo_seed-3_Qwen3-0.6B_gsm8k.jsonl_verifier-math-veri")
    assert [len(name) for name in both] == [80, 80]
    assert "seed-4" in both[1]
    long = [f"task.options.key{i}={i}" for i in range(40)]
    names = {name_from(long, {}), name_from([*long, "seed=1"], {})}
    assert len(names) == 2
    for name in [*names, name_from(["experiment=../../.x"], {}), name_from(["a=.."], {})]:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name)
