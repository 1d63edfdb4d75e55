"""The table of `test_keys.py`: which function sees a key of the configuration act, and what these
functions share."""

# ruff: noqa: E501 (names of tests are not broken)

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from builders.runs import config_of, module_and_loader
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pgtoolkit.batch import Document
from pgtoolkit.config.validate import validate
from pgtoolkit.losses import reference
from pgtoolkit.losses.families import FAMILIES
from pgtoolkit.rollouts.steps import StepLoader, make_step
from pgtoolkit.training.module import PolicyGradientModule

ROWS: dict[str, Callable] = {}
"""By key, with its option where a group has several shapes (`model/tiny.num_layers`)."""

_VLLM = "sampling/test_vllm.py"
_DIVIDED = {"chain_sum": "terms", "shortest_path": "nodes"}
SEEN_BY = {
    **dict.fromkeys(
        [f"loss/{name}.num_splits" for name, family in FAMILIES.items() if family.scope != "token"]
        + ["model/tiny.fp32_lm_head"],
        # they have one value
        "config/test_golden_refusals.py::test_what_is_refused_and_what_is_accepted",
    ),
    **dict.fromkeys(
        ("accumulation.docs_per_step", "accumulation.last_step"),
        "rollouts/test_steps.py::test_docs_per_step_at_the_end_of_a_batch",
    ),
    "accumulation.max_tokens": "rollouts/test_steps.py::test_max_tokens_does_not_change_what_a_step_is",
    "accumulation.micro_batches_per_step": "rollouts/test_steps.py::test_fixed_number_of_micro_batches",
    "rollout/policy.retire_at": "rollouts/test_retired.py::test_solved_prompts_are_asked_once_and_others_in_every_pass",
    "trainer.stop_at": "training/test_evaluation.py::test_a_goal_ends_the_run_which_can_be_resumed",
    **dict.fromkeys(
        ("evaluation.best", "trainer.checkpoint_every", "trainer.keep_checkpoints"),
        "training/test_evaluation.py::test_the_best_checkpoint_is_kept_and_of_equal_ones_the_latest",
    ),
    **dict.fromkeys(
        ("task/conversation.chat", "task/conversation.system_prompt"),
        "tasks/test_chat.py::test_a_conversation_goes_through_the_template",
    ),
    **dict.fromkeys(
        [
            f"task/{name}.{key}"
            for name in ("reasoning_gym", "prompts", "sums")
            for key in ("chat", "system_prompt")
        ],
        "tasks/test_chat.py::test_a_run_trains_on_the_tokens_of_the_template",
    ),
    **dict.fromkeys(
        [
            f"task/{name}.chat_arguments"
            for name in ("reasoning_gym", "prompts", "conversation", "sums")
        ],
        "tasks/test_chat.py::test_a_template_gets_its_arguments",
    ),
    "task/prompts.config": "tasks/test_hub_data.py::test_a_data_set_by_its_name",
    "task/prompts.verifier_concurrency": "tasks/test_reward_functions.py::"
    "test_calls_of_an_async_function_wait_at_the_same_time",
    **dict.fromkeys(
        [f"task/{task}.{end}_{size}" for task, size in _DIVIDED.items() for end in ("min", "max")],
        "tasks/test_generated.py::test_problems_are_as_large_as_asked_and_what_is_longest_is_known",
    ),
    **dict.fromkeys(
        ("task/sums.num_terms", "task/sums.num_digits"),
        "tasks/test_generated.py::test_sums_are_as_large_as_asked_and_scored_by_the_last_number",
    ),
    "task/reverse.num_digits": "tasks/test_tasks.py::test_the_endless_task_is_measured_by_its_digits",
    "advantage.path": "rollouts/test_estimators.py::test_a_function_of_ones_own_gets_the_whole_batch",
    "rollout/policy.max_sampling_rounds": "rollouts/test_dynamic_sampling.py::"
    "test_a_resumed_run_samples_what_it_would_have_sampled",
    **dict.fromkeys(
        ("rollout/policy.old_log_probs", "rollout/policy.temperature"),
        "rollouts/test_policy_rollouts.py::test_old_log_probs_are_those_of_the_sampler_or_of_training",
    ),
    "rollout/policy.truncated": "rollouts/test_truncated.py::"
    "test_of_completions_that_are_sampled_the_gradient_is_that_of_the_finished_ones",
    "rollout/recorded.truncated": "rollouts/test_truncated.py::test_recorded_rows_have_to_say_it_and_are_left_out",
    "rollout/policy.stop": "tasks/test_stops.py::test_the_sampler_ends_at_a_string_and_keeps_its_log_probs",
    **dict.fromkeys(
        ("rollout/recorded.epochs", "rollout/recorded.shuffle"),
        "rollouts/test_recorded.py::test_every_epoch_is_the_data_once_and_shuffled_by_groups",
    ),
    **dict.fromkeys(
        ("rollout/recorded.chat", "rollout/recorded.trained_turns"),
        "rollouts/test_conversations.py::test_a_run_trains_on_the_turns_that_are_asked_for",
    ),
    "rollout/recorded.too_long": "rollouts/test_conversations.py::"
    "test_rows_that_are_too_long_are_refused_or_skipped_with_their_count",
    "rollout/recorded.group_size": "rollouts/test_recorded.py::test_group_ids_and_group_size",
    "rollout/recorded.max_completion_length": "rollouts/test_rollout_files.py::test_rows_beyond_the_limits_of_the_run_are_refused",
    "sampler/transformers.processes": "sampling/test_copies.py::test_several_processes_share_the_prompts_of_a_batch",
    "sampler/vllm.answer_seconds": f"{_VLLM}::test_a_fault_while_sampling_is_one_sentence",
    **dict.fromkeys(
        ("model/huggingface.compile", "model/tiny.compile"),
        "model/test_compiled.py::test_the_copies_of_a_policy_compute_as_it_does",
    ),
    "model/huggingface.dtype": "model/test_huggingface.py::"
    "test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights",
    "model/huggingface.lora_alpha": "model/test_lora.py::test_the_gradient_is_that_of_the_plain_formulation",
    "model/huggingface.lora_rank": "model/test_lora.py::test_the_gradient_is_that_of_the_plain_formulation",
    "model/huggingface.lora_targets": "model/test_lora.py::test_of_many_layers_those_that_are_named_get_adapters",
    "rollout/policy.keep_completions": "training/test_kept_completions.py::test_training_is_the_same_whatever_is_kept",
    "rollout/policy.lag": "rollouts/test_lag.py::test_a_lag_makes_documents_so_many_updates_old",
    "rollout/policy.max_staleness": "rollouts/test_lag.py::test_no_document_is_trained_later_than_allowed",
    "rollout/policy.save_path": "rollouts/test_lag.py::"
    "test_batches_are_recorded_once_they_are_used_with_the_version_that_wrote_them",
    "rollout/policy.top_p": "sampling/test_samplers.py::test_log_probs_are_those_of_the_distribution_sampled_from",
    "sampler/transformers.dtype": "training/test_float16.py::test_a_sampler_of_another_type_is_further_away",
    "sampler/transformers.static_cache": "tasks/test_stops.py::test_a_static_cache_looks_for_strings_every_32_tokens",
    "sampler/vllm.executable": f"{_VLLM}::test_a_missing_program_is_one_sentence",
    "sampler/vllm.name": f"{_VLLM}::test_a_missing_program_is_one_sentence",
    "sampler/vllm.start_seconds": f"{_VLLM}::test_another_program_at_an_address_is_one_sentence",
    "sampler/vllm.tolerance": f"{_VLLM}::test_old_weights_within_the_tolerance_are_noticed",
    "sampler/vllm.urls": f"{_VLLM}::test_another_program_at_an_address_is_one_sentence",
    "sampler/vllm.weights_folder": f"{_VLLM}::test_the_weights_of_the_folder_are_a_hugging_face_model",
    "trainer.accept_changed_data": "training/test_data.py::test_changed_data_are_refused_until_they_are_accepted_once",
    "trainer.max_bad_steps": "training/test_training.py::test_bad_steps_count_only_in_a_row",
}
"""By key: the test elsewhere that configures it and sees its number."""

