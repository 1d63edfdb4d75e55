"""`pgtk explain` has an explanation of each key, option, metric and exit status, and finds it by
the words that people use."""

import re

import pytest
from builders.refusals import refusal

from pgtoolkit.config.entries import entries
from pgtoolkit.config.explain import explain, explain_as_json, pages_on
from pgtoolkit.config.explained import explanations
from pgtoolkit.config.files import options
from pgtoolkit.config.keys import KEYS
from pgtoolkit.config.option_tables import option_tables
from pgtoolkit.config.schema import OPTIONS
from pgtoolkit.config.trainer_keys import tables
from pgtoolkit.errors import ExitStatus, PgtoolkitError
from pgtoolkit.launch.check import check, problems
from pgtoolkit.runs.declared_metrics import TABLES
from pgtoolkit.system.redaction import redact
from pgtoolkit.tracking.progress import _FIELDS, ProgressLine


def test_every_key_and_option_is_explained():
    known = explanations()
    for key in KEYS:
        assert key.name in known or key.option, key.name
    assert not [entry.name for entry in entries() if not entry.meaning]
    texts = [page.text for pages in known.values() for page in pages]
    assert not [text for text in texts if redact(text) != text]
    for group, names in options().items():
        (page,) = [page for page in known[group] if page.kind == "group"]
        assert [name for name in names if f"{group}={name}" not in page.text] == []
        assert [name for name in names if f"{group}={name}" not in known] == []


def test_a_parameter_of_code_of_ones_own_is_explained_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code = "class Squared:\n    def __init__(self, lower=1, low=0.2): pass\n"
    code += "def clip(log_ratio, softness=0.5): 'softness: how soft'\n"
    (tmp_path / "family_of_a_user.py").write_text(code)
    page = explain("family_of_a_user.Squared.low")
    assert "a parameter of the class family_of_a_user.Squared\n  low=0.2" in page
    page = explain("family_of_a_user.clip.softness")
    assert "a parameter of the function family_of_a_user.clip\n  softness=0.5 (how soft)" in page
    for unknown in ("family_of_a_user.Squared.high", "family_of_a_user.clip.high"):
        with pytest.raises(PgtoolkitError):
            explain(unknown)
    with pytest.raises(PgtoolkitError, match=r"a parameter of your own .* Use pgtk --help, or"):
        explain("softness")


def test_joined_words_are_found_where_they_are_written_apart():
    assert "advantage=grpo" in explain("standard_deviation")
    assert (
        explain("standard_deviation").partition(":")[2]
        == (explain("standard-deviation").partition(":")[2])
    )
    with pytest.raises(PgtoolkitError, match="needs a word that is known"):
        explain("_-")


def test_every_option_with_a_formula_has_a_row_in_the_tables_of_docs():
    rows: dict[str, set[str]] = {}
    for table in option_tables().values():
        assert {len(cells) for _, cells in table.rows} == {len(table.heads)}
        rows.setdefault(table.group, set()).update(settings[0] for settings, _ in table.rows)
    assert rows.keys() == {"loss", "advantage", "aggregation", "correction", "kl"}
    for group, names in rows.items():
        without = {"loss": {"custom"}, "correction": {"none"}, "kl": {"none"}}.get(group, set())
        assert names == {*OPTIONS[group]} - without, group


def test_a_parameter_without_a_default_is_typed_in_what_explain_and_a_refusal_say(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needing.py").write_text(
        "from dataclasses import dataclass\n"
        "from pgtoolkit import families\n"
        "@dataclass(frozen=True)\n"
        "class Needing(families.Family):\n"
        "    tau: float\n"
        "    gain: float = 1.0\n"
        "    def surrogate(self, log_ratio, advantages, log_probs):\n"
        "        return self.tau * log_ratio, self.tau + 0 * log_ratio\n"
    )
    use = "loss=needing.Needing loss.tau=X"
    assert f"use: {use}" in explain("needing.Needing")
    (problem,) = problems(check(["loss=needing.Needing"]))
    assert problem.endswith(f"Use {use}.")
    assert problems(check(use.replace("X", "0.5").split())) == []


def test_every_metric_and_exit_status_is_explained():
    known = explanations()
    assert {metric.name for metrics in TABLES.values() for metric in metrics} <= known.keys()
    assert {str(status) for status in ExitStatus} <= known.keys()
    assert all(kind.exit_status in ExitStatus for kind in PgtoolkitError.__subclasses__())


def test_every_word_of_the_line_that_a_run_prints_is_explained():
    known = explanations()
    line = ProgressLine(9).line(1, dict.fromkeys(_FIELDS, 0.5))
    words = [word for word in line.replace("%", "").split() if not re.match(r"[\d?]", word)]
    assert len(words) == 2 + len(_FIELDS)
    for word in words:
        assert (
            any("the line that a run prints" in page.title for page in known[word])
            or word == "step"
        ), word
    for metric in _FIELDS:
        assert metric in known


