"""`pgtk parity`: equal settings agree, and each planted difference is named with what makes it
equal."""

import re
from dataclasses import replace

import pytest
from builders.parity_steps import recorded, sentences, theirs

from pgtoolkit.comparison.parity import compared, side_of
from pgtoolkit.comparison.parity_ours import OurSide
from pgtoolkit.comparison.parity_step import QUANTITIES
from pgtoolkit.comparison.parity_switches import TheirSide, differences, explain
from pgtoolkit.comparison.parity_theirs import their_numbers
from pgtoolkit.config.compose import compose
from pgtoolkit.errors import ConfigError

TOLERANCE = 1e-6
GSPO = {"actor__policy_loss__loss_mode": "gspo", "actor__loss_agg_mode": "seq-mean-token-mean"}
PENALTY = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1}
TOKEN_IS = {"algorithm__rollout_correction__rollout_is": "token"}

EQUAL = [
    ("TRL", {"scale_rewards": "none", "beta": 0.1, "epsilon_high": 0.28, "delta": 1.5}),
    ("TRL", {"scale_rewards": "none", "loss_type": "grpo", "use_bias_correction_kl": False}),
    ("TRL", {"scale_rewards": "none", "loss_type": "dr_grpo"}),
    ("TRL", {"scale_rewards": "none", "loss_type": "grpo", "mask_truncated_completions": True}),
    ("TRL", {"scale_rewards": "none", "loss_type": "sapo"}),
    ("TRL", {"scale_rewards": "none", "loss_type": "cispo", "epsilon_high": 1.3}),
    ("TRL", {"scale_rewards": "none", "use_vllm": True, "temperature": 0.7}),
    ("verl", PENALTY),
    ("verl", {"algorithm__adv_estimator": "rloo", **TOKEN_IS}),
    ("verl", {"algorithm__adv_estimator": "opo", "actor__loss_agg_mode": "seq-mean-token-sum"}),
    ("verl", {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__kl_coef": 0.1}),
    ("verl", {"algorithm__filter_groups__enable": True, **GSPO}),
    ("verl", {"actor__entropy_coeff": 0.1, "actor__loss_agg_mode": "seq-mean-token-mean"}),
]


@pytest.mark.parametrize(("trainer", "flags"), EQUAL, ids=str)
def test_what_translate_makes_of_a_file_agrees_on_random_steps(trainer, flags, tmp_path):
    side = theirs(tmp_path, trainer, **flags)
    ours = OurSide(side.as_ours, "ours")
    for seed in range(2):
        step = recorded(seed)
        numbers = ours.numbers(step)
        apart = differences(numbers, side.numbers(step))
        assert [name for name in QUANTITIES if apart[name][1] > TOLERANCE] == []
        assert explain(step, (side, ours), TOLERANCE).sides == []
        assert float(numbers["gradient"].abs().max()) > 1e-3


OPTIONS = [
    # (theirs, its flags, what is typed beside them here, the quantity, what is to be typed)
    ("verl", {}, "loss.dual_clip=null", "surrogate", "loss.dual_clip=3"),
    ("verl", {"actor__clip_ratio_high": 0.28}, "loss.epsilon_high=0.2", "surrogate",
     "loss.epsilon_high=0.28"),
    ("verl", PENALTY, "kl.coefficient=0.2", "kl", "kl.coefficient=0.1"),
    ("verl", PENALTY | {"actor__kl_loss_type": "k2"}, "kl=k3", "kl",
     "kl=k2 kl.coefficient=0.1"),
    ("verl", PENALTY, "kl=none", "kl", "kl=k3 kl.coefficient=0.1 kl.reference=initial"),
    ("verl", TOKEN_IS, "correction=none", "correction",
     "correction=token_truncate"),
    ("verl", TOKEN_IS, "correction.high=5", "correction", "correction.high=2"),
    ("verl", {"algorithm__adv_estimator": "opo"}, "advantage=dr_grpo", "baseline", "advantage=opo"),
    ("verl", PENALTY, "kl.place=reward", "rewards", "kl.place=loss"),
    ("verl", {}, "advantage.clip_high=0.3", "advantages", "advantage.clip_high=null"),
    ("verl", GSPO, "loss=grpo", "ratio", "loss=gspo"),
    ("verl", {"algorithm__norm_adv_by_std_in_grpo": False}, "advantage=grpo", "deviation",
     "advantage=dr_grpo"),
    ("verl", {"actor__loss_agg_mode": "seq-mean-token-mean"}, "aggregation=token_mean", "weights",
     "aggregation=sample_mean"),
    ("verl", {"algorithm__filter_groups__enable": True}, "rollout.max_sampling_rounds=1", "signal",
     "rollout.max_sampling_rounds=1000"),
    ("verl", {"rollout__temperature": 0.7}, "rollout.temperature=1", "new log-probs",
     "rollout.temperature=0.7"),
    ("TRL", {"scale_rewards": "none", "loss_type": "grpo", "mask_truncated_completions": True},
     "rollout.truncated=train", "mask", "rollout.truncated=mask"),
    ("TRL", {"scale_rewards": "none", "loss_type": "dr_grpo"}, "aggregation.divisor=4", "weights",
     "aggregation.divisor=8"),
    ("verl", {"actor__entropy_coeff": 0.1}, "entropy.coefficient=0", "loss",
     "entropy.coefficient=0.1"),
    ("TRL", {"scale_rewards": "batch"}, "advantage=dr_grpo", "deviation", "advantage=batch_std"),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "flags", "typed", "quantity", "use"), OPTIONS, ids=str)
def test_an_option_that_differs_is_found_with_what_to_type(
    trainer, flags, typed, quantity, use, tmp_path
):
    side = theirs(tmp_path, trainer, **flags)
    section = typed.partition("=")[0]
    config = compose([*side.typed, typed]).config if "." in section else None
    if config is None:  # an option has keys of its own
        kept = [word for word in side.typed if not word.startswith(section)]
        config = compose([*kept, typed]).config
    found = explain(recorded(), (side, OurSide(config, "ours")), TOLERANCE).sides
    assert found[0].quantity == quantity
    assert found[0].typed == use
    assert len(found) == 1, sentences(found)


CODE = [
    # (what their code does otherwise than the file says, the quantity, the words that name it)
    ({"deviation_epsilon": 1e-4}, "deviation", "added to the deviation is 0.0001"),
    ({"bessel": False}, "deviation", "with n - 1, is false"),
    ({"dual_clip": None}, "surrogate", "bound of the ratio where A < 0 is null"),
    ({"mean_of": "micro_batch"}, "weights", "counted over the micro_batch"),
    ({"mask_shift": 1}, "mask", "shifted, in tokens, by 1"),
    ({"mask_shift": -1}, "mask", "shifted, in tokens, by -1"),
    ({"temperature": 0.7}, "new log-probs", "at the temperature 0.7"),
    ({"kl": "k1", "kl_clamp": None}, "kl", "the KL is k1"),
    ({"high": 0.28}, "surrogate", "the upper clip is 0.28"),
    ({"scale": 0.5}, "weights", "every weight is multiplied by 0.5"),
    ({"baseline": "others"}, "baseline", "the baseline is others"),
    ({"drops_equal": True}, "signal", "equal rewards are left out is true"),
]


@pytest.mark.parametrize(
    ("planted", "quantity", "words", "ran_names"),
    [
        *((*row, QUANTITIES) for row in CODE),
        *((*row, ("loss", "gradient")) for row in CODE[::3]),
    ],
    ids=str,
)
def test_what_their_functions_do_otherwise_than_read_is_named(
    planted, quantity, words, ran_names, tmp_path
):
    step = recorded()
    side = theirs(tmp_path, "verl", **PENALTY)
    numbers = their_numbers(step, replace(side.convention, **planted))
    side = replace(side, ran={name: numbers[name] for name in ran_names})
    explained = explain(step, (side, OurSide(side.as_ours, "ours")), TOLERANCE)
    assert explained.readings[0].quantity == (quantity if ran_names == QUANTITIES else "loss")
    assert any(words in explanation.reason for explanation in explained.readings)
    assert explained.sides[0].quantity == quantity
    assert "not explained" not in "".join(sentences(explained.sides))


ONLY_IN_THEIR_CODE = [
    # (theirs, its flags, what is typed beside them here, the beginnings of the sentences)
    ("TRL", {"loss_type": "bnpo"}, ["aggregation=token_mean"],
     ["deviation: what is added to the deviation is 0.0001 in TRL 1.16.0 and 1e-06 in ours",
      "weights: tokens and documents are counted over the micro_batch in TRL 1.16.0 and step in"]),
    ("TRL", {"scale_rewards": "none", "mask_truncated_completions": True}, [],
     ["weights: whether the tokens of completions that mask_truncated_completions leaves out "
      "(`rollout.truncated=mask`) are counted is false in TRL 1.16.0 and true in ours"]),
    ("TRL", {"scale_rewards": "none", "per_device_train_batch_size": 2, "steps_per_generation": 1,
             "gradient_accumulation_steps": 3}, [],
     ["weights: tokens and documents are counted over the generated_batch in TRL 1.16.0 and step"]),
    ("TRL", {"scale_rewards": "none", "delta": 1.1}, [],
     ["surrogate: the bound of every ratio is 1.1 in TRL 1.16.0 and null in ours"]),
    ("TRL", {"scale_rewards": "none", "beta": 0.1, "importance_sampling_level": "sequence"},
     ["kl=k3_ratio", "kl.coefficient=0.1"],
     ["kl: the factor of the KL is the ratio of the document in TRL 1.16.0 and token in ours"]),
    ("TRL", {"scale_rewards": "none", "entropy_coef": 0.1}, ["entropy.coefficient=0.1"],
     ["loss: the entropy bonus has the weights of the micro_batch in TRL 1.16.0 and loss in ours"]),
    ("verl", PENALTY | {"actor__kl_loss_type": "k1+"}, [],
     ["kl: the KL has the gradient of k2 in verl 0.9.1 and null in ours"]),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "flags", "typed", "beginnings"), ONLY_IN_THEIR_CODE, ids=str)