SMALL = (
    *(
        "tracking=none",
        "loss=grpo",
        "aggregation=constant",
        "aggregation.divisor=4",
        "optimizer.max_grad_norm=null",
    ),
    *(
        "accumulation.docs_per_step=8",
        "accumulation.max_tokens=24",
        "task.num_digits=3",
        "trainer.max_steps=6",
    ),
    "trainer.device=cpu",
    *("model.num_layers=1", "model.hidden_size=8", "model.num_heads=2"),
    *("rollout.prompts_per_batch=4", "rollout.group_size=4", "rollout.max_completion_length=4"),
)


def key(*names: str) -> Callable:
    """Enters a function as the row of these keys. It gets the fixtures it names, and the key if it
    names `key`."""

    def enter(row):
        assert not set(names) & set(ROWS), f"a key has one row: {names}"
        ROWS.update(dict.fromkeys(names, row))
        return row

    return enter


def module_of(*overrides: str) -> PolicyGradientModule:
    return module_and_steps(*overrides)[0]


def settings(*overrides: str) -> list[str]:
    """The overrides, seen to be valid, on top of those small settings that they do not replace."""
    replaced = {override.partition("=")[0] for override in overrides}
    replaced |= {"task"} if "rollout=recorded" in overrides else set()
    small = [
        one
        for one in SMALL
        if not {one.partition("=")[0], one.partition("=")[0].partition(".")[0]} & replaced
    ]
    assert validate(config_of(*small, *overrides))[1].problems == []
    return [*small, *overrides]


