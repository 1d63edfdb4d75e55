"""The files of a run and of a checkpoint, the columns of data, and the parameters of reward
functions."""

from __future__ import annotations

from pgtoolkit.config.word import Word

FILES = (
    Word("config.yaml", "the configuration of the run, with every key"),
    Word("overrides.yaml", "what was typed"),
    Word(
        "drift.jsonl",
        "after a resume that changed keys or code of your own: from which step on which",
    ),
    Word("provenance.json", "the command, the commit, versions of packages, and the machine"),
    Word("data.json", "digests of the files that the run has read"),
    Word(
        "code",
        "copies of modules of your own that the run imported",
        see="configuration.md#what-runs-code",
    ),
    Word("status.json", "the state of the run, its step, the last checkpoint, and why it ended"),
    Word("metrics.jsonl", "a line for each step", see="metrics.md"),
    Word(
        "evaluations.jsonl",
        "a line for each set of held-out prompts at each evaluation",
        see="evaluation.md",
    ),
    Word("completions", "the completions that are kept, as Parquet files", see="samples.md"),
    Word(
        "checkpoints", "Hugging Face folders, named step-NNNNNN", see="configuration.md#checkpoints"
    ),
    Word("run.log", "what the run has printed"),
    Word(
        "sampler.log",
        "the output of processes that sample, with the seconds of each batch; of several "
        "sampler-0.log and so on",
        see="rollouts.md",
    ),
    Word("vllm.log", "the output of a server of vLLM that the run has started", see="rollouts.md"),
    Word("recorded_index.npz", "of rollout=recorded: the place of each row in its file"),
    Word("outputs", "not of one run: the folder of runs, sweeps, evaluations and MLflow's store"),
    Word("curves.png", "the main metrics over the documents seen"),
    Word("output.log", "of a job of a sweep: its output", see="configuration.md#sweeps"),
    Word(
        "sweep.json",
        "in the folder of a sweep: its jobs with their states; while they run sweep.jsonl, too",
        see="configuration.md#sweeps",
    ),
)
"""The files and folders of a run directory."""

OF_CHECKPOINTS = (
    Word("config.json", "the model's configuration"),
    Word("generation_config.json", "how the run samples, and which tokens end a completion"),
    Word("model.safetensors", "the weights in float32, from which training continues"),
    Word("model.safetensors.index.json", "which of several files has which weights"),
    Word("adapter_config.json", "with LoRA: which model the adapters belong to"),
    Word("adapter_model.safetensors", "with LoRA: the adapters, in the place of the weights"),
    Word(
        "training/optimizer-*.safetensors",
        "the optimizer's moments, by the names of their parameters",
    ),
    Word(
        "training/state.json",
        "counts, the place in the data, the batches in use and sampled ahead",
    ),
    Word("training/state.safetensors", "the tensors of these"),
    Word(
        "manifest.json",
        "the format, and the size and CRC-32 of each file, and of `metrics.jsonl` and "
        "`evaluations.jsonl` at that step",
    ),
)
"""The files of a checkpoint, beside the tokenizer's."""

