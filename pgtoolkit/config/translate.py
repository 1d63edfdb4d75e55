"""`pgtk translate FILE`: a configuration of TRL or verl as a command here, with what differs and
what has no equal."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pgtoolkit.config.compose import compose
from pgtoolkit.config.elsewhere import NONE, known_as, rows_of_trainers
from pgtoolkit.config.files import options
from pgtoolkit.config.keys import plain_value
from pgtoolkit.config.schema import default_options
from pgtoolkit.errors import ConfigError, unusable
from pgtoolkit.system.report import refusal, text
from pgtoolkit.system.yaml_text import plain_yaml

_LARGEST = 1 << 20
"""Most bytes of a configuration file."""

Value = str | int | float | bool | list | None
"""What a YAML or JSON file gives a key."""


@dataclass
class Their:
    """The configuration in a file, with the defaults of the trainer that it is for. values: by
    dotted name."""

    trainer: str
    values: dict[str, Value]
    used: set[str] = field(default_factory=set)

    def given(self, name: str) -> bool:
        """Return whether the file has a key, as its whole name or below its sections."""
        return self._key(name) is not None

    def __getitem__(self, name: str) -> Value:
        """Return a key's value, or the trainer's default, and note that it was read."""
        key = self._key(name)
        if key is not None:
            self.used.add(key)
            return self.values[key]
        return default_of(self.trainer, name)

    def number(self, name: str) -> float:
        """Return a value as a number; ConfigError for what is none."""
        value = self[name]
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return float(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise ConfigError(
            refusal(
                setting=f"{name}={text(value)}",
                needs="a number",
                got=value,
                reason="It is translated by its value.",
                use=f"{name}=NUMBER",
            )
        )

    def _key(self, name: str) -> str | None:
        # A critic has keys of the same names as the policy.
        named = [key for key in self.values if key == name or key.endswith(f".{name}")]
        return next(
            (key for key in named if "critic" in name or not key.startswith("critic.")), None
        )


@dataclass(frozen=True)
class Setting:
    """An override here, and the keys of theirs that it says."""

    key: str
    value: Value
    says: tuple[str, ...]

    @property
    def override(self) -> str:
        value = text(self.value)
        plain = re.fullmatch(r"[\w./:@+\[\]-]+", value)
        return (
            f"{self.key}={value}"
            if plain
            else f"{self.key}='{value.replace(chr(39), chr(92) + chr(39))}'"
        )


def default_of(trainer: str, name: str) -> Value:
    """Return the trainer's own default of a key, as docs/trl_and_verl.md has it."""
    for row in rows_of_trainers():
        if row.trainer == trainer and name in row.names and row.defaults:
            place = row.names.index(name) if len(row.defaults) == len(row.names) else 0
            return plain_yaml(f"value: {row.defaults[place]}".encode())["value"]
    return None


def read(path: Path) -> Their:
    """Return the configuration in a YAML or JSON file of TRL or verl. Raises ConfigError where
    there is none."""
    if not path.is_file():
        raise ConfigError(
            refusal(
                setting=f"pgtk translate {path}",
                needs="a file",
                got=path,
                reason="It reads a configuration.",
                use="a YAML or JSON file, such as the one that trl grpo --config or verl's trainer "
                "takes",
            )
        )
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise unusable(error) from error
    try:
        if len(data) > _LARGEST:
            raise ValueError(f"more than {_LARGEST} bytes")
        values = dict(_flat(plain_yaml(data)))
    except ValueError as error:
        raise ConfigError(
            refusal(
                setting=f"pgtk translate {path}",
                needs="YAML or JSON",
                got=error,
                reason="It cannot be read.",
                use="a file of keys with their values",
            )
        ) from None
    sections = {name.partition(".")[0] for name in values if "." in name}
    is_verl = bool(sections & {"actor_rollout_ref", "algorithm", "data", "trainer"})
    return Their("verl" if is_verl else "TRL", values)