def module_and_steps(*overrides: str) -> tuple[PolicyGradientModule, StepLoader]:
    """Of small settings, in float64; the weights are larger than at a start, so that every number
    matters."""
    module, loader = module_and_loader(*settings(*overrides))
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(20 if weight.ndim > 1 else 1)
    return module, loader


def some_documents() -> list[Document]:
    """Six documents in three groups, whose old log-probs lie around those of the model above."""
    generator = torch.Generator().manual_seed(3)
    documents = []
    for i, (length, advantage) in enumerate(
        [(9, 0.7), (5, -0.4), (12, 0.2), (7, -1.1), (3, 0.9), (6, -0.3)]
    ):
        documents.append(
            Document(
                tokens=torch.randint(0, 11, (length,), generator=generator),
                loss_mask=torch.arange(length) >= length // 2,
                old_log_probs=(-2.5 + 0.7 * torch.randn(length, generator=generator))[
                    length // 2 :
                ],
                advantages=torch.full((length - length // 2,), advantage),
                group=i // 2,
                name=f"document {i}",
            )
        )
    return documents


def step_of(documents: list[Document], max_tokens: int = 1000):
    return make_step(documents, max_tokens, {})


def logits_of(module, document: Document) -> Tensor:
    """(S, V), the model's own, of a document alone."""
    return module.model(input_ids=document.tokens[None]).logits[0]


def specified(
    module, documents: list[Document], **choices
) -> tuple[reference.Reference, list[Tensor]]:
    """The step by the specification, and the gradient of every parameter."""
    options = {"aggregation": "constant", "divisor": 4}
    if "loss" not in choices:
        options |= {"loss": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2}
    logits = torch.cat([logits_of(module, document)[:-1] for document in documents])
    labels = torch.cat(
        [torch.where(document.loss_mask, document.tokens, -1)[1:] for document in documents]
    )

    sampled = documents[0].sampling_log_probs is not None

    def per_label(values) -> Tensor:
        trained = torch.cat([*values])
        return trained.new_zeros(len(labels)).masked_scatter(labels >= 0, trained)

    found = reference.policy_loss(
        logits.detach(),
        labels,
        per_label(document.old_log_probs for document in documents),
        per_label(document.advantages for document in documents),
        torch.cat(
            [torch.full((document.num_tokens - 1,), i) for i, document in enumerate(documents)]
        ),
        group_index=torch.tensor([document.group for document in documents]),
        num_documents=len(documents),
        sampling_log_probs=per_label(document.sampling_log_probs for document in documents)
        if sampled
        else None,
        **options | choices,
    )
    return found, torch.autograd.grad(logits, list(module.parameters()), found.gradient)


def loss_as_specified(
    overrides: list[str], documents: list[Document] | None = None, **choices
) -> float:
    """The loss of one training step, once it and the gradient are seen to be the specification's
    with `choices`."""
    documents = documents or some_documents()
    module = module_of(*overrides)
    expected, gradient = specified(module, documents, **choices)
    metrics = module.training_step(step_of(documents, 24), 0)["metrics"]
    torch.testing.assert_close(metrics["loss"], expected.loss, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(
        [p.grad for p in module.parameters()], gradient, rtol=1e-9, atol=1e-13
    )
    assert metrics["grad_norm"] > 1e-3
    return metrics["loss"]


class LogitsMade(TorchDispatchMode):
    """Notes (rows, number type) of each matrix of logits that is computed: of each product with V
    columns."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary, self.found = vocabulary, []

    @property
    def rows(self) -> list[int]:
        return [rows for rows, _ in self.found]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.__name__.split(".")[0] in ("mm", "addmm") and out.shape[-1] == self.vocabulary:
            self.found.append((len(out), out.dtype))
        return out


def rows_file(folder: Path, num_rows: int = 10, **changes) -> Path:
    """Recorded documents of five tokens, three of them trained, two to a group; rewards 0, 1, 4, 9,
    ..."""
    path, rows = folder / "rollouts.jsonl", []
    for i in range(num_rows):
        row = {
            "token_ids": [i, 1, 2, 3, 4],
            "loss_mask": [False, False, True, True, True],
            "reward": i**2,
        }
        row |= {
            "old_log_probs": [0, 0, -2.5, -2.4, -2.3],
            "group_id": i // 2,
            "advantage": i / 8,
        } | changes
        rows.append(json.dumps({name: value for name, value in row.items() if value is not ...}))
    path.write_text("\n".join(rows))
    return path


def recorded(folder: Path, *overrides: str, **changes) -> list[list[Document]]:
    """The documents of each step."""
    path = rows_file(folder, **changes)
    _, loader = module_and_steps("rollout=recorded", f"rollout.path={path}", *overrides)
    return [step.documents for step in loader]