COLUMNS = (
    Word(
        "token_ids",
        "prompt followed by completion; 0 ≤ id < vocabulary of the model. A row may have texts in "
        "its place",
        type="list of S integers",
        see="data.md#supervised-fine-tuning",
    ),
    Word(
        "loss_mask",
        "whether the token is trained; never the first token",
        type="list of S booleans, or 0 and 1",
    ),
    Word(
        "old_log_probs",
        "log-prob of **this** token (not of the next) under the policy that sampled it, at the "
        "temperature it was sampled with; read only where trained. With `loss=reinforce` all rows "
        "may lack it, unless there is a `correction` or `kl=k3_ratio`",
        type="list of S numbers",
    ),
    Word(
        "sampling_log_probs",
        "the same as the engine that sampled the token gave it, where `old_log_probs` were "
        "computed anew; by the same rules",
        type="list of S numbers, optional",
    ),
    Word(
        "sampling_top_ids",
        "the likeliest tokens of the sampler in the place of this token, each once, for "
        "`loss.score_centering=true`; -1 where unused, and an empty list where nothing is trained",
        type="list of S lists of integers, optional",
    ),
    Word(
        "sampling_top_log_probs",
        "their log-probs, at the temperature the token was sampled with; `old_log_probs` are then "
        "the sampler's",
        type="list of S lists of numbers, optional",
    ),
    Word(
        "sampling_kept_ids",
        "the tokens that sampling by top-p or top-k kept in the place of this token, each once and "
        "it among them: its log-probs are over these alone, in training too; -1 where unused, an "
        "empty list where nothing is trained. At a trained token an empty list says that they are "
        "not known: the document has weight 0. Rows without the column are sampled from all tokens",
        type="list of S lists of integers, optional",
    ),
    Word(
        "ref_log_probs",
        "the same under a frozen reference, for `kl.reference=recorded` and the metric `kl_ref`; "
        "by the same rules",
        type="list of S numbers, optional",
    ),
    Word(
        "reward",
        "for `advantage=grpo`, `dr_grpo`, `rloo`, `max_rl`, `batch_std`, `pass_at_k`, `opo`, "
        "`reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `custom`",
        type="number",
    ),
    Word(
        "advantage",
        "for `advantage=given`. Where all rows may lack `old_log_probs`, they may lack it and the "
        "reward, too: each is then 1",
        type="number, or list of S numbers",
    ),
    Word(
        "group_id",
        "the same for all completions of one prompt, in all files; another for every other prompt",
        type="integer or text",
    ),
    Word(
        "trajectory",
        "the same for all documents that are parts of one attempt at the prompt; unique in its "
        "group, or in its file where there are no groups. A row without one is an attempt by "
        "itself",
        type="integer or text, optional",
        see="losses.md#trajectories-of-several-documents",
    ),
    Word("id", "unique; names the document in messages", type="integer or text, optional"),
    Word(
        "model_version",
        "optimizer updates of the sampling policy, for the metric `staleness`",
        type="integer, optional",
    ),
    Word("truncated", "for the metric `truncated_fraction`", type="boolean, optional"),
    Word("exact_match", "for the metric of the same name", type="boolean, optional"),
    Word(
        "score_failed",
        "whether nobody could score the completion. With it and without a `reward` a document has "
        "weight 0 and no part in the baseline of its group",
        type="boolean, optional",
    ),
    Word(
        "messages",
        "in the place of the tokens: a conversation",
        type="list of chat messages",
        see="data.md#supervised-fine-tuning",
    ),
    Word(
        "prompt",
        "in the place of the tokens, with `completion`",
        type="text, or list of chat messages",
        see="data.md#supervised-fine-tuning",
    ),
    Word(
        "completion",
        "the answer to `prompt`, which is trained",
        type="text, or list of chat messages",
        see="data.md#supervised-fine-tuning",
    ),
    Word(
        "tools",
        "not handed to the chat template: a row of texts that has any is refused",
        type="any, optional",
    ),
)
"""The columns of recorded rollouts."""

OF_COMPLETIONS = (
    Word("step", "the step that trained on it; in an evaluation, the steps made before"),
    Word("name", "of the prompt, the same whenever it is used, such as prompts.jsonl:12"),
    Word("prompt", "the text of the prompt"),
    Word(
        "completion",
        "the text of the completion with the token that ended it, such as `<end>`, which "
        "verifiers do not get",
    ),
    Word("answer", "the task's"),
    Word("reward", "the reward after weights and penalties"),
    Word("exact_match", "whether it is right, whatever its reward; empty where no score says so"),
    Word("score_failed", "whether scoring failed"),
    Word("reward/NAME", "the score of each of several verifiers", see="data.md#verifiers"),
    Word("advantage", "empty in an evaluation"),
    Word("tokens", "the completion's length"),
    Word("finish_reason", "`stop`, or `length` if it was cut off"),
    Word("version", "of the weights that wrote it, in updates"),
)
"""The columns of the completions that a run keeps."""

PARAMETERS = (
    Word("completion", "the text of one completion"),
    Word("answer", "its prompt's reference answer, a text"),
    Word("prompt", "the prompt as the file has it: a text, or a list of chat messages"),
    Word("row", "the row of the file with all columns, a dictionary"),
)
"""The parameters of a reward function of one completion."""