def _flat(values: object, above: str = "") -> Iterator[tuple[str, Value]]:
    """Yield (dotted name, value) for each key of nested dictionaries; ValueError for what has no
    keys."""
    if not isinstance(values, dict):
        raise ValueError(f"no keys with values, but a {type(values).__name__}")
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def translate(path: Path, processes: int) -> str:
    """Return the page on a file of TRL or verl. processes: that TRL would train on, which its file
    does not say."""
    theirs = read(path)
    settings = [*(_of_verl(theirs) if theirs.trainer == "verl" else _of_trl(theirs, processes))]
    said = [
        setting
        for setting in settings
        if any(theirs.given(name) for name in setting.says) or not setting.says
    ]
    silent = [setting for setting in settings if setting not in said]
    chosen = {setting.key: setting.override for setting in settings if setting.key in options()}
    config = compose([*chosen.values()]).config
    here = {
        key: default_options()[key] if key in chosen else plain_value(config, key)
        for key in (s.key for s in silent)
    }
    silent = [setting for setting in silent if not _equal(here[setting.key], setting.value)]
    command = shlex.join(
        [
            "pgtk",
            *(setting.override for setting in settings if setting in said or setting in silent),
        ]
    )
    lines = [f"{path}, a configuration of {theirs.trainer}, is here", "", f"  {command}"]
    if silent:
        lines += [
            "",
            (
                f"Part of it stands for defaults of {theirs.trainer} that the file leaves as they "
                "are. Here they differ:"
            ),
        ]
        for setting in silent:
            name = setting.says[0]
            size = (
                "; gradients have another size under each" if setting.key == "aggregation" else ""
            )
            lines.append(
                f"  {setting.override}: {name}={text(theirs[name])} there, "
                f"{text(here[setting.key])} here{size}"
            )
    lines += _differences(theirs)
    return "\n".join(lines)


def _equal(ours: Value, theirs: Value) -> bool:
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return ours == theirs
    return text(ours) == text(theirs)


def _differences(theirs: Their) -> list[str]:
    """Say of each key in the file what is not in the command, why, and what else differs."""
    without, by_hand, remarks, unknown = [], [], [], []
    for key, value in theirs.values.items():
        rows = known_as(key, theirs.trainer)
        if not rows:
            unknown.append(key)
            continue
        name, row = rows[0]
        if key in theirs.used:
            remarks += [f"{key}: {row.remark}"] if row.remark else []
        elif row.here == NONE:
            same = row.defaults and _equal(default_of(theirs.trainer, name), value)
            without += [] if same else [f"{key}={text(value)}: {row.remark}"]
        else:
            by_hand.append(
                f"{key}={text(value)}: {row.here}{f' ({row.remark})' if row.remark else ''}"
            )
    lines = []
    for title, entries in (
        ("What has no equal here:", without),
        ("What is to be set by hand:", by_hand),
        ("What is not quite the same:", remarks),
        (
            f"What is no key of {theirs.trainer}'s that is known:",
            [", ".join(unknown)] if unknown else [],
        ),
    ):
        if entries:
            lines += ["", title, *(f"  {entry}".replace("`", "") for entry in entries)]
    return lines


_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}


