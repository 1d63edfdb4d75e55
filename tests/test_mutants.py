"""Tests of the tests: typical mistakes, most of them shipped by somebody, made in a copy of the package, are caught.

`pytest -m mutants` runs these alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from mutants_of_keys import MUTANTS_OF_KEYS
from mutants_of_losses import MUTANTS_OF_LOSSES, MUTANTS_ON_A_GPU
from mutants_of_ranks import MUTANTS_OF_RANKS

REPOSITORY = Path(__file__).parents[1]
ASSERTIONS = {"AssertionError", "Failed"}  # the latter of pytest.raises
pytestmark = pytest.mark.mutants


@dataclass(frozen=True)
class Mutant:
    """A mistake as a change of text in one file, and the tests of which each must fail by an assertion.

    edits: old text -> new text; the old must occur exactly once.
    """

    name: str
    file: str
    edits: dict[str, str]
    caught_by: tuple[str, ...]


ACCUMULATION = "tests/training/test_accumulation.py"
CUT = "tests/losses/test_invariance.py::test_micro_batches_order_and_padding"
MUTANTS = [
    Mutant(
        "sample mean over the micro-batch's documents instead of the step's (TRL #3021, verl #5877)",
        "losses/aggregation.py",
        {"counts * totals.num_documents": "counts * len(counts)"},
        (f"{CUT}[grpo-sample_mean-basic-halves-0]", f"{CUT}[gspo-sample_mean-none-shuffled-3]"),
    ),
    Mutant(
        "token mean over the micro-batch's tokens instead of the step's (prime-rl #583, OpenRLHF #1249)",
        "losses/aggregation.py",
        {"counts * 0 + totals.num_tokens": "counts * 0 + counts.sum()"},
        (f"{CUT}[gspo-token_mean-basic-halves-0]", f"{CUT}[gspo-token_mean-basic-shuffled-3]"),
    ),
    Mutant(
        "Dr. GRPO without its 1/D (verl #3741)",
        "losses/aggregation.py",
        {"self.divisor) * totals.num_documents": "self.divisor)"},
        ("tests/losses/test_losses.py::test_worked_example[grpo-constant-0.40625]",),
    ),
    Mutant(
        "prompt mean over the groups of the micro-batch (TRL and SkyRL pull requests)",
        "losses/aggregation.py",
        {"* totals.num_groups": "* len(group_index.unique())"},
        (f"{CUT}[gspo-prompt_mean-with_entropy-one per document-0]",),
    ),
    Mutant(
        "a divisor of NaN passes a comparison that is always false",
        "losses/checks.py",
        {"math.isfinite(value) and value > 0": "not value <= 0"},
        ("tests/losses/test_losses.py::test_constant_refuses_a_divisor_that_cannot_divide[nan]",),
    ),
    Mutant(
        "a phantom token for each fully masked document, in the step's totals (slime)",
        "rollouts/steps.py",
        {"num_tokens=sum(tokens_per_group)": "num_tokens=sum(max(1, document.num_trained) for document in documents)"},
        ("tests/rollouts/test_steps.py::test_totals_count_what_is_masked_and_empty",),
    ),
    Mutant(
        "a phantom token for each fully masked document, in a loss without given totals (slime)",
        "losses/totals.py",
        {"counts.sum(), (counts": "counts.clamp(min=1).sum(), (counts"},
        (
            "tests/losses/test_losses.py::test_a_masked_document_counts_as_a_document_and_adds_no_phantom_token[token_mean]",
        ),
    ),
    Mutant(
        "masked positions multiplied by 0 instead of left out: NaN * 0 is NaN (NeMo-RL #4120)",
        "losses/objective.py",
        {"torch.where(self.mask, log_probs - self.old_log_probs, 0.0)": "self.mask * (log_probs - self.old_log_probs)"},
        ("tests/losses/test_losses.py::test_masked_positions_may_hold_anything[nan-grpo]",),
    ),
    Mutant(
        "rows without a gradient multiplied by 0 instead of left out (prime-rl #2084)",
        "kernels/torch_passes.py",
        {"torch.where(active, block, 0.0)": "(active * block)"},
        ("tests/losses/test_losses.py::test_masked_positions_may_hold_anything[nan-gspo]",),
    ),
    Mutant(
        "GSPO's ratio by the sum of the log-ratios instead of their mean (TRL #5814, NeMo-RL #2269)",
        "losses/objective.py",
        {"documents.mean(values)": "documents.sum(values)"},
        ("tests/losses/test_losses.py::test_gspo_ratio_is_the_exp_of_the_mean_and_not_of_the_sum",),
    ),
    Mutant(
        "the clip acts already at its bounds, in the gradient by formula",
        "losses/families.py",
        {"ratio <= upper": "ratio < upper"},
        ("tests/losses/test_peers.py::test_the_clip_does_not_act_at_its_bounds[1.0-1.25-fused_linear-grpo]",),
    ),
    Mutant(
        "the clip acts already at its bounds, in the metrics",
        "losses/objective.py",
        {"terms.ratio < lower": "terms.ratio <= lower"},
        ("tests/losses/test_peers.py::test_the_clip_does_not_act_at_its_bounds[-1.0-0.75-torch-gspo]",),
    ),
    Mutant(
        "the log-ratio is not clamped before exp (OpenRLHF #1293: computed and never read)",
        "losses/objective.py",
        {"unclamped.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)": "unclamped"},
        ("tests/kernels/test_kernels.py::test_huge_log_ratios_stay_finite[grpo-1.0-dtype0-torch]",),
    ),
    Mutant(
        "extrema start from 0 (Fast-LLM #494)",
        "losses/objective.py",
        {"torch.where(self.mask, extrema, -torch.inf)": "torch.where(self.mask, extrema, 0.0)"},
        (
            "tests/losses/test_losses.py::test_matches_reference[1.0-grpo-sample_mean-basic]",
            "tests/losses/test_peers.py::test_a_piece_without_trained_tokens_does_not_touch_the_extrema",
        ),
    ),
    Mutant(
        "metrics as the mean of the micro-batches' means (TRL #7047, verl #2259)",
        "losses/metrics.py",
        {"self.sums + other.sums": "(self.sums + other.sums) / 2"},
        (f"{CUT}[grpo-sample_mean-basic-halves-0]",),
    ),
    Mutant(
        "untrained positions counted as one more document (Fast-LLM: padding with an index of its own)",
        "losses/documents.py",
        {"num_documents, group)\n\n": "num_documents + 1, group)\n\n"},
        ("tests/losses/test_losses.py::test_on_policy_numbers",),
    ),
    Mutant(
        "the temperature left out of the gradient",
        "kernels/torch_passes.py",
        {"(coefficients[rows] / temperature)": "coefficients[rows]"},
        ("tests/losses/test_losses.py::test_matches_reference[0.7-grpo-sample_mean-none]",),
    ),
    Mutant(
        "entropy of vocabulary shards: a local sum under a global normalizer (Fast-LLM #494)",
        "kernels/torch_passes.py",
        {"dots[0] + shift.clamp(min=-1000.0) * sums": "dots[0]"},
        ("tests/kernels/test_passes.py::test_vocabulary_shards_merge[torch-True]",),
    ),
    Mutant(
        "sampling ignores the temperature",
        "rollouts/samplers.py",
        {"temperature=float(temperature)": "temperature=1.0"},
        (
            "tests/rollouts/test_samplers.py::test_log_probs_are_those_of_the_distribution_sampled_from[0.5-None]",
            "tests/rollouts/test_samplers.py::test_tokens_are_as_frequent_as_the_distribution_says[2.0-None]",
        ),
    ),
    Mutant(
        "sampling ignores top_p",
        "rollouts/samplers.py",
        {"top_p=1.0 if top_p is None else top_p": "top_p=1.0"},
        (
            "tests/rollouts/test_samplers.py::test_log_probs_are_those_of_the_distribution_sampled_from[1.0-0.7]",
            "tests/rollouts/test_samplers.py::test_tokens_are_as_frequent_as_the_distribution_says[0.6-0.8]",
        ),
    ),
    Mutant(
        "sampled log-probs not renormalised after top_p has cut the distribution",
        "rollouts/samplers.py",
        {"[*_temperature_and_top_p(self.settings), log_probs]": "[log_probs, *_temperature_and_top_p(self.settings)]"},
        ("tests/rollouts/test_samplers.py::test_log_probs_are_those_of_the_distribution_sampled_from[1.0-0.7]",),
    ),
    Mutant(
        "the model folder's generation_config.json acts on what is sampled",
        "rollouts/samplers.py",
        {"own, model.generation_config = model.generation_config, GenerationConfig()": "own = model.generation_config"},
        ("tests/rollouts/test_samplers.py::test_what_the_folder_suggests_does_not_act[repetition_penalty]",),
    ),
    Mutant(
        "the sampler is not told which weights it samples from after an update",
        "rollouts/policy.py",
        {"publish(self._trained.policy, self._trained.num_updates)": "publish(self._trained.policy, 0)"},
        ("tests/rollouts/test_policy.py::test_every_prompt_is_sampled_with_the_weights_of_now",),
    ),
    Mutant(
        "the old log-probs of training are one token off",
        "rollouts/policy.py",
        {".cpu()[micro_batch.labels >= 0]": ".cpu().roll(1)[micro_batch.labels >= 0]"},
        ("tests/rollouts/test_policy.py::test_old_log_probs_are_those_of_the_sampler_or_of_training[training]",),
    ),
    Mutant(
        "the scores of every sampled token are kept",
        "rollouts/samplers.py",
        {"self._scores = scores": "self._scores = scores; self.__dict__.setdefault('all', []).append(scores)"},
        ("tests/rollouts/test_samplers.py::test_memory_does_not_grow_with_the_vocabulary_times_the_completion",),
    ),
    Mutant(
        "the sampler rounds its logits to bfloat16 where training computes them in float32",
        "model/policy.py",
        {"self._float32_head(fp32_lm_head)": "self._float32_head(False)"},
        ("tests/rollouts/test_samplers.py::test_sampling_has_the_head_of_training[True]",),
    ),
    Mutant(
        "prompts without the token of the beginning that the model's tokenizer adds",
        "rollouts/prompts.py",
        {'for prompt in prompts])["input_ids"]': 'for prompt in prompts], add_special_tokens=False)["input_ids"]'},
        ("tests/model/test_huggingface.py::test_prompts_are_tokens_as_the_tokenizer_makes_them",),
    ),
    Mutant(
        "labels that are not shifted: each position predicts its own token",
        "rollouts/packing.py",
        {"labels=labelled(tokens[trained], -1)": "labels=torch.where(labelled(tokens[trained], -1) < 0, -1, tokens)"},
        ("tests/rollouts/test_packing.py::test_a_document_without_a_trained_token_stays",),
    ),
    Mutant(
        "old log-probs that are not shifted with their labels",
        "rollouts/packing.py",
        {"old_log_probs=labelled(old_log_probs, 0.0)": "old_log_probs=labelled(old_log_probs, 0.0).roll(1)"},
        ("tests/losses/test_peers.py::test_old_log_probs_and_advantages_are_shifted_with_their_labels",),
    ),
    Mutant(
        "advantages divided by the population's standard deviation instead of the sample's",
        "rollouts/advantages.py",
        {"for difference in centred) / others": "for difference in centred) / len(rewards)"},
        ("tests/rollouts/test_advantages.py::test_worked_example",),
    ),
    Mutant(
        "the loss divided by the number of micro-batches (TRL #6024, ms-swift #10117)",
        "training/accumulation.py",
        {
            "        for group, parameters in self.gradient_groups():": "        for p in self.parameters():\n"
            "            p.grad /= len(micro_batches)\n        for group, parameters in self.gradient_groups():"
        },
        (
            "tests/losses/test_peers.py::test_an_update_does_not_depend_on_the_number_of_micro_batches[grpo-sample_mean]",
            f"{ACCUMULATION}::test_the_documented_module_trains_the_same_however_its_steps_are_cut[24-counts1]",
        ),
    ),
    Mutant(
        "the gradient of all but the last micro-batch lost (Fast-LLM #551)",
        "training/accumulation.py",
        {"self.manual_backward(out.loss)": "self.optimizer.zero_grad(); self.manual_backward(out.loss)"},
        (
            "tests/losses/test_peers.py::test_an_update_does_not_depend_on_the_number_of_micro_batches[grpo-sample_mean]",
            f"{ACCUMULATION}::test_the_documented_module_trains_the_same_however_its_steps_are_cut[24-counts1]",
        ),
    ),
    Mutant(
        "each micro-batch divided by totals of its own (TRL #3021, verl #5877)",
        "training/accumulation.py",
        {
            "self.micro_batch_loss(micro_batch.counted().to(self.device), totals)": "self.micro_batch_loss("
            "micro_batch.counted().to(self.device), StepTotals(micro_batch.num_documents, "
            "int((micro_batch.labels >= 0).sum()), 0))"
        },
        (f"{ACCUMULATION}::test_the_documented_module_trains_the_same_however_its_steps_are_cut[24-counts1]",),
    ),
    Mutant(
        "a micro-batch of the step left out",
        "training/accumulation.py",
        {"for micro_batch in step.micro_batches]": "for micro_batch in step.micro_batches[:3]]"},
        (f"{ACCUMULATION}::test_the_documented_module_trains_the_same_however_its_steps_are_cut[12-counts3]",),
    ),
    Mutant(
        "gradients exchanged with every micro-batch of a step",
        "training/accumulation.py",
        {"last=number == len(micro_batches)": "last=True"},
        (f"{ACCUMULATION}::test_gradients_are_exchanged_with_the_last_micro_batch_of_a_step_alone",),
    ),
    Mutant(
        "gradients of a module of the user's own not summed over ranks",
        "training/accumulation.py",
        {"return [(self.layout.loss_group,": "return [] and [(self.layout.loss_group,"},
        (f"{ACCUMULATION}::test_any_module_is_driven_over_data_parallel_ranks[2-12]",),
    ),
    Mutant(
        "a step's loss and metrics of one rank alone",
        "training/accumulation.py",
        {"for group in (self.layout.loss_group,": "for group in (None,"},
        (f"{ACCUMULATION}::test_any_module_is_driven_over_data_parallel_ranks[2-12]",),
    ),
    Mutant(
        "the scheduled learning rate reported but not used",
        "training/module.py",
        {'group["lr"] = rate': "pass"},
        ("tests/losses/test_peers.py::test_an_update_is_made_at_the_reported_learning_rate",),
    ),
    Mutant(
        "the next step's documents taken before this step's update is made",
        "rollouts/steps.py",
        {
            "                documents = self._take()\n": "                documents = self._take()\n"
            "                self._source.document(self._position)\n"
        },
        ("tests/rollouts/test_steps.py::test_the_next_batch_is_not_asked_for_before_it_is_needed[short-False]",),
    ),
    Mutant(
        "a step that closes on a group asks for the next batch before its update",
        "rollouts/steps.py",
        {"self._close_on_groups and not at_batch_end and": "self._close_on_groups and"},
        ("tests/rollouts/test_steps.py::test_the_next_batch_is_not_asked_for_before_it_is_needed[carry-True]",),
    ),
    Mutant(
        "ranks compare their documents without the advantages",
        "rollouts/steps.py",
        {"document.old_log_probs, document.advantages):": "document.old_log_probs):"},
        ("tests/rollouts/test_steps.py::test_ranks_that_hold_other_documents_are_told[advantages]",),
    ),
    Mutant(
        "recorded rows that change while they are in use",
        "rollouts/recorded.py",
        {"or row.digest(0) != self._checksum[index]": ""},
        (
            "tests/rollouts/test_recorded.py::test_a_file_that_changes_while_it_is_in_use"
            "[write_jsonl-in place, at the same time]",
        ),
    ),
    Mutant(
        "a position in the data one step ahead of the weights",
        "rollouts/steps.py",
        {'{"position": self._position,': '{"position": self._position + self._accumulation.docs_per_step,'},
        ("tests/rollouts/test_steps.py::test_continuing_from_any_step[short-0]",),
    ),
    Mutant(
        "gradients averaged over ranks as DDP and FSDP do, not summed (prime-rl #2562)",
        "ranks/gradients.py",
        {"dist.all_reduce(flat, group=group)": "dist.all_reduce(flat, group=group); flat /= group.size()"},
        ("tests/ranks/test_processes_steps.py::test_gradients_are_summed_bitwise_alike_on_all_ranks",),
    ),
    Mutant(
        "a rank whose documents ran out makes fewer passes than the others (Fast-LLM: a bare next before a collective)",
        "rollouts/steps.py",
        {" + [[]] * (max(map(len, shares)) - len(shares[data_rank]))": ""},
        (
            "tests/ranks/test_processes_steps.py::test_every_rank_gets_as_many_micro_batches_and_together_they_hold_the_step_once",
        ),
    ),
    Mutant(
        "files of a run written in place",
        "system/plain_files.py",
        {'temporary = path.with_name(f".{path.name}.tmp")\n': "temporary = path\n"},
        ("tests/system/test_links.py::test_replacing_keeps_what_was_there_when_it_fails",),
    ),
    Mutant(
        "a checkpoint written in place",
        "training/checkpoint.py",
        {
            'temporary = folder / f".{path.name}.tmp"\n': "temporary = path\n",
            "remove(path)  # written before": "pass  # written before",
            "temporary.rename(path)\n": "pass\n",
        },
        ("tests/training/test_checkpoint.py::test_killed_in_the_middle_of_saving",),
    ),
    Mutant(
        "an older checkpoint is passed over as if it were damaged",
        "training/checkpoint.py",
        {"        except _OtherFormat:\n            raise\n": ""},
        (
            "tests/training/test_checkpoint.py::"
            "test_a_run_with_checkpoints_of_an_earlier_version_is_refused_and_not_started_again[of one process]",
        ),
    ),
    Mutant(
        "older checkpoints are not seen, so that their run starts again",
        "training/checkpoint.py",
        {r'r"step-\d+(\.ckpt)?"': r'r"step-\d+"'},
        (
            "tests/training/test_checkpoint.py::"
            "test_a_run_with_checkpoints_of_an_earlier_version_is_refused_and_not_started_again[of one process]",
        ),
    ),
    Mutant(
        "a rank whose disk is full leaves the others waiting for its parts",
        "training/checkpoint.py",
        {"failure = error  # only now": "raise  # only now"},
        ("tests/training/test_processes_checkpoint.py::test_a_full_disk_of_one_rank_is_an_error_on_all",),
    ),
    Mutant(
        "the names in a manifest lead anywhere",
        "training/checkpoint.py",
        {'if not re.fullmatch(r"(\\w[\\w.-]*/)?\\w[\\w.-]*", name):': "if False:"},
        ("tests/training/test_checkpoint.py::test_what_a_manifest_names_lies_in_the_checkpoint",),
    ),
    Mutant(
        "checkpoints sorted by their names as texts",
        "training/checkpoint.py",
        {"return sorted(found, key=_step_of)": "return sorted(found)"},
        ("tests/training/test_checkpoint.py::test_steps_beyond_a_million_are_newer_than_those_before",),
    ),
    Mutant(
        "a damaged newest checkpoint counts among those that are kept",
        "training/checkpoint.py",
        {"if _step_of(path) < step]": "if path != newest]"},
        ("tests/training/test_checkpoint.py::test_a_damaged_newest_one_takes_no_place_of_those_that_are_kept[2]",),
    ),
    Mutant(
        "the number of skipped steps is forgotten on resume",
        "training/state.py",
        {'module.num_skipped_steps = state["num_skipped_steps"]': "pass"},
        ("tests/training/test_training.py::test_the_count_of_skipped_steps_goes_on_after_a_resume",),
    ),
    Mutant(
        "files of a run are opened through links",
        "system/plain_files.py",
        {"flags | os.O_NOFOLLOW | os.O_NONBLOCK": "flags | os.O_NONBLOCK"},
        ("tests/system/test_links.py::test_a_link_in_the_place_of_a_file_is_refused[run.log]",),
    ),
    Mutant(
        "temporary files are opened where they lie, through links",
        "system/plain_files.py",
        {
            "temporary.unlink(missing_ok=True)  # of a link, the link itself": "pass",
            "os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW": "os.O_CREAT",
        },
        ("tests/system/test_links.py::test_a_link_in_the_place_of_a_temporary_file_is_no_way_out[status.json]",),
    ),
    Mutant(
        "a second run goes into the directory of another",
        "config/rules/places.py",
        {"if by else []": "if False else []"},
        (
            "tests/runs/test_run_directory.py::test_the_refusal_of_a_second_run_names_resume_and_a_free_directory_is_accepted",
        ),
    ),
    Mutant(
        "MLflow's rows are told by their step alone",
        "tracking/mlflow_run.py",
        {"for row in rows if delivered.get(": "for row in rows if False and delivered.get("},
        ("tests/tracking/test_sync.py::test_sync_compares_values_and_not_only_steps[loss]",),
    ),
    Mutant(
        "an MLflow run takes rows of whatever run names it",
        "tracking/mlflow_run.py",
        {'own = f"tags.`pgtk.id` = {search_literal(str(described.identity))}"': 'own = ""'},
        ("tests/tracking/test_sync.py::test_an_mlflow_run_takes_rows_of_its_own_run_only",),
    ),
    Mutant(
        "the optimizer starts anew on resume",
        "training/state.py",
        {"module.optimizer.state[parameter] = rooms": "pass"},
        (
            "tests/losses/test_peers.py::test_resume_takes_moments_from_the_checkpoint_and_settings_from_the_configuration",
        ),
    ),
    Mutant(
        "the optimizer's settings taken from the checkpoint on resume, whatever the user asks for",
        "training/state.py",
        {
            '"data": data_state,': '"data": data_state, '
            '"settings": [{**g, "params": 0} for g in module.optimizer.param_groups],',
            'module.num_updates = state["num_updates"]': 'module.num_updates = state["num_updates"]; '
            '[g.update(found, params=g["params"]) '
            'for g, found in zip(module.optimizer.param_groups, state["settings"], strict=True)]',
        },
        (
            "tests/losses/test_peers.py::test_resume_takes_moments_from_the_checkpoint_and_settings_from_the_configuration",
        ),
    ),
]

MUTANTS += [Mutant(*row) for row in (*MUTANTS_OF_KEYS, *MUTANTS_OF_LOSSES, *MUTANTS_OF_RANKS)]
ON_A_GPU = [pytest.param(Mutant(*row), marks=pytest.mark.gpu) for row in MUTANTS_ON_A_GPU]

# Loads what takes seconds once, nothing of pgtoolkit, then forks for every line `folder, tests ...` that it reads and
# answers with what pytest found in that folder.
SERVER = """
import json, os, sys
import hypothesis, lightning, matplotlib.pyplot, mlflow, pytest, torch, transformers
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