PARAMETERS_OF_BATCHES = (
    Word(
        "completions",
        'under a chat template lists of messages (`completion[0]["content"]`), else texts. '
        "Special tokens except the end are part of a text",
    ),
    Word("prompts", "the same of prompts: the template's input, including `task.system_prompt`"),
    Word("completion_ids", "tokens, with the end of the sequence"),
    Word(
        "trainer_state",
        "`global_step`, the updates of the weights that wrote the completions, and `max_steps`",
    ),
    Word(
        "log_metric",
        "`log_metric(name, value)` becomes the metric `verifier/NAME`; with several verifiers "
        "`verifier/VERIFIER/NAME`",
    ),
    Word(
        "log_extra",
        "`log_extra(column, values)` has a value for each completion, kept as text beside its "
        "rewards if the run keeps the completion (`rollout.keep_completions`, evaluations), and "
        "shown by `pgtk samples`; with several verifiers as `VERIFIER/COLUMN`",
    ),
)
"""The parameters of a reward function of a batch, besides columns of the file."""

PARAMETERS_OF_VERL = (
    Word(
        "data_source",
        "the column of this name, which every row needs where the parameter has no default",
    ),
    Word("solution_str", "the text of the completion"),
    Word(
        "ground_truth",
        "`reward_model.ground_truth` as the file has it, if that is the answer; else the answer, a "
        "text",
    ),
    Word("extra_info", "the column of this name, a dictionary; `{}` where the row has none"),
)
"""The parameters of verl's compute_score."""

PARAMETERS_OF_REDUCERS = (
    Word(
        "document_index",
        "the index of each token's document; untrained tokens have the one after the last",
        type="(T,)",
    ),
    Word("tokens_per_document", "N_d, the trained tokens of each document", type="(D,)"),
    Word("group_index", "the index of each document's group", type="(D,)"),
)
"""Parameters of a reducer of the user's own that no other word of these pages is."""

PARAMETERS_OF_LOSSES = (
    Word("log_probs", "p, through which the gradient flows", type="(T,)"),
    Word("log_ratio", "p - o, not clamped, through which the gradient flows", type="(T,)"),
    Word("old_log_probs", "o", type="(T,)"),
    Word(
        "sampling_log_probs",
        "b; with a default of `None` it is given where the documents have it, and so are the next",
        type="(T,)",
    ),
    Word("ref_log_probs", "f, the log-probs under the reference", type="(T,)"),
    Word("advantages", "A; a function without it takes `advantage=none`", type="(T,)"),
    Word(
        "rewards",
        "the document's reward as estimators get it",
        type="(T,)",
    ),
    Word(
        "group_rewards",
        "the mean reward of the document's group, `dr_grpo`'s baseline",
        type="(T,)",
    ),
    Word("lengths", "the trained tokens of the document", type="(T,)"),
    Word("position", "the token's index among these", type="(T,)"),
    Word(
        "ratio",
        "`ratio(x)` is exp of x clamped to ±20, without gradient beyond, counted in "
        "`clamped_log_ratio_fraction`",
    ),
    Word(
        "documents",
        "`sum(x)`, `mean(x)`, `first(x)` (that of the first token, exactly): (T,) to (D,); "
        "`before(x)`: (T,), the sum over the document's tokens before this one; `spread(y)`: (D,) "
        "to (T,)",
    ),
    Word(
        "groups",
        "over the documents of a prompt: `sum`, `mean`, `max`, `logsumexp`: (D,) to (G,); "
        "`softmax`: (D,); `spread(z)`: (G,) to (D,)",
    ),
    Word(
        "step",
        "`sum(x)`, `mean(x)`, `quantile(x, share)` over all trained tokens; `num_tokens`, "
        "`num_documents`, `num_groups` of those seen (these metrics count all documents and "
        "groups)",
    ),
)
"""The parameters of a loss function of T trained tokens, D documents and G groups."""

KEYS_OF_SETS = (
    Word(
        "task",
        "another kind of task (`reverse`, `sums`, `reasoning_gym`, `prompts`), with the defaults "
        "of its file in `conf/task`",
    ),
    Word("seed", "instead of `evaluation.seed`"),
    Word(
        "prompts",
        "instead of `evaluation.prompts_per_set`; of a file with fewer prompts all are used, each "
        "once",
    ),
)
"""The keys of a set of held-out prompts, besides those of the task."""
