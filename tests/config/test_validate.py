"""Each rule of `validate`: one refusal, and a neighbour that is allowed."""

import json
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from pgtoolkit.config.compose import compose
from pgtoolkit.config.validate import validate

HUB = "model=huggingface model.path=hub/name"
LORA = f"{HUB} model.lora_rank=2 model.lora_targets="

# What is refused; what of it shows in the message; what mends it or is close by and allowed.
PROMPTS = "task=prompts task.path=FILE"

RULES = [
    ("loss=gspo loss.num_splits=2", "loss=gspo needs loss.num_splits=1 (got 2)", "loss=gspo loss.num_splits=1"),
    ("loss=grpo loss.num_splits=0", "loss.num_splits=0", "loss=grpo loss.num_splits=2 kernel=torch"),
    ("loss=grpo loss.num_splits=2 kernel=fused_linear", "kernel=torch", "loss=grpo loss.num_splits=2"),
    ("loss.epsilon_low=0", "loss.epsilon_low=0", "loss.epsilon_low=1e-9"),
    ("loss.epsilon_low=nan", "finite", "loss.epsilon_low=0.999"),
    ("loss.epsilon_low=1", "a finite number from 1e-09 to 0.999", "loss.epsilon_low=0.5"),
    ("loss.epsilon_high=-0.2", "loss.epsilon_high=-0.2", "loss.epsilon_high=2"),
    ("loss.epsilon_high=inf", "loss.epsilon_high=inf", "loss.epsilon_high=5"),
    ("aggregation.divisor=7", "aggregation=constant", "aggregation=constant aggregation.divisor=7"),
    ("aggregation=token_mean aggregation.divisor=1", "would be ignored", "aggregation=token_mean"),
    ("aggregation.reducer=mine", "a dotted path to a function", "aggregation.reducer=json.dumps"),
    ("loss=custom loss.path=mine", "a dotted path to a class", "loss=custom loss.path=json.JSONDecoder"),
    ("aggregation.reducer=nowhere.mine", "no module nowhere", "aggregation.reducer=json.dumps"),
    ("aggregation=prompt_mean accumulation.docs_per_step=60", "docs_per_step=64", "aggregation=prompt_mean"),
    ("aggregation=prompt_mean accumulation=fixed", "docs_per_step > 0", "aggregation=token_mean accumulation=fixed"),
    (
        "correction=token_mask correction.low=6",
        "correction.low=6 needs at most correction.high=5 (got 6). It is the lower of two bounds.",
        "correction=token_mask correction.low=5",
    ),
    ("correction=token_truncate correction.high=0", "correction.high=0", "correction=token_truncate correction.high=1"),
    ("correction=sequence_mask correction.mean=sum", "correction.mean=sum", "correction=sequence_mask"),
    ("correction=off_policy_mask correction.threshold=-1", "threshold=-1", "correction=off_policy_mask"),
    (
        "correction=token_mask rollout.old_log_probs=sampling",
        "correction=token_mask needs rollout.old_log_probs=training (got sampling). The old log-probs are then the",
        "correction=off_policy_mask rollout.old_log_probs=sampling",
    ),
    (
        "correction=sequence_mask rollout.top_p=0.9",
        "correction=sequence_mask needs rollout.top_p=null (got 0.9). Sampling log-probs are renormalised",
        "correction=off_policy_mask rollout.top_p=0.9",
    ),
    ("correction=token_mask rollout.top_p=0.9", "renormalised", "correction=token_mask rollout.top_p=1"),
    (
        "correction=off_policy_mask loss=grpo loss.num_splits=2 kernel=torch",
        "correction=off_policy_mask needs loss.num_splits=1 (got 2)",
        "correction=sequence_mask loss=grpo loss.num_splits=2 kernel=torch",
    ),
    ("advantage=given", "rollout=recorded", "advantage=rloo"),
    ("advantage=grpo rollout.group_size=1", "rollout.group_size >= 2", "advantage=grpo rollout.group_size=2"),
    ("advantage=rloo rollout.group_size=1", "rollout.group_size >= 2", "advantage=rloo rollout.group_size=2"),
    ("accumulation.docs_per_step=-1", "docs_per_step=-1", "accumulation.docs_per_step=1"),
    ("accumulation.docs_per_step=0", "Use accumulation=fixed", "accumulation=fixed"),
    ("accumulation.micro_batches_per_step=2", "would be ignored", "accumulation=fixed"),
    ("accumulation=fixed accumulation.micro_batches_per_step=0", "got 0", "accumulation=fixed"),
    ("accumulation.max_tokens=13", "longest document, 14 tokens", "accumulation.max_tokens=14"),
    ("accumulation.docs_per_step=257 accumulation.last_step=drop", "<= 256", "accumulation.docs_per_step=256"),
    ("rollout.temperature=0", "rollout.temperature=0", "rollout.temperature=0.1"),
    ("rollout.temperature=inf", "finite", "rollout.temperature=2"),
    ("rollout.top_p=0", "rollout.top_p=0", "rollout.top_p=1"),
    ("rollout.top_p=1.1", "rollout.top_p=1.1", "rollout.top_p=0.9"),
    ("rollout.prompts_per_batch=0", "rollout.prompts_per_batch=0", "rollout.prompts_per_batch=8"),
    ("rollout.max_completion_length=6", "num_digits=6 needs", "rollout.max_completion_length=8"),
    ("task.num_digits=7", "max_completion_length=8", "task.num_digits=7 rollout.max_completion_length=8"),
    ("task.num_digits=0", "task.num_digits=0", "task.num_digits=1"),
    ("rollout.lag=-1", "rollout.lag=-1", "rollout.lag=64"),
    (
        "rollout.lag=2 accumulation=fixed",
        "accumulation.docs_per_step > 0",
        "rollout.lag=2 accumulation.last_step=carry",
    ),
    (
        "rollout.lag=2 rollout.max_staleness=7 rollout.old_log_probs=sampling",
        "rollout.lag=2 needs rollout.max_staleness=null (got 7)",
        "rollout.max_staleness=7 rollout.old_log_probs=sampling",
    ),
    (
        "rollout.max_staleness=7",
        "needs rollout.old_log_probs=sampling (got training)",
        "rollout.max_staleness=7 rollout.old_log_probs=sampling",
    ),
    (
        "rollout.max_staleness=3 rollout.old_log_probs=sampling",
        "at least the 4 steps of a batch (got 3)",
        "rollout.max_staleness=4 rollout.old_log_probs=sampling",
    ),
    (
        "rollout.max_staleness=7 rollout.old_log_probs=sampling accumulation.last_step=carry",
        "accumulation.last_step=short or drop",
        "rollout.max_staleness=7 rollout.old_log_probs=sampling accumulation.last_step=drop",
    ),
    (
        "rollout.max_staleness=7 rollout.old_log_probs=sampling accumulation=fixed",
        "accumulation.docs_per_step > 0 (got 0)",
        "rollout.old_log_probs=sampling accumulation=fixed",
    ),
    ("rollout.save_path=FILE", "a new or empty folder", "rollout.save_path=FILE.jsonl"),
    ("rollout=recorded", "rollout.path needs a value", "rollout=recorded rollout.path=FILE"),
    ("rollout=recorded rollout.path=/nowhere", "existing", "rollout=recorded rollout.path=FILE"),
    ("rollout=recorded rollout.path=FILE rollout.epochs=0", "epochs", "rollout=recorded rollout.path=FILE"),
    (
        "rollout=recorded rollout.path=FILE aggregation=constant",
        "aggregation.divisor",
        "rollout=recorded rollout.path=FILE aggregation=constant aggregation.divisor=100",
    ),
    ("rollout=recorded rollout.path=FILE", None, "rollout=recorded rollout.path=FILE advantage=given"),
    ("task=prompts", "task.path needs a value", "task=prompts task.path=FILE"),
    (
        "task=prompts task.path=FILE task.verifier=exact",
        "exact_match",
        "task=prompts task.path=FILE task.verifier=operator.eq",
    ),
    (
        "task=prompts task.path=FILE task.verifier=regular_expression",
        "task.pattern with one group",
        "task=prompts task.path=FILE task.verifier=regular_expression task.pattern='a(.*)'",
    ),
    (
        "task=prompts task.path=FILE task.verifier=regular_expression task.pattern='a(b'",
        "one group (got a(b: missing",
        "task=prompts task.path=FILE task.verifier=regular_expression task.pattern='a(b)'",
    ),
    ("task=prompts task.path=FILE task.pattern='(.*)'", "would be ignored", "task=prompts task.path=FILE"),
    (f"{PROMPTS} task.verifier=null", "needs task.verifiers (got none)", PROMPTS),
    (
        f"{PROMPTS} task.verifiers={{a:{{verifier:exact_match}}}}",
        "task.verifier=exact_match needs task.verifiers={} (got [a])",
        f"{PROMPTS} task.verifier=null task.verifiers={{a:{{verifier:exact_match}}}}",
    ),
    (
        f"{PROMPTS} task.verifier=null task.verifiers={{a-b:{{verifier:exact_match}}}}",
        "task.verifiers.a-b needs a name",
        f"{PROMPTS} task.verifier=null task.verifiers.a_b.verifier=exact_match",
    ),
    (
        f"{PROMPTS} task.verifier=null task.verifiers={{a:{{verifier:exact_match,wieght:2}}}}",
        "task.verifiers.a needs the keys verifier and, if need be, weight and pattern",
        f"{PROMPTS} task.verifier=null task.verifiers={{a:{{verifier:exact_match,weight:-2}}}}",
    ),
    (
        f"{PROMPTS} task.verifier=null task.verifiers={{a:{{verifier:exact_match,weight:0}}}}",
        "task.verifiers.a.weight=0 needs a number up to 1e6, not 0",
        f"{PROMPTS} task.verifier=null task.verifiers={{a:{{verifier:exact_match,weight:1e6}}}}",
    ),
    (
        f"{PROMPTS} task.verifier=null task.verifiers={{a:{{verifier:exact_match,pattern:'(x)'}}}}",
        "task.verifiers.a.pattern=(x) needs task.verifiers.a.verifier=regular_expression",
        f"{PROMPTS} task.verifier=null task.verifiers={{a:{{verifier:regular_expression,pattern:'(x)'}}}}",
    ),
    (
        f"{PROMPTS} task.verifier=null task.verifiers={{a:{{verifier:no_such}}}}",
        "task.verifiers.a.verifier=no_such needs one of exact_match",
        f"{PROMPTS} task.verifier=null task.verifiers={{a:{{verifier:operator.eq}}}}",
    ),
    (f"{PROMPTS} task.verifiers=[exact_match]", "task.verifiers=[exact_match] needs a dictionary", PROMPTS),
    (
        f"{PROMPTS} task.verifier_processes=2",
        "Use task.verifier_seconds=10",
        f"{PROMPTS} task.verifier_processes=2 task.verifier_seconds=10",
    ),
    (f"{PROMPTS} task.verifier_seconds=10", "only a process of its own can be ended", PROMPTS),
    (
        f"{PROMPTS} task.system_prompt=x",
        "needs a chat template (got model=tiny, which has none)",
        f"{PROMPTS} task.system_prompt=x model=huggingface model.path=hub/name",
    ),
    (
        f"{PROMPTS} task.system_prompt=x task.chat=never model=huggingface model.path=hub/name",
        "needs a chat template (got task.chat=never). It would be ignored",
        f"{PROMPTS} task.chat=never model=huggingface model.path=hub/name",
    ),
    (
        f"{PROMPTS} task.max_prompt_length=58",
        "model.max_positions=64 needs the longest document, 65 tokens",
        f"{PROMPTS} task.max_prompt_length=57",
    ),
    ("rollout.stop=['']", "texts that are not empty", "rollout.stop=['a']"),
    ("rollout.stop=a", "rollout.stop=a needs a list of texts (got 'a')", "rollout.stop=[a]"),
    (
        "rollout.overlong_buffer=8",
        "at most rollout.max_completion_length=7 (got 8)",
        "rollout.overlong_buffer=8 rollout.max_completion_length=16 model.max_positions=64",
    ),
    (
        "rollout.max_sampling_rounds=2 rollout.max_staleness=4 rollout.old_log_probs=sampling",
        "rollout.max_staleness=null",
        "rollout.max_sampling_rounds=2 rollout.lag=4",
    ),
    ("rollout.overlong_penalty=0.5", "would be ignored", "rollout.overlong_penalty=0.5 rollout.overlong_buffer=1"),
    ("rollout.overlong_buffer=1 advantage=max_rl", "advantage=max_rl", "rollout.overlong_buffer=1 advantage=grpo"),
    ("model.hidden_size=130", "model.hidden_size=132", "model.hidden_size=132"),
    ("model.max_positions=13", "model.max_positions=14", "model.max_positions=14"),
    ("model.num_layers=0", "model.num_layers=0", "model.num_layers=1"),
    ("model=huggingface", "model.path needs a value", "model=huggingface model.path=hub/name"),
    ("model=huggingface model.path=./nowhere", "existing", "model=huggingface model.path=FILE"),
    (f"{HUB} model.lora_rank=0", "a whole number from 1", f"{HUB} model.lora_rank=1"),
    (f"{HUB} model.lora_alpha=8", "ignored: there are no adapters", f"{HUB} model.lora_rank=2 model.lora_alpha=8"),
    (f"{HUB} model.lora_targets=[q_proj]", "model.lora_rank=16 or model.lora_targets=[all-linear]", f"{LORA}[q_proj]"),
    (f"{LORA}[q_proj,all-linear]", "all-linear by itself or names alone", f"{LORA}[all-linear]"),
    (f"{LORA}[]", "names, each of them once (got [])", f"{LORA}[o_proj]"),
    (f"{LORA}[q_proj,q_proj]", "(got [q_proj,q_proj])", f"{LORA}[q_proj,v_proj]"),
    (f"{LORA}[[q_proj]]", "needs names (got [[q_proj]])", f"{LORA}[q_proj]"),
    (f"{LORA}q_proj", "needs a list of texts", f"{LORA}[q_proj]"),
    ("model.lora_rank=2", "model=huggingface", f"{HUB} model.lora_rank=2"),
    (
        f"{HUB} model.lora_rank=2 model.random_weights=true",
        "a model that was trained",
        f"{HUB} model.random_weights=true",
    ),
    *(
        (
            f"{HUB} model.lora_rank=2 rollout=recorded rollout.path=FILE metrics=none parallelism.{axis}=2",
            f"parallelism.{axis}=1 (got parallelism.{axis}=2)",
            f"{HUB} model.lora_rank=2 rollout=recorded rollout.path=FILE parallelism=fsdp parallelism.data_parallel=2",
        )
        for axis in ("tensor_parallel", "pipeline_parallel")
    ),
    ("kernel.logits_memory_mb=0", "kernel.logits_memory_mb=0", "kernel.logits_memory_mb=1"),
    ("kernel=torch kernel.logits_memory_mb=8", "would be ignored", "kernel=fused_linear kernel.logits_memory_mb=8"),
    (
        "loss=grpo loss.num_splits=2 kernel.logits_memory_mb=8",
        "kernel.logits_memory_mb=8 needs loss.num_splits=1 (got 2). It would be ignored",
        "loss=grpo loss.num_splits=2",
    ),
    ("parallelism.data_parallel=0", "parallelism.data_parallel=0", "parallelism.data_parallel=2"),
    ("parallelism.timeout_seconds=0", "timeout_seconds=0", "parallelism.timeout_seconds=1"),
    ("parallelism.sequence_parallel=true", "tensor_parallel > 1", "parallelism.sequence_parallel=false"),
    (
        "rollout=recorded rollout.path=FILE parallelism=fsdp parallelism.data_parallel=1",
        "Use parallelism.data_parallel=2, or parallelism.shard=false",
        "rollout=recorded rollout.path=FILE parallelism=fsdp parallelism.data_parallel=2",
    ),
    (
        "rollout=recorded rollout.path=FILE parallelism=sequence parallelism.tensor_parallel=1",
        "Use parallelism.tensor_parallel=2, or parallelism.sequence_parallel=false",
        "rollout=recorded rollout.path=FILE parallelism=sequence parallelism.tensor_parallel=2",
    ),
    (
        "parallelism=fsdp",
        "rollout=recorded (got rollout=policy)",
        "parallelism=fsdp parallelism.shard=false",
    ),
    (
        "parallelism=sequence_data",
        "no rank would hold one",
        "rollout=recorded rollout.path=FILE parallelism=sequence_data",
    ),
    (
        "parallelism=ddp parallelism.tensor_parallel=2 parallelism.sequence_data_parallel=4",
        "or parallelism.sequence_data_parallel=1 parallelism.tensor_parallel=1",
        "parallelism=ddp parallelism.tensor_parallel=1 parallelism.sequence_data_parallel=1",
    ),
    (
        "rollout=recorded rollout.path=FILE parallelism=sequence parallelism.tensor_parallel=3",
        "a divisor of the model's 4 attention heads",
        "rollout=recorded rollout.path=FILE parallelism=sequence parallelism.tensor_parallel=4",
    ),
    (
        "rollout=recorded rollout.path=FILE metrics=none parallelism=pipeline parallelism.pipeline_parallel=3",
        "at most the model's 2 layers",
        "rollout=recorded rollout.path=FILE metrics=none parallelism=pipeline",
    ),
    (
        "rollout=recorded rollout.path=FILE metrics=none parallelism=pipeline parallelism.sequence_data_parallel=2",
        "Use parallelism.sequence_data_parallel=1",
        "rollout=recorded rollout.path=FILE metrics=none parallelism=pipeline parallelism.data_parallel=2",
    ),
    (
        "rollout=recorded rollout.path=FILE metrics=none parallelism=sequence parallelism.pipeline_parallel=2",
        "Stages hand over whole micro-batches. Use parallelism.sequence_parallel=false",
        "rollout=recorded rollout.path=FILE metrics=none parallelism=tensor parallelism.pipeline_parallel=2",
    ),
    ("optimizer.learning_rate=0", "learning_rate=0", "optimizer.learning_rate=1e-6"),
    ("optimizer.beta1=1", "optimizer.beta1=1", "optimizer.beta1=0"),
    ("optimizer.weight_decay=-1", "weight_decay", "optimizer.weight_decay=0"),
    ("optimizer.max_grad_norm=0", "max_grad_norm=0", "optimizer.max_grad_norm=null"),
    ("optimizer.warmup_steps=-1", "warmup_steps", "optimizer.warmup_steps=0"),
    ("trainer.max_steps=0", "trainer.max_steps=0", "trainer.max_steps=1"),
    ("trainer.checkpoint_every=0", "checkpoint_every", "trainer.checkpoint_every=1"),
    ("trainer.num_threads=0", "num_threads", "trainer.num_threads=null"),
    ("trainer.device=cuda:1", "trainer.device=auto", "trainer.device=cpu"),
    ("trainer.device=gpu", "trainer.device=auto", "trainer.device=cuda"),
    ("seed=-1", "seed=-1", "seed=4294967295"),
    ("tracking.run_name=../escape", "tracking.run_name=escape", "tracking.run_name=a.b-c_1"),
    ("tracking.uri=./mlruns", "sqlite:///outputs/mlflow.db", "tracking.uri=sqlite:///my.db"),
    ("tracking.uri=sqlite:////tmp", "a folder", "tracking.uri=sqlite:////tmp/my.db"),
    ("tracking.uri=file:///tmp/mlruns", "sqlite", "tracking.uri=http://127.0.0.1:5000"),
    ("tracking.uri=http://me:secret@host", "tracking.uri=http://***@host needs an address", "tracking.uri=http://host"),
    ("tracking.uri=postgresql://me@host/db", "MLFLOW_TRACKING_USERNAME", "tracking.uri=postgresql://host/db"),
    (
        "rollout=recorded rollout.path=FILE sampler.max_sequences=8",
        "sampler.max_sequences=8 needs rollout=policy or evaluation.every > 0 (got rollout=recorded)",
        "sampler.max_sequences=8",
    ),
    ("sampler=vllm sampler.gpus=[0]", "numbers from 1 on (got 0)", "sampler=vllm sampler.gpus=[1]"),
    (
        "sampler=vllm sampler.gpus=[1,2] parallelism=ddp",
        "Training takes GPU 0 to 1",
        "sampler=vllm sampler.gpus=[2,3] parallelism=ddp",
    ),
    ("sampler=vllm sampler.gpus=[1,1]", "each once", "sampler=vllm sampler.gpus=[0] trainer.device=cpu"),
    ("sampler=vllm sampler.gpus=[]", "numbers of GPUs", "sampler=vllm sampler.gpus=null"),
    (
        "sampler=vllm sampler.gpus=[1,2,3] sampler.tensor_parallel=2",
        "a multiple of sampler.tensor_parallel=2 GPUs (got 3). Each server takes so many. Use sampler.gpus=[1,2]",
        "sampler=vllm sampler.gpus=[1,2] sampler.tensor_parallel=2",
    ),
    (
        "sampler=vllm sampler.tensor_parallel=2",
        "needs sampler.gpus (got null)",
        "sampler=vllm sampler.tensor_parallel=1",
    ),
    ("sampler=vllm sampler.urls=[host]", "http(s)://HOST:PORT", "sampler=vllm sampler.urls=['http://host:1']"),
    (
        "sampler=vllm sampler.urls=['http://a:1','http://a:1']",
        "each server once",
        "sampler=vllm sampler.urls=['http://a:1','http://b:1']",
    ),
    (
        "sampler=vllm sampler.urls=['http://a:1'] sampler.gpus=[1]",
        "sampler.gpus=[1] needs sampler.urls=[]",
        "sampler=vllm sampler.gpus=[1]",
    ),
    ("sampler=vllm sampler.executable=''", "a command", "sampler=vllm sampler.executable=vllm"),
    (
        "sampler=vllm sampler.arguments=['--port=1']",
        "no --port",
        "sampler=vllm sampler.arguments=['--enforce-eager']",
    ),
    (
        "sampler=vllm parallelism=ddp sampler.answer_seconds=400",
        "parallelism.timeout_seconds=300",
        "sampler=vllm sampler.answer_seconds=400",
    ),
    ("sampler=vllm sampler.gpu_memory_share=1.5", "from 0.01 to 1", "sampler=vllm sampler.gpu_memory_share=0.9"),
    ("rollout=recorded rollout.path=FILE sampler=vllm", "would be ignored", "sampler=vllm"),
    (
        "rollout=recorded rollout.path=FILE sampler=transformers",
        "sampler=transformers needs rollout=policy",
        "rollout=recorded rollout.path=FILE",
    ),
    (
        "tracking.uri='http://host?passwd=x'",
        "tracking.uri=http://host?passwd=*** needs",
        "tracking.uri='http://host?a=x'",
    ),
    ("model=huggingface model.path=hf_abcdefghijklmnop12345", "model.path=*** needs to hold no secret", "seed=1"),
    ("+hydra.job.env_set.MY_TOKEN=abc", "MY_TOKEN=*** needs to hold no secret", "+hydra.job.env_set.MINE=abc"),
    ("tracking=none tracking.experiment=x", "would be ignored", "tracking=none tracking.run_name=x"),
    ("seed=${oc.env:HOME}", "environment variable", "seed=${trainer.max_steps}"),
    ("seed=${trainer.steps}", "resolves", "seed=${trainer.max_steps}"),
]


