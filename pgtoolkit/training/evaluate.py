"""`pgtk evaluate`: a policy measured on prompts without training it, with weights of a checkpoint, a folder, or new."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from pgtoolkit.config.schema import Config, PolicyRolloutConfig, TinyModelConfig
from pgtoolkit.errors import ConfigError, DataError, first_line
from pgtoolkit.model.build import build_policy
from pgtoolkit.ranks.layout import ONE_PROCESS
from pgtoolkit.rollouts.tasks import Task, make_task
from pgtoolkit.training.build import accelerator, begin, evaluator_of
from pgtoolkit.training.evaluations import measure
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.weights import load_weights

log = logging.getLogger("pgtoolkit")


def evaluate(
    config: Config, folder: Path, trained: Config | None = None, state: dict | None = None
) -> list[dict[str, Any]]:
    """The rows, as of evaluations.jsonl, of the sets of a configuration; completions go to `folder`.

    trained: the configuration of the run that a checkpoint is of. state: of the checkpoint; None for the weights that
    the configuration begins with. The numbers are those that the run itself has measured with these weights, where the
    prompts and the machine are the same.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    begin(config)
    origin, alphabet = trained or config, None
    if isinstance(config.model, TinyModelConfig):  # whose vocabulary is that of the prompts
        alphabet = make_task(origin.task, origin.seed).alphabet
    policy = build_policy(config.model, alphabet, accelerator(config) == "gpu")
    module = PolicyGradientModule(config, policy, ONE_PROCESS)
    if state is not None:
        try:
            load_weights(policy, state)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"the checkpoint does not fit the configured model: {first_line(error)}") from error
        module.num_updates, module.documents_seen = state["num_updates"], state["documents_seen"]
    module.to("cuda" if accelerator(config) == "gpu" else "cpu")
    with contextlib.ExitStack() as opened:
        module.evaluator = evaluator_of(config, _trained_on(trained), module, None, folder)
        opened.callback(module.evaluator.close)
        return measure(module, 0 if state is None else state["step"])


def _trained_on(trained: Config | None) -> Task | None:
    """The prompts of a run on rollouts of its own; None, with a word, where they are not there any more."""
    if trained is None or not isinstance(trained.rollout, PolicyRolloutConfig):
        return None
    try:
        return make_task(trained.task, trained.seed)
    except (ConfigError, DataError) as error:
        log.warning(f"note: whether the prompts are those of training is not known: {first_line(error)}")
        return None
