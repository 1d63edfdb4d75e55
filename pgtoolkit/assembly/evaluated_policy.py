"""The evaluation of a policy that is not in training."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pgtoolkit.assembly.build import accelerator, begin, module_of, policy_of
from pgtoolkit.assembly.make_task import make_task
from pgtoolkit.assembly.sources import evaluator_of
from pgtoolkit.config.counts import samples_async
from pgtoolkit.config.schema import Config
from pgtoolkit.errors import ConfigError, first_line
from pgtoolkit.model.settings import TinyModelSettings
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.system.plain_files import JsonObject
from pgtoolkit.system.report import say
from pgtoolkit.training.evaluation import evaluate_module
from pgtoolkit.training.state import load_weights


def evaluate_policy(
    config: Config, folder: Path, trained: Config | None = None, state: dict | None = None
) -> list[JsonObject]:
    """Evaluate a policy on the sets of a configuration, and return the rows of evaluations.jsonl.

    folder: where the completions are written.
    trained: the configuration of the run that wrote the checkpoint, if there is one.
    state: of the checkpoint; None for the weights that the configuration begins with.
    The numbers equal those that the run has measured with these weights, where prompts and machine
    are the same. Raises ConfigError for a checkpoint that does not fit the model.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    begin(config.seed, config.trainer, samples_async(config))
    alphabet = None
    if isinstance(config.model, TinyModelSettings):  # its vocabulary is the task's characters
        run_config = trained or config
        alphabet = make_task(run_config.task, run_config.seed).alphabet
    policy = policy_of(config, alphabet, ONE_PROCESS)
    module = module_of(config, policy, ONE_PROCESS)
    if state is not None:
        try:
            load_weights(policy, state)
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"the checkpoint does not fit the configured model: {first_line(error)}"
            ) from error
        module.num_updates = state["num_updates"]
        module.documents_seen = state["documents_seen"]
    module.to("cuda" if accelerator(config.trainer.device, config.kernel) == "gpu" else "cpu")
    module.evaluator = evaluator_of(config, None, module, None, folder)
    for prompt_set in module.evaluator.sets:
        num_prompts = prompt_set.task.task.num_prompts or 0
        if prompt_set.count < num_prompts:
            of_set = config.evaluation.sets.get(prompt_set.name, {})
            key = "evaluation.prompts_per_set"
            if "prompts" in of_set:
                key = f"evaluation.sets.{prompt_set.name}.prompts"
            say(
                f"note: evaluation set {prompt_set.name} has {prompt_set.count} of {num_prompts} "
                f"prompts; {key}={num_prompts} takes all."
            )
    with contextlib.closing(module.evaluator):
        return evaluate_module(module, 0 if state is None else state["step"])