def problems(overrides, file="FILE"):
    composed = compose([part.replace("FILE", str(file)) for part in overrides.split()])
    return composed.problems + validate(composed.config).problems


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "there.jsonl"
    path.touch()
    return path


@pytest.mark.parametrize(("refused", "shows", "allowed"), RULES, ids=lambda value: str(value)[:60])
def test_rule(refused, shows, allowed, file):
    found = problems(refused, file)
    if shows is not None:
        assert any(shows in problem for problem in found), found
        for problem in found:
            assert " needs " in problem
            assert "(got " in problem
            assert " Use " in problem
            assert "\n" not in problem
    assert problems(allowed, file) == []


@pytest.mark.parametrize("divisor", ["0", "-1", "nan", "inf", "-inf", "null", "true", "abc"])
def test_divisor_is_refused(divisor):
    found = problems(f"aggregation=constant aggregation.divisor={divisor}")
    assert len(found) == 1
    assert found[0].startswith(f"aggregation.divisor={divisor} needs ")


@pytest.mark.parametrize("divisor", ["1", "0.5", "1e-3", "4096"])
def test_divisor_is_allowed(divisor):
    assert problems(f"aggregation=constant aggregation.divisor={divisor}") == []


@pytest.mark.parametrize("divisor", [0, -1, float("nan"), float("inf"), True, "abc", None])
def test_divisor_is_refused_without_the_types_of_the_schema(divisor):
    config = compose(["aggregation=constant"]).config
    config = OmegaConf.create(OmegaConf.to_container(config, enum_to_str=True) | {"hydra": None})
    config.aggregation.divisor = divisor
    assert [problem for problem in validate(config).problems if problem.startswith("aggregation.divisor")]


