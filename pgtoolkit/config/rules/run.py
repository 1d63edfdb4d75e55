"""The rules on rollouts, the model, kernels and the optimizer."""

from __future__ import annotations

import re

from pgtoolkit.config.counts import tokens_at_least
from pgtoolkit.config.models import measures_prompts, shape, trains_experts
from pgtoolkit.config.own_code import family_of_config
from pgtoolkit.config.rules.named import existing, importable, installed
from pgtoolkit.config.schema import Config
from pgtoolkit.losses.family import Family
from pgtoolkit.model.misfits import cannot_share, cannot_update_by_muon, unknown_parts
from pgtoolkit.model.settings import HuggingFaceModelSettings, TinyModelSettings
from pgtoolkit.rollouts.batch_counts import steps_of_batch
from pgtoolkit.rollouts.recorded_folder import batches_in
from pgtoolkit.rollouts.settings import OVERLONG_BUFFER, PolicyRolloutSettings
from pgtoolkit.system.report import Report, is_number, plural, refusal, text
from pgtoolkit.tasks.settings import GeneratedTaskSettings, PromptsTaskSettings
from pgtoolkit.training.loss_settings import KLPlace
from pgtoolkit.training.settings import LEAST_RATE


def rollout(c: Config, report: Report) -> None:
    rollout = c.rollout
    if not isinstance(rollout, PolicyRolloutSettings):
        existing(report, "rollout.path", rollout.path)
        return
    if rollout.save_path is not None and batches_in(rollout.save_path) is None:
        report.refuse(
            setting=f"rollout.save_path={rollout.save_path}",
            needs="a new or empty folder, or one of rollouts to resume",
            got="other files at that place",
            reason="It becomes a folder with one file per batch.",
            use="rollout.save_path=recorded_rollouts",
        )
    batch = rollout.prompts_per_batch * rollout.group_size
    if batch > _MOST_DOCUMENTS:
        report.refuse(
            setting=f"rollout.prompts_per_batch={rollout.prompts_per_batch}",
            needs="at most 1000000 documents a batch",
            got=batch,
            reason="A batch is kept in memory until it is trained on.",
            use=f"rollout.prompts_per_batch={_MOST_DOCUMENTS // rollout.group_size}",
        )
    _completions(rollout, report)
    _sampled_ahead(c, rollout, report)
    length = rollout.max_completion_length
    if isinstance(c.task, GeneratedTaskSettings):
        room_for_answer(c.task, "rollout.max_completion_length", length, report)
    elif length < SHORT and not isinstance(c.task, PromptsTaskSettings):
        # Of files, the answers say what is too short; see `assembly.preview`.
        tokens = plural(length, "token")
        report.note(
            f"rollout.max_completion_length={length}: {tokens} is short for this task. Use "
            f"rollout.max_completion_length={4 * SHORT}, or more."
        )


SHORT = 16
"""Tokens of a completion below which even a plain answer may not fit."""

_MOST_DOCUMENTS = 10**6
"""The highest accumulation.docs_per_step."""

_LONGEST_LAG = 1000