class Record:
    def __init__(self):
        self.failed = []

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo is not None:
            names = [kind.__name__ for kind in call.excinfo.type.__mro__]
            self.failed.append([item.nodeid, call.when, names, str(call.excinfo.value)[:300]])

def run(folder, tests):
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder
    sys.stdout = sys.stderr = open("output.txt", "w")
    record = Record()
    options = ["-q", "--disable-plugin-autoload", "-p", "no:cacheprovider"]
    status = pytest.main([*options, *tests], plugins=[record])
    files = [m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "pgtoolkit"]
    with open("result.json", "w") as file:
        json.dump({"status": int(status), "failed": record.failed, "files": files}, file)
    sys.stdout.flush()

for line in sys.stdin:
    folder, *tests = json.loads(line)
    if os.fork() == 0:
        try:
            run(folder, tests)
        finally:
            os._exit(0)
    os.wait()
    print("done", flush=True)
"""


@pytest.fixture(scope="module")
def server():
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-c", SERVER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    yield process
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def copy_to(folder: Path) -> Path:
    for name in ("pgtoolkit", "conf", "docs", "tests"):
        shutil.copytree(
            REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "test_mutants.py", "images")
        )
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def run_tests(server, folder: Path, tests) -> dict:
    """What pytest finds in the copy, once it is sure that the copy and nothing else was tested."""
    print(json.dumps([str(folder), *tests]), file=server.stdin, flush=True)
    assert server.stdout.readline() == "done\n"
    result = json.loads((folder / "result.json").read_text())
    assert result["files"], "pgtoolkit was not imported"
    assert all(Path(file).is_relative_to(folder) for file in result["files"]), result["files"]
    return result


def test_without_a_mutation_the_named_tests_pass(server, tmp_path):
    tests = sorted({test for mutant in MUTANTS for test in mutant.caught_by})
    folder = copy_to(tmp_path)
    result = run_tests(server, folder, tests)
    assert result["status"] == 0, (folder / "output.txt").read_text()


@pytest.mark.parametrize("mutant", [*MUTANTS, *ON_A_GPU], ids=lambda mutant: mutant.name)
def test_the_mistake_is_caught(server, tmp_path, mutant):
    folder = copy_to(tmp_path)
    file = folder / "pgtoolkit" / mutant.file
    text = file.read_text()
    for old, new in mutant.edits.items():
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {mutant.file}"
        text = text.replace(old, new)
    file.write_text(text)
    result = run_tests(server, folder, mutant.caught_by)
    assert result["status"] == pytest.ExitCode.TESTS_FAILED, (folder / "output.txt").read_text()
    for test in mutant.caught_by:
        reasons = [(when, set(names)) for name, when, names, _ in result["failed"] if name.startswith(test)]
        assert reasons, f"{test} did not notice"
        # A fixture may look afterwards, too: what is said at the end of a test is its assertion as well.
        assert any(when == "call" for when, _ in reasons), result["failed"]
        assert all(when in ("call", "teardown") and names & ASSERTIONS for when, names in reasons), result["failed"]