def test_pipeline_stages_have_a_rule_of_their_own_for_metrics():
    recorded = "rollout=recorded rollout.path=pyproject.toml parallelism=pipeline"
    assert [problem.partition(" needs ")[0] for problem in problems(recorded)] == ["metrics=basic"]
    assert problems(f"{recorded} metrics=none") == []
    for other in (
        "parallelism.sequence_data_parallel=2",
        "parallelism.tensor_parallel=2 parallelism.sequence_parallel=true",
    ):
        assert "whole micro-batches" in problems(f"{recorded} metrics=none {other}")[0]
    assert problems(f"{recorded} metrics=none parallelism.tensor_parallel=2 parallelism.data_parallel=2") == []


def test_the_sizes_multiply_to_the_processes_that_a_launcher_started(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    found = problems("parallelism=ddp")
    assert "2 = pipeline_parallel=1 x data_parallel=2 x sequence_data_parallel=1 x tensor_parallel=1" in found[0]
    assert problems("parallelism=ddp parallelism.data_parallel=4") == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert problems("parallelism=ddp") == []


def test_the_sizes_fit_a_model_whose_shape_is_on_the_disk(tmp_path):
    shape = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 100}))
    model = f"model=huggingface model.path={tmp_path} rollout=recorded rollout.path=pyproject.toml metrics=none"
    assert "a divisor of the model's 2 key-value heads" in problems(f"{model} parallelism.tensor_parallel=4")[0]
    assert "Use parallelism.pipeline_parallel=3" in problems(f"{model} parallelism.pipeline_parallel=4")[0]
    assert problems(f"{model} parallelism.tensor_parallel=2 parallelism.pipeline_parallel=3") == []
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 100, "tie_word_embeddings": True}))
    assert "two matrices" in problems(f"{model} parallelism.pipeline_parallel=2")[0]
    assert problems(f"{model} parallelism.tensor_parallel=2") == []
    gpt2 = {"model_type": "gpt2", "n_head": 8, "n_layer": 3, "vocab_size": 100}  # whose matrices are one unless it says
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    assert "two matrices" in problems(f"{model} parallelism.pipeline_parallel=2")[0]
    (tmp_path / "config.json").write_text(json.dumps(gpt2 | {"tie_word_embeddings": False}))
    assert problems(f"{model} parallelism.pipeline_parallel=2") == []
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 100, "model_type": "bloom"}))
    assert "a model of type gpt2, llama" in problems(f"{model} parallelism.tensor_parallel=2")[0]
    assert problems(f"{model} parallelism=ddp") == []
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 9}))
    assert "One rank would hold none of the vocabulary" in problems(f"{model} parallelism.tensor_parallel=4")[0]
    assert problems(f"{model} parallelism.tensor_parallel=3") == []


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "kernel=triton needs a GPU" in problems("kernel=triton trainer.device=cpu")[0]
    assert problems("kernel=triton") == []
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert problems("kernel=triton trainer.device=cpu") == []