def test_what_only_their_code_says_is_named_with_nothing_to_type(
    trainer, flags, typed, beginnings, tmp_path
):
    side = theirs(tmp_path, trainer, **flags)
    config = compose([*side.typed, *typed]).config
    found = explain(recorded(), (side, OurSide(config, "ours")), TOLERANCE).sides
    for explanation, beginning in zip(found, beginnings, strict=True):
        assert explanation.sentence.startswith(beginning)
        assert explanation.typed == ""


def test_bounds_of_verls_code_that_a_step_reaches_are_named(tmp_path):
    step = recorded()
    far = replace(step, new={1.0: step.new[1.0] + 12}, ref=step.ref)
    for flags, beginning in (
        (GSPO, "ratio: the log-ratio is capped at 10 in verl 0.9.1 and 20 in ours"),
        (PENALTY, "kl: the value of the KL is clamped to 10 in verl 0.9.1 and null in ours"),
    ):
        side = theirs(tmp_path, "verl", **flags)
        found = explain(far, (side, OurSide(side.as_ours, "ours")), TOLERANCE).sides
        assert found[0].sentence.startswith(beginning)
        assert len(found) == 1


def test_two_options_of_one_quantity_are_found_together(tmp_path):
    side = theirs(tmp_path, "verl", actor__clip_ratio_high=0.28)
    typed = ("loss.dual_clip=null", "loss.epsilon_high=0.2")
    config = compose([*side.typed, *typed]).config
    (found,) = explain(recorded(), (side, OurSide(config, "ours")), TOLERANCE).sides
    assert found.typed == "loss.epsilon_high=0.28 loss.dual_clip=3"


