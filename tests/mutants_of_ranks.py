"""Mistakes of losses over ranks for `test_mutants.py`: (name, file, edits, the tests that catch it) of each."""

RANKS = "tests/kernels/test_parallel_loss.py::test_given_logits"
HEAD = "tests/kernels/test_parallel_loss.py::test_fused_head"
OPTIONS = "tests/kernels/test_parallel_loss_options.py"
ALL_AXES = "data x sequence x vocabulary"

MUTANTS_OF_RANKS = [
    (
        "sums over a document's tokens on one rank only (Fast-LLM)",
        "losses/documents.py",
        {"return all_sum(sums, self.group)": "return sums"},
        (f"{RANKS}[sequence 2-gspo-sample_mean-none]", f"{RANKS}[{ALL_AXES}-gspo-token_mean-basic]"),
    ),
    (
        "documents numbered anew on each rank (Fast-LLM)",
        "losses/documents.py",
        {
            "torch.where(mask, document_index, num_documents)": "torch.where("
            "mask, document_index.unique(return_inverse=True)[1], num_documents)"
        },
        (f"{RANKS}[sequence 2-gspo-sample_mean-none]", f"{RANKS}[sequence 4-grpo-sample_mean-basic]"),
    ),
    (
        "a document's tokens counted on one rank only",
        "losses/documents.py",
        {"all_sum(self.counts_here, self.group)": "self.counts_here", "both[1].long()": "self.counts_here"},
        (f"{RANKS}[sequence 2-grpo-sample_mean-basic]", f"{RANKS}[{ALL_AXES}-gspo-token_mean-basic]"),
    ),
    (
        "automatic differentiation sees the document's tokens of one rank only",
        "losses/documents.py",
        {"(values, self._broadcast, self._sum)": "(values, self._broadcast, self._sum_here)"},
        (f"{OPTIONS}::test_automatic_differentiation_finds_the_coefficients[gspo]",),
    ),
    (
        "the lengths that a document's chunk divides by are one rank's",
        "kernels/chunks.py",
        {"overall[first:last]": "local[first:last]"},
        (f"{HEAD}[sequence 2-gspo-sample_mean-3]", f"{HEAD}[{ALL_AXES}-gspo-sample_mean-100]"),
    ),
    (
        "a reducer's weights averaged over the tokens of one rank only",
        "losses/objective.py",
        {"weights if own_slope else": "weights if True else"},
        (f"{OPTIONS}::test_a_reducer_whose_weights_differ_within_a_document[gspo-True]",),
    ),
    (
        "the entropy of vocabulary shards taken from one of them (Fast-LLM)",
        "kernels/torch_passes.py",
        {"(dots[0] + shift.clamp(min=-1000.0) * sums)).sum(0)": "(dots[0] + shift.clamp(min=-1000.0) * sums))[0]"},
        (
            f"{RANKS}[vocabulary 2-cispo-sample_mean-with_entropy]",
            f"{RANKS}[{ALL_AXES}-gspo-prompt_mean-with_entropy]",
        ),
    ),
    (
        "each vocabulary shard with its own maximum",
        "kernels/torch_passes.py",
        {"shift = (maxima - maximum) / temperature": "shift = torch.zeros_like(maxima)"},
        (f"{RANKS}[vocabulary 2-grpo-sample_mean-basic]", f"{RANKS}[{ALL_AXES}-gspo-token_mean-basic]"),
    ),
    (
        "vocabulary shards that start one column late",
        "kernels/shards.py",
        {"temperature, with_entropy, self.start)": "temperature, with_entropy, self.start + 1)"},
        (f"{RANKS}[vocabulary 2-grpo-sample_mean-basic]", f"{RANKS}[{ALL_AXES}-gspo-token_mean-basic]"),
    ),
    (
        "vocabulary shards whose gradient starts one column late",
        "kernels/shards.py",
        {"coefficients, temperature, self.start, out": "coefficients, temperature, self.start + 1, out"},
        (f"{RANKS}[vocabulary 4-gspo-sample_mean-none]", f"{HEAD}[sequence x vocabulary-grpo-constant-3]"),
    ),
    (
        "the gradient of the hidden states from one vocabulary shard",
        "kernels/fused_head.py",
        {"all_reduce_(self.hidden_gradient, options.vocabulary_group)": "pass"},
        (f"{HEAD}[vocabulary 2-grpo-sample_mean-100]", f"{HEAD}[{ALL_AXES}-gspo-token_mean-3]"),
    ),
    (
        "the gradient of the hidden states from one vocabulary shard, where all logits exist",
        "kernels/losses.py",
        {"copy(hidden, ranks.vocabulary)": "hidden"},
        (f"{OPTIONS}::test_the_head_with_all_logits_and_with_some[vocabulary 2]",),
    ),
    (
        "a rank without a token gives 0 to the extrema (Fast-LLM)",
        "losses/measures.py",
        {"new_full((len(values),), -torch.inf)": "new_full((len(values),), 0.0)"},
        (f"{RANKS}[sequence 4-grpo-sample_mean-basic]",),
    ),
    (
        "the mean over ranks instead of the sum (prime-rl, DDP)",
        "losses/metrics.py",
        {"self.sums]), group)": "self.sums]) / (1 if group is None else group.size()), group)"},
        (f"{RANKS}[data 2-grpo-sample_mean-basic]", f"{RANKS}[sequence 2-gspo-token_mean-basic]"),
    ),
    (
        "a step's totals counted on one rank",
        "losses/documents.py",
        {"all_sum(numbers, data_group)": "numbers"},
        (f"{OPTIONS}::test_without_totals_the_ranks_together_are_the_step[grpo-sample_mean]",),
    ),
]