def test_code_is_never_named_by_a_configuration():
    found = problems("task=reasoning_gym task.dataset=x task.options={_target_:os.system}")
    assert any("_target_" in problem for problem in found)
    found = problems("task=reasoning_gym task.dataset=x task.options.a=[{_target_:os.system}]")
    assert any("_target_" in problem for problem in found)


def test_a_password_is_not_repeated():
    assert not any("secret" in problem for problem in problems("tracking.uri=postgresql://me:secret@host/db"))


def test_all_problems_at_once():
    found = problems(
        "loss.num_splits=2 aggregation.divisor=3 rollout.temperature=0 trainer.max_steps=0 seed=x lss=grpo"
    )
    assert len(found) == 6


NOTES = [
    ("aggregation=constant", "weights a document by its number of trained tokens", "loss=grpo aggregation=constant"),
    ("loss.epsilon_high=0.05", "almost never acts", "loss.epsilon_high=0.04"),
    ("loss.epsilon_low=0.05", "almost never acts", "loss=grpo"),
    (
        "model=huggingface model.path=x/y model.dtype=bfloat16 model.fp32_lm_head=false",
        "after every update, and with rollout.old_log_probs=sampling from the start",
        "model=huggingface model.path=x/y model.dtype=bfloat16 model.fp32_lm_head=true",
    ),
    (
        "correction=sequence_mask correction.mean=geometric correction.low=0.5",
        "almost never act (others use 0.999 and 1.001)",
        "correction=sequence_mask correction.mean=geometric correction.low=0.99 correction.high=1.01",
    ),
    ("accumulation.docs_per_step=60", "last step of every batch has only 16", "accumulation.docs_per_step=32"),
    ("accumulation.docs_per_step=60 accumulation.last_step=drop", "16 documents", "accumulation.docs_per_step=128"),
    ("accumulation.docs_per_step=60 accumulation.last_step=carry", "mix documents", "accumulation.docs_per_step=64"),
    ("accumulation.docs_per_step=300", "never reached", "accumulation.docs_per_step=64"),
    ("accumulation.docs_per_step=256", "every ratio is 1", "accumulation.docs_per_step=128"),
    ("rollout.top_p=0.9", "left out", "rollout.top_p=1"),
    (
        r"rollout.stop=['\n']",
        "holds a backslash and a letter, as typed",
        "rollout.stop=[n]",
    ),
    ("rollout.top_p=0.9 rollout.old_log_probs=sampling", "renormalised", "rollout.old_log_probs=sampling"),
    ("trainer.max_steps=10", "never reaches", "trainer.max_steps=11"),
    ("optimizer.learning_rate=0.1", "is 100 times the 0.001 that models such as", "optimizer.learning_rate=0.09"),
    (
        "model=huggingface model.path=x/y optimizer.learning_rate=1e-3",
        "optimizer.learning_rate=0.001 is 1e+03 times the 1e-06 that models such as this one usually take",
        "model=huggingface model.path=x/y optimizer.learning_rate=9e-5",
    ),
    (
        "model=huggingface model.path=x/y model.random_weights=true optimizer.learning_rate=1",
        "1e+03 times the 0.001",
        "model=huggingface model.path=x/y model.random_weights=true optimizer.learning_rate=1e-3",
    ),
    ("aggregation.reducer=json.dumps", "takes the place", ""),
    ("task=reasoning_gym task.dataset=x", "longer answers", "task=reverse"),
    (
        "rollout=recorded rollout.path=x task.num_digits=3",
        "task.num_digits=3 only gives model=tiny its characters: with rollout=recorded prompts and rewards come from",
        "rollout=recorded rollout.path=x",
    ),
    (
        "rollout=recorded rollout.path=x task.num_digits=3 model=huggingface model.path=x/y",
        "task.num_digits=3 changes nothing: with rollout=recorded",
        "task.num_digits=3",
    ),
]


@pytest.mark.parametrize(("noted", "shows", "silent"), NOTES, ids=lambda value: str(value)[:60])
def test_note(noted, shows, silent):
    assert any(shows in note for note in validate(compose(noted.split()).config).notes)
    assert not any(shows in note for note in validate(compose(silent.split()).config).notes)


def test_checking_imports_no_torch():
    code = (
        "import sys; from pgtoolkit.launch.check import check, page; page(check(['experiment=dapo']));"
        "print(sorted({'torch', 'lightning', 'mlflow', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
