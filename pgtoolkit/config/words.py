"""Words of pgtoolkit that are no keys, options or metrics, and what each of them means: the terms
of docs/, files of a run, environment variables, columns of data, and parameters of functions.

The tables of docs/ that list them and `pgtk explain` follow from these declarations.
"""

from __future__ import annotations

from pgtoolkit.config.word import Word
from pgtoolkit.config.words_of_files import (
    COLUMNS,
    FILES,
    KEYS_OF_SETS,
    OF_CHECKPOINTS,
    OF_COMPLETIONS,
    PARAMETERS,
    PARAMETERS_OF_BATCHES,
    PARAMETERS_OF_LOSSES,
    PARAMETERS_OF_REDUCERS,
    PARAMETERS_OF_VERL,
)
from pgtoolkit.config.words_of_reports import OF_COMPARISONS, OF_THE_FIELD, STATES

OF_EQUATIONS = (
    Word(
        "group",
        "the completions of one prompt; advantages are computed from their rewards. G counts the "
        "groups of the step, and N_g is the number of trained tokens of group g",
        symbols=("G", "N_g"),
    ),
    Word(
        "document",
        "one prompt with one completion, as tokens and numbers of each trained token. D counts "
        "the documents of the step, and N_d is the number of trained tokens of document d",
        symbols=("D", "N_d"),
    ),
    Word(
        "trajectory",
        "one attempt at a prompt: one document, or several if its context was rewritten on the "
        "way (a compaction, sub-agents, branches). A document that names none is one by itself. "
        "Reward, baseline and aggregation count a trajectory once: there D counts trajectories, "
        "and N_d the trained tokens of all its documents. A family by document takes its ratio "
        "within a document",
        see="losses.md#trajectories-of-several-documents",
    ),
    Word(
        "label",
        "the token that the logits of a position predict: labels[t] is token t + 1 of the "
        "document, and o_t, b_t and A_t are that token's",
    ),
    Word(
        "trained token",
        "one whose label is not negative; N counts those of the step",
        symbols=("N",),
    ),
    Word("step", "one optimizer update with all its documents, of all micro-batches and ranks"),
    Word(
        "log-prob",
        "p_t, the logarithm of a token's probability under the policy in training, "
        "with the logits divided by the temperature",
        symbols=("p_t",),
    ),
    Word(
        "old log-prob",
        "o_t, that under the policy that generated the token, in the ratio exp(p_t - o_t)",
        symbols=("o_t",),
    ),
    Word(
        "sampling log-prob",
        "b_t, that which the engine gave as it sampled the token, where "
        "another program has computed the old one",
        symbols=("b_t",),
    ),
    Word("log-ratio", "λ_t = p_t - o_t", symbols=("λ_t",)),
    Word(
        "advantage",
        "A_t, how much better a completion is than expected of its prompt; A_d, its mean in d",
        symbols=("A_t", "A_d", "A"),
    ),
)
"""The words of docs/losses.md."""

OF_CODE = (
    Word("prompt", "the question to the model: `Prompt` in `completion.py`"),
    Word("completion", "the model's answer to a prompt: `Completion` in `completion.py`"),
    Word(
        "batch of rollouts",
        "the documents that are sampled at once, by the same weights; it makes one step or several",
    ),
    Word(
        "micro-batch",
        "documents that go through the model at once; its tokens are one packed "
        "row, or padded rows",
    ),
    Word(
        "piece",
        "the part of a step that one call of the loss gets: a micro-batch, or a rank's part of it",
    ),
    Word(
        "totals",
        "the denominators of a step, counted over the step before the first backward "
        "pass: `StepTotals`",
    ),
    Word(
        "family",
        "the formula of a token's surrogate, such as GRPO's or GSPO's: a class in "
        "`losses/families.py`",
    ),
    Word(
        "slope",
        "the derivative of a surrogate by the log-ratio or the log-prob; a family gives both",
    ),
    Word("aggregation", "the formula of a token's weight: a class in `losses/aggregation.py`"),
    Word(
        "correction",
        "a factor for the gap between the log-probs of sampler and trainer: "
        "`losses/corrections.py`",
    ),
    Word(
        "reference",
        "in tests: the losses as loops in float64, `losses/reference.py`. In a run: "
        "the frozen model of a KL penalty",
    ),
    Word(
        "version",
        "the number of updates of the weights; `staleness` is how many versions old a document is",
    ),
    Word("sampler", "what writes completions: the model in training, a copy, or a server of vLLM"),
    Word("rank", "one of the processes that train one model together"),
    Word("job", "a run of a sweep"),
    Word("digest", "the hash of the keys that change what a job of a sweep learns"),
    Word("verifier", "the function that scores a completion"),
    Word("environment", "the class that answers between the turns of a conversation"),
)
"""Further words of docs/architecture.md."""