def test_an_option_is_switched_with_the_keys_of_its_group(tmp_path):
    """A divisor beside another aggregation is refused, so that the option alone makes no loss."""
    side = theirs(tmp_path, "verl")
    config = compose([*side.typed, "aggregation=constant", "aggregation.divisor=8"]).config
    (found,) = explain(recorded(), (side, OurSide(config, "ours")), TOLERANCE).sides
    assert found.typed == "aggregation=token_mean"


def test_trl_and_verl_are_compared_with_each_other(tmp_path):
    sides = theirs(tmp_path, "TRL", loss_type="grpo"), theirs(tmp_path, "verl")
    found = explain(recorded(), sides, TOLERANCE).sides
    assert [explanation.quantity for explanation in found] == ["deviation", "surrogate", "weights"]
    assert "null in TRL 1.16.0 and 3 in verl 0.9.1" in found[1].reason


def test_what_no_option_explains_is_said(tmp_path):
    step = recorded()
    side = theirs(tmp_path, "verl")
    numbers = side.numbers(step)
    side = replace(side, ran={"loss": numbers["loss"], "gradient": 1.01 * numbers["gradient"]})
    explained = explain(step, (side, OurSide(side.as_ours, "ours")), TOLERANCE)
    for found in (explained.sides, explained.readings):
        assert [explanation.quantity for explanation in found] == ["gradient"]
        assert found[0].reason.startswith("not explained")


def test_a_number_that_is_none_differs():
    numbers = OurSide(compose(["advantage=grpo"]).config, "ours").numbers(recorded())
    broken = numbers | {"gradient": numbers["gradient"] * float("nan")}
    assert differences(broken, numbers)["gradient"] == (float("inf"), float("inf"))


