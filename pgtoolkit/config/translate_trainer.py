"""Reads the adapters of a program, and what it sets on its trainer, by the keys of TRL's table."""

from __future__ import annotations

import ast
import re

from pgtoolkit.config.trainer_keys import tables
from pgtoolkit.config.translate_code import Arguments, Unread
from pgtoolkit.config.translate_program import Program
from pgtoolkit.system.report import text


def adapters(
    program: Program, of_trainer: Arguments, parses: bool
) -> tuple[dict[str, object], Arguments]:
    """Return that a program makes adapters, of LoraConfig or by unsloth with its defaults, or the
    code of a configuration of them that is not read; and the arguments of these.

    of_trainer: the arguments of GRPOTrainer. parses: TRL's parser makes the other configurations.
    """
    of_peft = program.given("get_peft_model", ["model", "peft_config"])
    node = of_trainer.get("peft_config") or of_peft.get("peft_config") or program.added_adapters()
    made = program.calls.get("LoraConfig", [])
    if node is None and made and "GRPOTrainer" not in program.calls:
        node = made[0]
    if node is not None:
        settings = program.made(node, "LoraConfig")
        if settings is not None:
            return {"peft_config": True}, settings
        return _of_options(program, node, parses), {}
    if "get_peft_model" not in program.calls:
        program.assumed += [f"{ast.unparse(call)} is given to no trainer" for call in made]
        if parses and program.options.get("use_peft") and not program.unread:
            program.assumed.append("use_peft does nothing: GRPOTrainer is given no peft_config")
            return {"use_peft": False}, {}
        return {}, {}
    sizes: dict[str, object] = {"peft_config.r": 16, "peft_config.lora_alpha": 16}
    sizes["peft_config.target_modules"] = "all-linear"
    leaves = {name.partition(".")[2]: sizes[name] for name in sizes}
    unset = [f"{leaf}={leaves[leaf]}" for leaf in leaves if leaf not in of_peft]
    if unset:
        version = tables()["TRL"].content["unsloth"]["version"]
        assumption = f"get_peft_model has {', '.join(unset)}, as by default in unsloth {version}"
        program.assumed.append(assumption)
    return sizes | {"peft_config": True}, of_peft


def _of_options(program: Program, node: ast.AST, parses: bool) -> dict[str, object]:
    """Return the options use_peft, lora_r and so on of which TRL's get_peft_config makes adapters;
    else the code, of which nothing is read."""
    value = program.value(node)
    if value is None:
        return {}
    options = program.options_of_peft(node)
    if options is not None:
        made = program.made(options, "ModelConfig")
        if made is not None:
            names = [name for name in made if re.search("lora|peft|dora", name)]
            return {name: program.value(made[name]) for name in names}
        if parses:
            return {}
    return {"peft_config": Unread(text(value))}


def set_on_trainer(program: Program, values: dict[str, object], is_rloo: bool) -> None:
    """Take the keys of GRPOConfig that a program sets on the trainer after it is made, where TRL
    reads them at each step; say of the others that they do nothing. values: changed in place."""
    table = tables()["TRL"]
    for name, (node, code) in program.set_on_trainer().items():
        key = "epsilon" if name == "epsilon_low" else name
        if key not in table.rows or key in table.content["calls"]["GRPOTrainer"]:
            continue
        values.pop(f"GRPOTrainer.{name}", None)
        value = program.value(node)
        problem = _problem_later(name, value, values, is_rloo)
        if name not in table.content["later"] or _is_idle_later(name, values):
            reason = "GRPOTrainer reads this key of its GRPOConfig"
            program.assumed.append(f"{code} does nothing there: {reason}")
        elif problem:
            program.unread.append(f"{code}: {problem}")
        else:
            if name == "epsilon_low" and values.get("epsilon_high") is None:
                values["epsilon_high"] = values.get("epsilon", table.rows["epsilon"].default)
            values[key] = value


def _is_idle_later(name: str, values: dict[str, object]) -> bool:
    """Return whether TRL does not read a key at its steps beside the other values."""
    if name == "entropy_coef":
        return not values.get("entropy_coef") and not values.get("use_adaptive_entropy")
    return name == "max_completion_length" and values.get("loss_type") != "dr_grpo"


def _problem_later(name: str, value: object, values: dict[str, object], is_rloo: bool) -> str:
    """Return why a key that is set on a trainer that exists is not carried; "" where it is."""
    makers = ("beta", "peft_config", "peft_config.model_id", "use_peft", "launch.unsloth")
    has_reference = any(values.get(key) for key in makers) or (is_rloo and "beta" not in values)
    if name == "beta" and value != 0 and not has_reference:
        return "GRPOTrainer has no reference when it is made with beta=0: its first step fails"
    if name == "scale_rewards" and isinstance(value, bool):
        return "GRPOTrainer takes group, batch and none there, and its first step fails"
    if name == "max_completion_length":
        return (
            "completions keep the length that GRPOConfig has; it is the divisor of dr_grpo, "
            f"aggregation.divisor={text(value)}"
        )
    return ""


def of_unsloth(program: Program) -> dict[str, object]:
    """Return that a program imports unsloth, whose configuration replaces TRL's."""
    if not program.imports("unsloth"):
        return {}
    version = tables()["TRL"].content["unsloth"]["version"]
    program.assumed.append(
        "unsloth's trainer is TRL's, with TRL's defaults of keys that are not listed, as in its "
        f"version {version}; print(args) there shows those of another one"
    )
    return {"launch.unsloth": True}