VARIABLES = (
    Word("PGTK_CONFIG_DIR", "the folder with options of your own, as `--config-dir` names it"),
    Word("MLFLOW_TRACKING_URI", "MLflow's store, where `tracking.uri` is not typed"),
    Word("MLFLOW_EXPERIMENT_NAME", "the experiment, where `tracking.experiment` is not typed"),
    Word("MLFLOW_TRACKING_USERNAME", "the user of MLflow's server"),
    Word("MLFLOW_TRACKING_PASSWORD", "their password"),
    Word("MLFLOW_TRACKING_TOKEN", "in their place a token"),
    Word(
        "MLFLOW_HTTP_REQUEST_TIMEOUT",
        "seconds that a call of MLflow's server may take (5)",
        see="experiments.md#what-mlflow-records",
    ),
    Word("MLFLOW_EXPERIMENT_ID", "not followed: `tracking.experiment` names the experiment"),
    Word("MLFLOW_RUN_ID", "not followed: each run directory is a run of MLflow's"),
    Word(
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING",
        "not followed: `tracking.system_metrics=true` measures the machine",
    ),
    Word("WANDB_API_KEY", "the key of Weights & Biases"),
    Word("WANDB_PROJECT", "the project, where `tracking.experiment` is not typed"),
    Word("WANDB_NAME", "the name of the run, where `tracking.run_name` is not typed"),
    Word("WANDB_RUN_ID", "not followed: the id is that of `status.json`"),
    Word("WANDB_RESUME", "not followed: `pgtk resume` goes on with the same run"),
    Word("WANDB_DISABLED", "not followed: `tracking=none` tracks nothing"),
    Word("WANDB_DIR", "not followed: the record lies in the run directory"),
    Word(
        "WANDB_MODE",
        "`offline` keeps the record in the run directory, for `wandb sync`",
        see="experiments.md#other-trackers",
    ),
    Word("WANDB_BASE_URL", "the server of Weights & Biases"),
    Word("WANDB_ENTITY", "the user or team to which the run belongs"),
    Word("WANDB_TAGS", "tags of the run"),
    Word("WANDB_INIT_TIMEOUT", "seconds that the server may take at the start (10)"),
    Word("HF_HUB_OFFLINE", "1 takes models and data sets from the cache, without asking the hub"),
    Word(
        "VLLM_API_KEY",
        "the key of running servers, or of those that pgtk starts",
        see="rollouts.md",
    ),
    Word(
        "VLLM_SERVER_DEV_MODE",
        "1 lets a vLLM server of your own take new weights",
        see="rollouts.md",
    ),
    Word(
        "VLLM_USE_V2_MODEL_RUNNER", "which of vLLM's two model runners samples", see="rollouts.md"
    ),
    Word(
        "VERL_USE_EXTERNAL_MODULES",
        "`pgtoolkit.adapters.verl` gives verl the losses of here",
        see="adapters.md#verl",
    ),
    Word("CUDA_VISIBLE_DEVICES", "the GPUs that a process sees"),
    Word("OMP_NUM_THREADS", "CPU threads of a process, where `trainer.num_threads` is null"),
    Word("TRITON_INTERPRET", "1 runs Triton's kernels in its interpreter, on a CPU"),
    Word("PYTHONPATH", "where Python looks for modules, yours and vLLM's plugin among them"),
    Word("MASTER_PORT", "the port at which ranks of several nodes find the first"),
    Word("TERM", "`dumb` has a line for each step instead of one that renews itself"),
    Word("PGTOOLKIT_VLLM", "how tests call vLLM"),
    Word("PGTOOLKIT_SMOLLM2", "the folder of the pre-trained model in tests"),
)
"""The environment variables that change what happens."""

TAGS = (
    Word("family", "the loss"),
    Word("aggregation", "the aggregation"),
    Word("seed", "the seed"),
    Word("sweep", "the sweep of which the run is a job"),
    Word("git_commit", "the commit, with a digest of uncommitted changes"),
    Word("reason", "why the run ended"),
    Word("parent", "the run from a step of which this one goes on"),
)
"""The tags of a run in MLflow."""

HYDRA = (
    Word(
        "hydra.run.dir",
        "the directory of a single run; without it one in outputs/ that is named "
        "after the time and what was typed",
    ),
    Word(
        "hydra.sweep.dir",
        "the folder of a sweep; without it one in outputs/sweeps/ that is "
        "named after the file and what was typed",
        see="configuration.md#sweeps",
    ),
    Word("hydra.sweep.subdir", "the name of a job's directory within it"),
    Word(
        "hydra.launcher",
        "the settings of the launcher that hydra/launcher chooses: local, slurm or ray_cluster",
        see="configuration.md#sweeps",
    ),
    Word(
        "hydra.sweeper",
        "the settings of the sweeper that hydra/sweeper chooses: basic, which "
        "runs all combinations, or optuna_search",
        see="configuration.md#sweeps",
    ),
    Word("hydra.mode", "RUN or MULTIRUN, which `-m` sets"),
    Word("hydra.job.name", "the name of the jobs in the queue of SLURM"),
    Word("hydra.job.config.override_dirname", "which keys stand in the names of folders, and how"),
    Word(
        "hydra.searchpath",
        "refused: options of your own lie in one folder, which `--config-dir` names",
    ),
)
"""The keys of Hydra that act here, besides those of the launchers' and sweepers' files."""

KINDS = {
    "a word of these pages": (*OF_EQUATIONS, *OF_CODE, *OF_THE_FIELD),
    "a word of comparisons": OF_COMPARISONS,
    "the state of a run": STATES,
    "a file of a run directory": FILES,
    "a file of a checkpoint": OF_CHECKPOINTS,
    "an environment variable": VARIABLES,
    "a column of recorded rollouts": COLUMNS,
    "a column of kept completions": OF_COMPLETIONS,
    "a parameter of a reward function": (
        *PARAMETERS,
        *PARAMETERS_OF_BATCHES,
        *PARAMETERS_OF_VERL,
    ),
    "a parameter of a loss function": PARAMETERS_OF_LOSSES,
    "a parameter of a reducer": PARAMETERS_OF_REDUCERS,
    "a key of a set of held-out prompts": KEYS_OF_SETS,
    "a key of Hydra's": HYDRA,
    "a tag in MLflow": TAGS,
}
"""What a word is, in words -> the words."""