@pytest.mark.parametrize(
    ("trainer", "flags", "says"),
    [
        ("TRL", {"loss_type": "vespo"}, "loss_type=vespo needs one of grpo, bnpo"),
        ("TRL", {"use_adaptive_entropy": True}, "use_adaptive_entropy=true needs one of false for"),
        ("verl", {"algorithm__adv_estimator": "gae"}, "algorithm.adv_estimator=gae needs one of"),
        ("verl", PENALTY | {"actor__kl_loss_type": "full"}, "'full' as a KL of verl needs one of"),
        ("verl", {"actor__loss_agg_mode": "seq-mean-token-sum-norm"}, "needs loss_scale_factor"),
    ],
    ids=str,
)
def test_what_is_not_read_of_a_file_is_refused(trainer, flags, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        theirs(tmp_path, trainer, **flags)


def side_of_text(folder, name, content):
    path = folder / name
    path.write_text(content)
    side = side_of(path)
    assert isinstance(side, TheirSide)
    return side


def test_what_no_number_depends_on_may_be_made_when_their_program_runs(tmp_path):
    program = """
from trl import GRPOConfig, GRPOTrainer
dataset = load("prompts")
args = GRPOConfig("out", per_device_train_batch_size=size(), scale_rewards="none", EPSILON)
GRPOTrainer(model=made, reward_funcs=my_reward, args=args, train_dataset=dataset)
"""
    side = side_of_text(tmp_path, "train.py", program.replace("EPSILON", "epsilon=0.1"))
    of_sizes, note = side.notes
    assert of_sizes.startswith("TRL 1.16.0: loss_type=dapo (their default): a token has the weight")
    assert note == (
        "TRL 1.16.0: made when the program runs, and no number of this step depends on it: "
        "model=made, per_device_train_batch_size=size(), train_dataset=load('prompts')"
    )
    step = recorded()
    apart = differences(side.numbers(step), OurSide(side.as_ours, "ours").numbers(step))
    assert apart["gradient"][1] < TOLERANCE
    for setting, unread in (
        ("epsilon=bound()", "epsilon needs a value that is written in the file (got bound())"),
        ('loss_type="bnpo"', "per_device_train_batch_size needs a value that is written in the"),
    ):
        with pytest.raises(ConfigError, match=re.escape(unread)):
            side_of_text(tmp_path, "train.py", program.replace("EPSILON", setting))
    words = "algorithm.adv_estimator=grpo trainer.nnodes=$N actor_rollout_ref.actor."
    script = f"python -m verl.trainer.main_ppo {words}entropy_coeff=$E"
    with pytest.raises(ConfigError, match=r"entropy_coeff needs a value .* \(got \$E\)"):
        side_of_text(tmp_path, "run.sh", script)
    assert (
        "trainer.nnodes=$N" in side_of_text(tmp_path, "run.sh", script.replace("$E", "0")).notes[0]
    )


def test_what_an_interpolation_of_verl_stands_for_is_read(tmp_path):
    content = "{actor_rollout_ref.actor.clip_ratio: 0.3, algorithm.adv_estimator: grpo, "
    content += "actor_rollout_ref.actor.clip_ratio_high: '${actor_rollout_ref.actor.clip_ratio}'}"
    assert side_of_text(tmp_path, "verl.yaml", content).convention.high == 0.3


def test_a_key_of_theirs_is_named_whose_value_ours_takes(tmp_path):
    """Where another one of theirs says that ours is typed at all, as TRL's loss_type does."""
    flags = "loss_type: dr_grpo\nmax_completion_length: 16\nscale_rewards: none\n"
    keys = side_of_text(tmp_path, "trl.yaml", flags).keys
    assert keys["aggregation.divisor"] == "max_completion_length"
    assert (keys["aggregation"], keys["advantage"]) == ("loss_type", "scale_rewards")


def test_numbers_that_the_step_lacks_are_refused(tmp_path):
    side = theirs(tmp_path, "TRL", beta=0.1)
    step = replace(recorded(), ref=None)
    for one in (side, OurSide(side.as_ours, "ours")):
        with pytest.raises(ConfigError, match="ref_log_probs of every document"):
            one.numbers(step)
    with pytest.raises(ConfigError, match="Use a run with kl=k3 "):
        side.numbers(step)


def test_groups_without_signal_leave_nothing_to_train(tmp_path):
    side = theirs(tmp_path, "verl", algorithm__filter_groups__enable=True)
    step = recorded()
    step = replace(step, attempts=[attempt._replace(reward=1.0) for attempt in step.attempts])
    sides = (side, OurSide(side.as_ours, "ours"))
    assert explain(step, sides, TOLERANCE).sides == []
    for one in sides:
        assert float(one.numbers(step)["mask"].sum()) == 0
    facts = []
    compared(step, sides, TOLERANCE, "", facts, 1)
    assert [fact[:35] for fact in facts] == ["The gradient is 0 on both sides, so"]
    compared(recorded(), sides, TOLERANCE, "", facts, 1)
    assert len(facts) == 1


def test_a_document_that_nobody_could_score_has_no_advantage(tmp_path):
    side = theirs(tmp_path, "TRL", scale_rewards="none")
    step = recorded()
    step.attempts[3] = step.attempts[3]._replace(reward=None)
    apart = differences(side.numbers(step), OurSide(side.as_ours, "ours").numbers(step))
    assert apart["advantages"][1] < TOLERANCE
    assert apart["gradient"][1] < TOLERANCE
