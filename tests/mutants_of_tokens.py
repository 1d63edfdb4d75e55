"""Mistakes of `pgtk tokens` for `test_mutants.py`: (name, file, edits, what catches it)."""

TOKENS, LOSSES = "tests/inspection/test_tokens.py", "tests/inspection/test_tokens_losses.py"
EVERY_NUMBER = f"{LOSSES}::test_every_number_is_the_reference_s"

MUTANTS_OF_TOKENS = [
    (
        "a step that is not the run's shown as if it were",
        "inspection/tokens.py",
        {"    if not far:\n": "    if True:\n"},
        (f"{TOKENS}::test_what_cannot_be_made_again_is_no_page",),
    ),
    (
        "completions sampled again where servers wrote the run's",
        "inspection/tokens_step.py",
        {'self._config.sampler.name != "transformers"': "False"},
        (f"{TOKENS}::test_what_cannot_be_made_again_is_no_page",),
    ),
    (
        "a capped weight shown as a gradient that is cut",
        "inspection/tokens_losses.py",
        {"torch.where(terms.slope == 0, 3, 2)": "3"},
        (f"{EVERY_NUMBER}[None-cispo]",),
    ),
    (
        "a bound that does not act shown as one that does",
        "losses/measures.py",
        {"objective.family.cuts(low, high, terms.ratio, objective.scope_advantages)": "(low, high)"},
        (f"{EVERY_NUMBER}[None-grpo]",),
    ),
    (
        "the weight of a token with the factor of its correction",
        "inspection/tokens_losses.py",
        {'"weight": penalties.weights': '"weight": objective.weights'},
        (f"{EVERY_NUMBER}[token masked-grpo]",),
    ),
    (
        "an entropy bonus left out of the tokens' shares of the loss",
        "inspection/tokens_losses.py",
        {" if penalties.bonus else losses": " if False else losses"},
        (f"{LOSSES}::test_penalty_and_bonus_are_part_of_a_token_s_share",),
    ),
    (
        "the numbers of one document under the tokens of the next",
        "inspection/tokens_page.py",
        {"slice(end - document.num_trained, end)": "slice(end - document.num_trained + 1, end + 1)"},
        (f"{TOKENS}::test_the_page_holds_every_number_bit_for_bit",),
    ),
]