@pytest.mark.parametrize(
    ("words", "explanation"),
    [
        ("loss.epsilon_high=0.28", "number from 1e-09 to 1000000000"),
        ("kl.coefficient", "It needs kl other than none"),
        (
            "rollout.lag",
            "`pgtk resume` keeps it: the checkpoint holds batches that were sampled ahead",
        ),
        ("max_completion_length", "default: 7, with model=huggingface 256"),
        ("gspo", "ratio: R_d = exp("),
        ("constant", "verl loss_agg_mode: `seq-mean-token-sum-norm`"),
        ("ppo", "loss=grpo: an option"),
        ("kl_ref", "measured: `metrics=basic`, where a reference is known"),
        ("75", "exit status 75: interrupted Stopped by a signal after saving a checkpoint"),
        (
            "proximal",
            (
                "rollout.old_log_probs: a key of rollout=policy type: one of training, sampling, "
                "proximal"
            ),
        ),
        ("cosine", "optimizer.schedule: a key"),
        (
            "anchor",
            "a word in what `pgtk explain` says of rollout.old_log_probs: a key of rollout=policy;",
        ),
        ("teacher", "kl.reference: a key"),
        ("trajectory", "trajectory, a column of recorded rollouts the same for all documents"),
        ("exit status 75", "in a script: Starts it again with `pgtk resume`"),
        ("loss_agg_mode", "aggregation=token_mean: verl loss_agg_mode"),
        ("epsilon", "epsilon is a key of TRL; see docs/trl_and_verl_keys.md"),
        ("epsilon", "optimizer.epsilon: a key"),
        ("clip", "clipped_ratio_fraction: a metric"),
        ("D", "D counts the documents of the step"),
        ("N_d", "N_d is the number of trained tokens of document d"),
        ("G", "G counts the groups of the step"),
        ("N_g", "N_g is the number of trained tokens of group g"),
        ("N", "N counts those of the step"),
        ("L", "aggregation.divisor: a key"),
        ("A_t", "A_t, how much better a completion is"),
        ("A_d", "A_d, its mean in d"),
        (
            "clip",
            "(failing: above 0.5; with `gspo` and `gmpo` where `clipped_low_fraction` + "
            "`clipped_high_fraction` exceeds 0.9)",
        ),
        (
            "ratio_new_old",
            "over: documents; one without a trained token counts as 0. With num_empty_documents > "
            "0 the mean over the others is the number times num_documents / (num_documents - "
            "num_empty_documents)",
        ),
        ("exact", "exact_match: a metric"),
        ("tok/s", "tokens_per_second: a metric"),
        ("kl", "kl_new_old: a metric"),
        ("document", "document, a word of these pages one prompt with one completion,"),
        ("groups", "the completions of one prompt; advantages are computed from their rewards"),
        ("pass@1", "the unbiased estimate of the chance that one of k completions"),
        ("pass@8_error", "standard error of that mean"),
        ("pass_at_1", "the unbiased estimate of the chance that one of k completions"),
        ("evaluation/held_out/pass_at_4", "the unbiased estimate of the chance that one of k"),
        ("reward/format", "mean score of each of several verifiers"),
        ("num_generations", "here: `rollout.group_size`"),
        ("clip_ratio_c", "loss.dual_clip={actor.clip_ratio_c}"),
        (
            "accumulation.docs_per_step=96 does not divide the 256 documents of a batch",
            "Documents of an optimizer step",
        ),
    ],
)
def test_a_word_has_its_explanation(words, explanation):
    assert explanation in " ".join(explain(words).split())


@pytest.mark.parametrize(
    ("word", "near"), [("epsilonhigh", "epsilon_high"), ("gsop", "gspo"), ("entrpy", "entropy")]
)
def test_an_unknown_word_is_answered_with_the_nearest(capsys, word, near):
    assert refusal(capsys, "explain", word).endswith(f"Use pgtk explain {near}.\n")


def test_a_word_that_is_near_to_no_other_is_answered_with_the_page_of_keys(capsys):
    assert refusal(capsys, "explain", "behaviour").endswith("Use pgtk --help, or docs/keys.md.\n")


def test_no_page_on_a_key_of_theirs_looks_like_a_secret():
    """All that is printed goes through `redact`, which takes `token: x` for one."""
    rows = [row for table in tables().values() for row in table.rows.values()]
    texts = [row.sentence(row.name) for row in rows]
    with_tokens = [row.name for row in rows if "token" in f"{row.name} {row.named}"]
    for name in with_tokens:
        texts += [page.text for page in pages_on(name)] + [explain_as_json(name)]
    assert len(with_tokens) > 30
    assert [text for text in texts if redact(text) != text] == []