def _of_trl(theirs: Their, processes: int) -> Iterator[Setting]:
    """Yield the overrides that say what a configuration of GRPOTrainer says, its defaults among
    them."""
    yield from _model_and_prompts(
        theirs, ("model_name_or_path", "model"), ("dataset_name", "train_dataset")
    )
    if theirs.given("dataset_train_split"):
        yield Setting("task.split", theirs["dataset_train_split"], ("dataset_train_split",))
    functions = theirs["reward_funcs"] if theirs.given("reward_funcs") else None
    if isinstance(functions, str | list):
        single = functions[0] if isinstance(functions, list) and len(functions) == 1 else functions
        if isinstance(single, str) and "." in single:
            yield Setting("task.verifier", single, ("reward_funcs",))
        else:
            theirs.used.discard("reward_funcs")
    yield from _loss_of_trl(theirs)
    group_size = int(theirs.number("num_generations"))
    per_step = int(
        theirs.number("per_device_train_batch_size") * theirs.number("gradient_accumulation_steps")
    )
    per_step *= processes
    size_of_step = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if theirs.given("generation_batch_size") and theirs["generation_batch_size"]:
        batch = int(theirs.number("generation_batch_size"))
        size_of_batch = ("generation_batch_size", "num_generations")
    else:
        accumulated = theirs.number("gradient_accumulation_steps")
        steps = (
            theirs.number("steps_per_generation") if theirs["steps_per_generation"] else accumulated
        )
        batch = int(per_step / accumulated * steps)
        size_of_batch = ("steps_per_generation", *size_of_step)
    yield Setting("rollout.group_size", group_size, ("num_generations",))
    yield Setting("rollout.prompts_per_batch", max(1, batch // group_size), size_of_batch)
    yield Setting("accumulation.docs_per_step", per_step, size_of_step)
    yield Setting(
        "rollout.max_completion_length", theirs["max_completion_length"], ("max_completion_length",)
    )
    yield Setting("rollout.temperature", theirs["temperature"], ("temperature",))
    if theirs.number("top_p") != 1:
        yield Setting("rollout.top_p", theirs["top_p"], ("top_p",))
    if theirs["mask_truncated_completions"]:
        yield Setting("rollout.truncated", "mask", ("mask_truncated_completions",))
    if theirs["use_vllm"]:
        yield from _vllm_of_trl(theirs)
    if (
        theirs.given("off_policy_mask_threshold")
        and theirs["off_policy_mask_threshold"] is not None
    ):
        yield Setting("correction", "off_policy_mask", ("off_policy_mask_threshold",))
        yield Setting(
            "correction.threshold",
            theirs["off_policy_mask_threshold"],
            ("off_policy_mask_threshold",),
        )
    yield from _training(
        theirs,
        learning_rate="learning_rate",
        schedule="lr_scheduler_type",
        warmup_steps="warmup_steps",
        weight_decay="weight_decay",
        max_grad_norm="max_grad_norm",
    )
    for name, beta in (
        ("adam_beta1", "beta1"),
        ("adam_beta2", "beta2"),
        ("adam_epsilon", "epsilon"),
    ):
        yield Setting(f"optimizer.{beta}", theirs[name], (name,))
    if theirs.number("max_steps") > 0:
        yield Setting("trainer.max_steps", theirs["max_steps"], ("max_steps",))
    if theirs.given("save_steps") and theirs.number("save_steps") >= 1:
        yield Setting("trainer.checkpoint_every", int(theirs.number("save_steps")), ("save_steps",))
    if theirs.given("save_total_limit") and theirs["save_total_limit"]:
        yield Setting("trainer.keep_checkpoints", theirs["save_total_limit"], ("save_total_limit",))
    if (
        theirs.given("eval_steps")
        and theirs["eval_strategy"] == "steps"
        and theirs.number("eval_steps") >= 1
    ):
        yield Setting(
            "evaluation.every", int(theirs.number("eval_steps")), ("eval_steps", "eval_strategy")
        )
    yield Setting(
        "model.gradient_checkpointing",
        theirs["gradient_checkpointing"],
        ("gradient_checkpointing",),
    )
    halves = {"fp16": "float16", "bf16": "bfloat16"}
    if given := tuple(name for name in halves if theirs.given(name)):
        chosen = [halves[name] for name in given if theirs[name]]
        yield Setting("model.dtype", chosen[0] if chosen else "float32", given)
    if theirs["use_peft"]:
        yield Setting("model.lora_rank", theirs["lora_r"], ("lora_r", "use_peft"))
        yield Setting("model.lora_alpha", theirs["lora_alpha"], ("lora_alpha",))
    yield from _names(theirs, seed="seed", run_name="run_name", trackers="report_to")


def _loss_of_trl(theirs: Their) -> Iterator[Setting]:
    kind = theirs["loss_type"]
    by_document = theirs["importance_sampling_level"] == "sequence"
    loss = kind if kind in ("cispo", "sapo", "vespo") else "gspo" if by_document else "grpo"
    mode = {
        "grpo": "sample_mean",
        "sapo": "sample_mean",
        "dr_grpo": "constant",
        "luspo": "constant",
    }
    yield Setting("loss", loss, ("loss_type", "importance_sampling_level"))
    yield Setting("aggregation", mode.get(str(kind), "token_mean"), ("loss_type",))
    if kind == "dr_grpo":
        yield Setting(
            "aggregation.divisor",
            theirs["max_completion_length"],
            ("loss_type", "max_completion_length"),
        )
    if kind == "luspo":
        yield Setting("aggregation.divisor", 1, ("loss_type",))
    if loss in ("grpo", "gspo"):
        high = theirs["epsilon_high"] if theirs["epsilon_high"] is not None else theirs["epsilon"]
        yield Setting("loss.epsilon_low", theirs["epsilon"], ("epsilon",))
        yield Setting("loss.epsilon_high", high, ("epsilon_high", "epsilon"))
    if loss == "cispo" and theirs.given("epsilon_high"):
        yield Setting("loss.epsilon_high", theirs.number("epsilon_high") - 1, ("epsilon_high",))
    if loss == "grpo" and theirs.given("delta") and theirs["delta"] is not None:
        yield Setting("loss.dual_clip", theirs["delta"], ("delta",))
    fields = {
        "sapo": {
            "temperature_positive": "sapo_temperature_pos",
            "temperature_negative": "sapo_temperature_neg",
        },
        "vespo": {
            "power_positive": "vespo_k_pos",
            "decay_positive": "vespo_lambda_pos",
            "power_negative": "vespo_k_neg",
            "decay_negative": "vespo_lambda_neg",
        },
    }
    for ours, name in fields.get(loss, {}).items():
        yield Setting(f"loss.{ours}", theirs[name], (name,))
    if theirs["multi_objective_aggregation"] == "normalize_then_sum":
        yield Setting("advantage", "gdpo", ("multi_objective_aggregation",))
    else:
        scale = {"batch": "batch_std", "none": "dr_grpo", "false": "dr_grpo"}
        advantage = scale.get(text(theirs["scale_rewards"]), "grpo")
        yield Setting("advantage", advantage, ("scale_rewards",))
    if theirs.number("beta"):
        yield Setting(
            "kl",
            "k3_ratio" if theirs["use_bias_correction_kl"] else "k3",
            ("beta", "use_bias_correction_kl"),
        )
        yield Setting("kl.coefficient", theirs["beta"], ("beta",))
        if theirs["sync_ref_model"]:
            yield Setting(
                "kl.update_every",
                theirs["ref_model_sync_steps"],
                ("ref_model_sync_steps", "sync_ref_model"),
            )
            yield Setting(
                "kl.update_rate", theirs["ref_model_mixup_alpha"], ("ref_model_mixup_alpha",)
            )
    if theirs.number("entropy_coef"):
        yield Setting("entropy.coefficient", theirs["entropy_coef"], ("entropy_coef",))


def _vllm_of_trl(theirs: Their) -> Iterator[Setting]:
    yield Setting("sampler", "vllm", ("use_vllm",))
    yield Setting(
        "sampler.gpu_memory_share",
        theirs["vllm_gpu_memory_utilization"],
        ("vllm_gpu_memory_utilization",),
    )
    if theirs.given("vllm_tensor_parallel_size"):
        yield Setting(
            "sampler.tensor_parallel",
            theirs["vllm_tensor_parallel_size"],
            ("vllm_tensor_parallel_size",),
        )
    if theirs.given("vllm_server_base_url"):
        yield Setting("sampler.urls", [theirs["vllm_server_base_url"]], ("vllm_server_base_url",))
    if theirs["vllm_importance_sampling_correction"] and not theirs.given(
        "off_policy_mask_threshold"
    ):
        mode = ("vllm_importance_sampling_mode", "vllm_importance_sampling_correction")
        yield Setting("correction", theirs[mode[0]], mode)
        for ours, name in (
            ("high", "vllm_importance_sampling_clip_max"),
            ("low", "vllm_importance_sampling_clip_min"),
        ):
            yield Setting(f"correction.{ours}", theirs[name], (name,))


def _of_verl(theirs: Their) -> Iterator[Setting]:
    """Yield the overrides that say what a configuration of verl's PPO trainer says, its defaults
    among them."""
    yield from _model_and_prompts(theirs, ("actor_rollout_ref.model.path",), ("data.train_files",))
    mode = theirs["loss_mode"]
    losses = {
        "vanilla": "grpo",
        "geo_mean": "gmpo",
        "dppo_tv": "dppo",
        "dppo_kl": "dppo",
        "dro": "kimi",
    }
    losses |= {"gpg": "reinforce"}
    loss = losses.get(str(mode), mode if mode in ("gspo", "cispo", "sapo") else "grpo")
    yield Setting("loss", loss, ("loss_mode",))
    if mode == "dppo_kl":
        yield Setting("loss.divergence", "binary_kl", ("loss_mode",))
    if losses.get(str(mode)) is None and mode not in ("gspo", "cispo", "sapo"):
        theirs.used -= {key for key in theirs.used if key.endswith("loss_mode")}
    aggregations = {"seq-mean-token-mean": "sample_mean", "token-mean": "token_mean"}
    aggregation = aggregations.get(str(theirs["loss_agg_mode"]), "constant")
    yield Setting("aggregation", aggregation, ("loss_agg_mode",))
    if aggregation == "constant":
        length = theirs["loss_scale_factor"] or theirs["data.max_response_length"]
        divisor = 1 if theirs["loss_agg_mode"] == "seq-mean-token-sum" else length
        yield Setting("aggregation.divisor", divisor, ("loss_scale_factor", "loss_agg_mode"))
    bounds = {"grpo": ("epsilon_low", "epsilon_high"), "dppo": ("delta_low", "delta_high")}
    bounds |= dict.fromkeys(("gspo", "cispo", "gmpo"), bounds["grpo"])
    for ours, name in zip(
        bounds.get(str(loss), ()), ("clip_ratio_low", "clip_ratio_high"), strict=False
    ):
        value = (
            theirs[name]
            if theirs.given(name) or not theirs.given("clip_ratio")
            else theirs["clip_ratio"]
        )
        yield Setting(f"loss.{ours}", value, (name, "clip_ratio"))
    if loss == "grpo":
        yield Setting("loss.dual_clip", theirs["clip_ratio_c"], ("clip_ratio_c",))
    if loss == "sapo":
        yield Setting("loss.temperature_positive", theirs["tau_pos"], ("tau_pos",))
        yield Setting("loss.temperature_negative", theirs["tau_neg"], ("tau_neg",))
    estimators = {"grpo": "grpo" if theirs["norm_adv_by_std_in_grpo"] else "dr_grpo"}
    names = ("rloo", "opo", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    estimators |= {name: name for name in names} | {"grpo_passk": "pass_at_k"}
    if theirs["adv_estimator"] == "gae":
        yield from _critic_of_verl(theirs)
    elif advantage := estimators.get(str(theirs["adv_estimator"])):
        yield Setting("advantage", advantage, ("adv_estimator", "norm_adv_by_std_in_grpo"))
    else:
        theirs.used -= {key for key in theirs.used if key.endswith("adv_estimator")}
    if theirs["use_kl_loss"]:
        kinds = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
        yield Setting(
            "kl", kinds.get(str(theirs["kl_loss_type"]), "k3"), ("kl_loss_type", "use_kl_loss")
        )
        yield Setting("kl.coefficient", theirs["kl_loss_coef"], ("kl_loss_coef",))
    elif theirs["use_kl_in_reward"]:
        kinds = {"mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
        yield Setting("kl", kinds.get(str(theirs["kl_penalty"]), "k1"), ("kl_penalty",))
        yield Setting("kl.coefficient", theirs["kl_ctrl.kl_coef"], ("kl_ctrl.kl_coef",))
        yield Setting("kl.place", "reward", ("use_kl_in_reward",))
    if theirs.number("entropy_coeff"):
        yield Setting("entropy.coefficient", theirs["entropy_coeff"], ("entropy_coeff",))
    group_size = int(theirs.number("rollout.n"))
    yield Setting("rollout.group_size", group_size, ("rollout.n",))
    yield Setting(
        "rollout.prompts_per_batch", theirs["data.train_batch_size"], ("data.train_batch_size",)
    )
    per_step = int(theirs.number("ppo_mini_batch_size")) * group_size
    yield Setting("accumulation.docs_per_step", per_step, ("ppo_mini_batch_size", "rollout.n"))
    if theirs.given("ppo_max_token_len_per_gpu"):
        yield Setting(
            "accumulation.max_tokens",
            theirs["ppo_max_token_len_per_gpu"],
            ("ppo_max_token_len_per_gpu",),
        )
    length = ("data.max_response_length",)
    yield Setting("rollout.max_completion_length", theirs["data.max_response_length"], length)
    yield Setting(
        "task.max_prompt_length", theirs["data.max_prompt_length"], ("data.max_prompt_length",)
    )
    if theirs["data.filter_overlong_prompts"]:
        yield Setting("task.too_long", "skip", ("data.filter_overlong_prompts",))
    if theirs.given("data.prompt_key"):
        yield Setting("task.prompt_field", theirs["data.prompt_key"], ("data.prompt_key",))
    yield Setting("rollout.temperature", theirs["rollout.temperature"], ("rollout.temperature",))
    if theirs.number("rollout.top_p") != 1:
        yield Setting("rollout.top_p", theirs["rollout.top_p"], ("rollout.top_p",))
    if theirs.given("rollout.name") and theirs["rollout.name"] == "vllm":
        yield Setting("sampler", "vllm", ("rollout.name",))
        yield Setting(
            "sampler.gpu_memory_share",
            theirs["gpu_memory_utilization"],
            ("gpu_memory_utilization",),
        )
        yield Setting(
            "sampler.tensor_parallel",
            theirs["tensor_model_parallel_size"],
            ("tensor_model_parallel_size",),
        )
    yield from _training(
        theirs,
        learning_rate="optim.lr",
        schedule="optim.lr_scheduler_type",
        warmup_steps="optim.lr_warmup_steps",
        weight_decay="optim.weight_decay",
        max_grad_norm="grad_clip" if theirs.given("grad_clip") else "optim.clip_grad",
    )
    betas = theirs["optim.betas"]
    if isinstance(betas, list):
        for ours, beta in zip(("beta1", "beta2"), betas, strict=False):
            yield Setting(f"optimizer.{ours}", beta, ("optim.betas",))
    if theirs.given("trainer.total_training_steps") and theirs["trainer.total_training_steps"]:
        updates = theirs.number("data.train_batch_size") / theirs.number("ppo_mini_batch_size")
        steps = int(theirs.number("trainer.total_training_steps") * updates)
        yield Setting("trainer.max_steps", steps, ("trainer.total_training_steps",))
    yield Setting(
        "model.gradient_checkpointing",
        theirs["enable_gradient_checkpointing"],
        ("enable_gradient_checkpointing",),
    )
    if theirs.given("model.lora_rank") and theirs["model.lora_rank"]:
        yield Setting("model.lora_rank", theirs["model.lora_rank"], ("model.lora_rank",))
        yield Setting("model.lora_alpha", theirs["model.lora_alpha"], ("model.lora_alpha",))
    correction = {"token": "token_truncate", "sequence": "sequence_truncate"}
    if theirs.given("rollout_is") and str(theirs["rollout_is"]) in correction:
        yield Setting("correction", correction[str(theirs["rollout_is"])], ("rollout_is",))
        yield Setting("correction.high", theirs["rollout_is_threshold"], ("rollout_is_threshold",))
    yield from _names(
        theirs, seed=None, run_name="trainer.experiment_name", trackers="trainer.logger"
    )


def _critic_of_verl(theirs: Their) -> Iterator[Setting]:
    """Yield the keys of PPO's advantages and critic."""
    yield Setting("advantage", "gae", ("adv_estimator",))
    yield Setting("advantage.gamma", theirs["gamma"], ("gamma",))
    yield Setting("advantage.gae_lambda", theirs["lam"], ("lam",))
    yield Setting("critic.learning_rate", theirs.number("critic.optim.lr"), ("critic.optim.lr",))
    yield Setting("critic.clip", theirs.number("cliprange_value"), ("cliprange_value",))
    if path := theirs["critic.model.path"]:
        yield Setting("critic.path", path, ("critic.model.path",))
    if batches := int(theirs.number("critic_warmup")):
        updates = theirs.number("data.train_batch_size") / theirs.number("ppo_mini_batch_size")
        yield Setting("critic.steps_before_policy", int(batches * updates), ("critic_warmup",))


def _model_and_prompts(
    theirs: Their, models: tuple[str, ...], prompts: tuple[str, ...]
) -> Iterator[Setting]:
    """Yield which model and prompts the file names; in capitals, to be filled in, what it does not
    name."""
    for group, option, names in (("model", "huggingface", models), ("task", "prompts", prompts)):
        name = next((name for name in names if theirs.given(name)), None)
        value = theirs[name] if name else group.upper()
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        yield Setting(group, option, ())
        yield Setting(f"{group}.path", value, ())


def _training(
    theirs: Their,
    learning_rate: str,
    schedule: str,
    warmup_steps: str,
    weight_decay: str,
    max_grad_norm: str,
) -> Iterator[Setting]:
    """Yield the optimizer's keys, by their names there."""
    yield Setting("optimizer.learning_rate", theirs.number(learning_rate), (learning_rate,))
    yield Setting("optimizer.weight_decay", theirs[weight_decay], (weight_decay,))
    yield Setting("optimizer.max_grad_norm", theirs.number(max_grad_norm) or None, (max_grad_norm,))
    if str(theirs[schedule]) in _SCHEDULES:
        yield Setting("optimizer.schedule", _SCHEDULES[str(theirs[schedule])], (schedule,))
    else:
        theirs.used -= {key for key in theirs.used if key.endswith(schedule)}
    warmup = theirs.number(warmup_steps)
    if warmup <= 0 or warmup >= 1:  # a share of the steps is set by hand
        yield Setting("optimizer.warmup_steps", max(0, int(warmup)), (warmup_steps,))
    else:
        theirs.used -= {key for key in theirs.used if key.endswith(warmup_steps)}


def _names(theirs: Their, seed: str | None, run_name: str, trackers: str) -> Iterator[Setting]:
    if seed and theirs.given(seed):
        yield Setting("seed", theirs[seed], (seed,))
    if theirs.given(run_name) and re.fullmatch(r"[\w.-]{1,80}", str(theirs[run_name])):
        yield Setting("tracking.run_name", theirs[run_name], (run_name,))
    if theirs.given(trackers):
        value = theirs[trackers]
        named = value if isinstance(value, list) else [value]
        known = [name for name in named if name in options()["tracking"]]
        known.sort(key=lambda name: name != "mlflow")  # which tracking.also does not name
        if known:
            yield Setting("tracking", known[0], (trackers,))
        if known[1:]:
            yield Setting("tracking.also", known[1:], (trackers,))
        if len(known) < len([name for name in named if name != "console"]):
            theirs.used.discard(trackers)