def _completions(rollout: PolicyRolloutSettings, report: Report) -> None:
    """Check how completions are sampled and where they end."""
    length = rollout.max_completion_length
    if rollout.overlong_buffer is not None and rollout.overlong_buffer > length:
        report.refuse_value(
            key="rollout.overlong_buffer",
            value=rollout.overlong_buffer,
            needs=f"at most rollout.max_completion_length={length}",
            reason=OVERLONG_BUFFER.because,
            better=max(1, length // 5),
        )
    if "" in rollout.stop:
        report.refuse(
            setting=f"rollout.stop={rollout.stop}",
            needs="texts that are not empty",
            got="''",
            reason="Every completion contains it.",
            use="rollout.stop=[]",
        )
    if re.search(r"\\[nt]", "".join(rollout.stop)):
        report.note(
            "rollout.stop holds a backslash and a letter; for a line break type "
            "$'rollout.stop=[\"\\n\"]'."
        )


def _sampled_ahead(c: Config, rollout: PolicyRolloutSettings, report: Report) -> None:
    """Check how early batches are sampled."""
    is_counted = c.accumulation.docs_per_step > 0 and c.accumulation.last_step != "carry"
    steps = steps_of_batch(rollout, c.accumulation) if is_counted else 0
    if rollout.lag > max(_LONGEST_LAG, c.trainer.max_steps):
        report.refuse_value(
            key="rollout.lag",
            value=rollout.lag,
            needs=f"at most {_LONGEST_LAG}, or trainer.max_steps",
            reason="The batches of all these steps are sampled, and kept, before the first step.",
            better=16,
        )
    if rollout.max_staleness is not None and rollout.max_staleness < steps:
        report.refuse_value(
            key="rollout.max_staleness",
            value=rollout.max_staleness,
            needs=f"at least the {steps} steps of a batch{_in_passes(rollout)}",
            reason="With less, nothing could be trained while a batch is sampled.",
            better=2 * steps - 1,
        )


def _in_passes(rollout: PolicyRolloutSettings) -> str:
    return f" in its {rollout.passes} passes" if rollout.passes > 1 else ""


def room_for_answer(task: GeneratedTaskSettings, key: str, length: int, report: Report) -> None:
    """Check that the longest reference answer fits a completion. key: of the longest completion."""
    needed = task.longest[1]
    if length < needed:
        report.refuse(
            setting=f"task.{task.size}={getattr(task, task.size)}",
            needs=f"{key} >= {needed}",
            got=length,
            reason="The longest reference answer has that many tokens, its end included. A shorter "
            "limit cuts it off, and it scores 0.",
            use=f"{key}={needed}",
        )


def model(c: Config, report: Report) -> None:
    if isinstance(c.model, TinyModelSettings):
        _tiny(c, c.model, report)
    else:
        _huggingface(c.model, report)
    kind = shape(c.model).get("type")
    problems = [unknown_parts(c.model, kind)]
    if c.model.share_prompts is True:
        problems.append(cannot_share(kind))
    if c.optimizer.name == "muon":
        problems.append(cannot_update_by_muon(trains_experts(c)))
    report.problems += [problem for problem in problems if problem is not None]
    family = family_of_config(c)
    if family is not None:
        note_rounded_logits(c, family, report)


def _tiny(c: Config, model: TinyModelSettings, report: Report) -> None:
    width = model.hidden_size
    heads = model.num_heads
    if width % heads:
        report.refuse_value(
            key="model.hidden_size",
            value=width,
            needs=f"a multiple of model.num_heads={heads}",
            reason="Every head takes an equal share of the width.",
            better=width + -width % heads,
        )
    if not measures_prompts(c):
        room_for(c, tokens_at_least(c), "the longest document", report)


def _huggingface(model: HuggingFaceModelSettings, report: Report) -> None:
    existing(report, "model.path", model.path, hub=True)
    if model.lora_rank is not None:
        installed(report, f"model.lora_rank={model.lora_rank}", "peft", "lora")
    targets = model.lora_targets
    are_repeated = len(set(targets)) < len(targets)
    are_more_than_all = "all-linear" in targets and len(targets) > 1
    if not targets or are_repeated or are_more_than_all:
        report.refuse_value(
            key="model.lora_targets",
            value=targets,
            needs="names, each of them once, or all-linear by itself",
            reason="They say which layers get adapters.",
            better=["all-linear"],
        )


def note_rounded_logits(c: Config, family: Family, report: Report) -> None:
    """Note logits that are too coarse for the narrow bounds of a ratio by document."""
    model = c.model
    if model.name != "huggingface" or model.dtype == "float32" or model.fp32_lm_head:
        return
    low, _ = family.limits
    if not family.by_document or low <= 1 - 1e-3:
        return
    number_type = "float16" if model.dtype == "float16" else "bfloat16"
    report.note(
        f"model.dtype={model.dtype} without model.fp32_lm_head: logits are rounded to "
        f"{number_type}. That moves a document's ratio by about epsilon "
        f"{1 - low:g} wherever its old and new log-probs come from different "
        "computations: after every update, and with rollout.old_log_probs=sampling from the "
        "start. The clip then acts on documents because of rounding."
    )


def room_for(c: Config, tokens: int, of: str, report: Report) -> None:
    """Check that the tiny model has positions for a document of this many tokens."""
    if c.model.name == "tiny" and tokens > c.model.max_positions:
        report.refuse_value(
            key="model.max_positions",
            value=c.model.max_positions,
            needs=f"{of}, {tokens} tokens",
            reason="The model has a position for every token of a document.",
            better=tokens,
        )


def kernel(c: Config, report: Report) -> None:
    if c.kernel.needs_gpu and c.trainer.device == "cpu":
        report.problems.append(no_triton("trainer.device=cpu"))
    if c.kernel.implementation == "triton" and not c.kernel.needs_gpu:
        # Under Triton's interpreter. PyTorch's builds for GPUs bring the package.
        installed(report, "kernel=triton", "triton", "triton")


def no_triton(got: str) -> str:
    """Return the refusal of kernel=triton. got: the device that there is in the place of a GPU."""
    return refusal(
        setting="kernel=triton",
        needs="a GPU",
        got=got,
        reason="Triton compiles for GPUs; TRITON_INTERPRET=1 runs its kernels slowly on a CPU.",
        use="kernel=torch",
    )


def callbacks(c: Config, report: Report) -> None:
    """Refuse callbacks without a name or without the path of a class; making them is tried before
    the start."""
    for name, entry in c.callbacks.own.items():
        key = f"callbacks.{name}"
        path = entry.get("path") if isinstance(entry, dict) else None
        if not re.fullmatch(r"[A-Za-z]\w{0,39}", name):
            report.refuse(
                setting=key,
                needs="a name of up to 40 letters, digits and '_', a letter first",
                got=name,
                reason="It stands in the keys of the callback.",
                use=f"callbacks.mine.path={path or 'package.module.Class'}",
            )
        elif not isinstance(path, str):
            report.refuse(
                setting=key,
                needs="the path of its class",
                got=entry,
                reason="It is made from that class, by the other values as arguments.",
                use=f"{key}.path=lightning.pytorch.callbacks.EarlyStopping",
            )
        else:
            importable(report, f"{key}.path", path, "It is imported when the run starts.")


def optimizer(c: Config, report: Report) -> None:
    default_rate = report.default_of("optimizer.learning_rate")  # for models of this kind
    rate = c.optimizer.learning_rate
    least = c.optimizer.min_learning_rate
    rates = {"optimizer.learning_rate": rate}
    if c.advantage.estimator == "gae":
        rates["critic.learning_rate"] = c.critic.learning_rate
    for name, highest in rates.items():
        if least > highest:
            report.refuse_value(
                key="optimizer.min_learning_rate",
                value=least,
                needs=f"at most {name}={text(highest)}",
                reason=LEAST_RATE.because,
                better=highest,
            )
            break
    warmup = c.optimizer.warmup_steps
    steps = c.trainer.max_steps
    settings = f"with trainer.max_steps={steps}"
    if c.critic.steps_before_policy:
        settings += f" and critic.steps_before_policy={c.critic.steps_before_policy}"
    updates = steps - c.critic.steps_before_policy
    if warmup >= updates:
        schedule = c.optimizer.schedule.value
        never = "" if schedule == "constant" else f", and never decays ({schedule})"
        settings_of_warmup = f"optimizer.warmup_steps={warmup} {settings}"
        report.note(
            f"{settings_of_warmup}: the run ends during warm-up{never}. Use "
            f"optimizer.warmup_steps={max(0, updates // 10)}."
        )
    if c.kl.update_every is not None and c.kl.update_every >= updates:
        update_every = f"kl.update_every={c.kl.update_every} {settings}"
        report.note(f"{update_every}: no step has a reference that has moved.")
    is_the_policy = c.kl.update_every == 1 and c.kl.update_rate == 1
    if is_the_policy and c.kl.place == KLPlace.loss and c.kl.reference_prompt is None:
        report.note(
            "kl.update_every=1 with kl.update_rate=1: the reference is the policy itself at each "
            "step, so the penalty stays 0. Use kl.update_rate=0.1 or kl.update_every=512."
        )
    lag = getattr(c.rollout, "lag", 0)
    if lag and lag >= updates:
        report.note(f"rollout.lag={lag} {settings}: the first weights sample every completion.")
    if c.optimizer.path is not None:
        importable(report, "optimizer", c.optimizer.path, "It is imported when the run starts.")
    if c.optimizer.name == "muon" and c.model.lora_rank is not None:
        report.note(
            f"optimizer=muon with model.lora_rank={c.model.lora_rank}: each of an adapter's two "
            "matrices gets an orthogonal update of its own, and not their product."
        )
    if is_number(default_rate) and rate >= 100 * default_rate:
        report.note(
            f"optimizer.learning_rate={text(rate)} is {rate / default_rate:,.0f} times the "
            f"{text(default_rate)} that is usual for such a model: the policy may leave its clip, "
            "or break, within a few steps."
        )
