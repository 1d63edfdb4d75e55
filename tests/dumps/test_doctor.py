"""pgtk doctor: every fault that is put into good rollouts is found and measured, and good ones give no complaint."""

import math
from statistics import fmean

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.rollout_rows import write_jsonl, write_parquet
from dumps.writers import sampled

from pgtoolkit.cli import main
from pgtoolkit.dumps.doctor import diagnose
from pgtoolkit.errors import ConfigError, DataError

GROUP = 4
LOSS = ["loss=grpo", "aggregation=sample_mean"]


def model(seed=0):
    return small_llama(seed, initializer_range=0.6)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = save_with_tokenizer(model(), tmp_path_factory.mktemp("policy"))
    return ["model=huggingface", f"model.path={folder}"]


@pytest.fixture(scope="module")
def rollouts():
    return sampled(model())


@pytest.fixture
def rows(rollouts):
    """New ones for every test, which may change them."""
    return rows_of(rollouts)


def rows_of(rollouts):
    return [
        {
            "token_ids": one.prompt + one.response,
            "loss_mask": [False] * len(one.prompt) + [True] * len(one.response),
            "old_log_probs": [0.0] * len(one.prompt) + one.trainer,
            "sampling_log_probs": [0.0] * len(one.prompt) + one.sampler,
            "reward": one.reward,
            "group_id": one.group,
            "truncated": one.truncated and number % 8 == 0,
        }
        for number, one in enumerate(rollouts)
    ]


def found(rows, tmp_path, *overrides, topic, level="wrong"):
    """What one check says, whose level is the worst of that check."""
    path = write_jsonl(tmp_path / "rollouts.jsonl", rows)
    findings = [one for one in diagnose(str(path), [*LOSS, *overrides]).findings if one.topic == topic]
    assert level in [one.level for one in findings], findings
    return " ".join(one.says for one in findings if one.level == level)


def test_good_rollouts_give_no_complaint(rows, policy, tmp_path, capsys):
    """Of either format, from the file alone and with the policy that sampled."""
    for row in rows:
        row["truncated"] = False
    for write, name in ((write_jsonl, "r.jsonl"), (write_parquet, "r.parquet")):
        path = write(tmp_path / name, rows)
        for more in ([], policy):
            assert main(["doctor", str(path), *LOSS, *more]) == 0
            said = " ".join(capsys.readouterr().out.split())
            assert "nothing is wrong: 0 wrong, 0 worth a look" in said
            assert "?" not in said
            assert ("first document's mean ratio 1.0000" in said) == bool(more)
    assert f"{path}: 64 documents of 16 groups, judged under loss=grpo aggregation=sample_mean" in said


def test_log_probs_one_place_off(rows, policy, tmp_path, capsys):
    """Told by the two kinds beside each other, and by the model, with the size of the first ratios."""
    whose = "of the next token"
    for row in rows:
        row["sampling_log_probs"] = [*row["old_log_probs"][1:], 0.0]
    assert f"sampling_log_probs at a token's place are those {whose}" in found(rows, tmp_path, topic="alignment")
    assert f"sampling_log_probs are those {whose} (correlations" in found(rows, tmp_path, *policy, topic="model")
    assert main(["doctor", str(tmp_path / "rollouts.jsonl")]) == 3
    said = capsys.readouterr().out
    assert "not fit for a comparison" in said
    assert "***" not in said  # of what looks like a secret, such as a colon after the word token
    for row in rows:
        row["old_log_probs"] = row.pop("sampling_log_probs")
    assert "Without both kinds of log-probs" in found(rows, tmp_path, topic="alignment", level="?")
    said = found(rows, tmp_path, *policy, topic="model")
    assert f"old_log_probs are those {whose} (correlations at places" in said


def test_another_temperature(policy, tmp_path):
    """The log-probs were taken before dividing by it. The sizes and the share by the model itself."""
    llama, recorded_at, wrong = model(), 1.0, 0.6
    rollouts, sizes, outside = sampled(llama, temperature=0.6), [], []
    for one in rollouts:
        logits = llama(torch.tensor([one.prompt + one.response])).logits[0, len(one.prompt) - 1 : -1].double().detach()
        tokens = torch.tensor(one.response)[:, None]
        recorded, other = ((logits / t).log_softmax(-1).gather(1, tokens)[:, 0] for t in (recorded_at, wrong))
        one.trainer = one.sampler = recorded.tolist()
        sizes.append((other - recorded).abs())
        ratio = (other - recorded).exp()
        outside.append(float(((ratio < 0.8) | (ratio > 1.2)).double().mean()))
    rows = rows_of(rollouts)
    for row in rows:
        del row["sampling_log_probs"]
    asked = sorted({int(place) for place in torch.linspace(0, 63, 16)})
    said = found(rows, tmp_path, *policy, f"rollout.temperature={wrong}", topic="model")
    assert "old_log_probs are not the model's" in said
    assert f"logarithms of {float(torch.cat([sizes[n] for n in asked]).mean()):.2g} in size" in said
    assert f"and {100 * fmean(outside[n] for n in asked):.3g} % of them are outside of the clip" in said
    right = found(rows, tmp_path, *policy, f"rollout.temperature={recorded_at}", topic="model", level="fine")
    assert "old_log_probs are the model's" in right


def test_a_mask_that_begins_in_the_prompt_or_too_late(rows, tmp_path):
    for row in rows:
        row["loss_mask"][2] = True
    said = found(rows, tmp_path, topic="mask", level="look")
    assert "The first trained token of 100 % of the documents has a log-prob of exactly 0, and 0 % of the other" in said
    for row in rows:
        row["loss_mask"][2:4] = [False, False]
    assert "groups hold different prompts: " in found(rows, tmp_path, topic="groups")


def test_a_mask_without_the_end_and_documents_without_a_mask(rows, tmp_path):
    for row in rows:
        row["loss_mask"][-1], row["truncated"] = False, False
    assert "The last token of 100 % of the documents" in found(rows, tmp_path, topic="mask", level="look")
    for row in rows[::4]:
        row["loss_mask"] = [False] * len(row["loss_mask"])
    empty = sum(not any(row["loss_mask"]) for row in rows) / len(rows)
    said = found(rows, tmp_path, topic="mask", level="look")
    assert f"{100 * empty:.3g} % of the documents train no token" in said
    assert f"the weights w_t of all tokens add up to {1 - empty:.3g}" in said
    assert "each of one prompt" in found(rows, tmp_path, topic="groups", level="fine")


def test_groups_whose_numbers_begin_anew(rows, tmp_path):
    for number, row in enumerate(rows):
        row["group_id"] = number // GROUP % 8
        row["reward"] = float(number < 32)
    said = found(rows, tmp_path, topic="groups")
    assert "8 of 8 groups hold different prompts" in said
    assert "They carry 100 % of the sum of w|A|" in said
    assert "8 of 8 groups stand in several places" in found(rows, tmp_path, topic="groups", level="look")


def test_groups_torn_apart_of_unequal_size_and_of_one(rows, tmp_path):
    torn = rows[2:] + rows[:2]
    said = found(torn, tmp_path, topic="groups", level="look")
    assert "1 of 16 groups stand in several places of the files" in said
    assert "They carry 6.25 % of the sum of w|A|" in said  # advantages of one size: a document in 16
    said = found(rows[3:], tmp_path, topic="groups", level="look")
    assert "1 of 16 groups have one document" in said
    assert "Groups have 1 to 4 documents" in said
    assert "a large group weighs up to 4 times a small one" in said
    for number, row in enumerate(rows):
        row["group_id"] = number
    assert "64 of 64 groups have one document" in found(rows, tmp_path, topic="groups")


def test_the_parts_of_an_attempt_count_once_and_have_contexts_of_their_own(rows, tmp_path):
    """Of the first group's four documents three are parts of one attempt, two of them with a context of their own."""
    good = found(rows, tmp_path, topic="groups", level="fine")
    assert good == "16 groups of 4 documents, each of one prompt and in one place."
    parts = [row | {"reward": 0.0, "trajectory": "a"} for row in rows[:3]]
    for number, part in enumerate(parts[1:], 1):
        part["token_ids"] = [number, *part["token_ids"][1:]]
    says = found([*parts, *rows[3:]], tmp_path, topic="groups", level="look")
    title = diagnose(str(tmp_path / "rollouts.jsonl"), LOSS).title
    assert "rollouts.jsonl: 64 documents of 16 groups, 62 trajectories, judged" in title
    assert says.startswith("Groups have 2 to 4 trajectories. Under sample_mean, token_mean and constant a large group")
    only = [row | {"advantage": 1.0} for row in (parts[0], parts[1], rows[3])]
    only[1]["token_ids"], only[1]["loss_mask"] = only[1]["token_ids"][:4], [False] * 3 + [True]
    for name in ("old_log_probs", "sampling_log_probs"):
        only[1][name] = only[1][name][:4]
    only[2]["truncated"], only[0]["truncated"], only[1]["truncated"] = True, False, False
    says = found(only, tmp_path, "advantage=given", topic="truncation", level="look")
    assert "They carry 50 % of the sum of w|A|" in says


def test_documents_that_are_there_twice(rows, tmp_path):
    """Their share of the weight, by hand: under sample_mean and advantages of one size, that of the documents."""
    twice = rows + rows[:8]
    copies = len(twice) - len({str(row["token_ids"]) for row in twice})
    said = found(twice, tmp_path, topic="duplicates")
    assert f"{copies} documents repeat another one" in said
    assert f"They carry {100 * copies / 72:.3g} % of the sum of w|A|" in said
    assert copies < 12


def test_equal_documents_of_a_certain_policy_are_no_copies(rows, tmp_path):
    """Completions of probability 0.9 are expected to be equal."""
    for row in rows:
        row["token_ids"][3:], row["loss_mask"][3:] = [5, 11], [True, True]
        for name in ("old_log_probs", "sampling_log_probs"):
            row[name] = [0.0] * 3 + [math.log(0.9), 0.0]
    pairs = 16 * GROUP * (GROUP - 1) // 2
    said = found(rows, tmp_path, topic="duplicates", level="fine")
    assert f"{pairs} pairs of documents are equal; the recorded log-probs let {0.9 * pairs:.3g} be expected" in said
    for row in rows:
        for name in ("old_log_probs", "sampling_log_probs"):
            row[name] = [0.0] * 3 + [math.log(0.01), 0.0]
    assert "let 0.96 be expected" in found(rows, tmp_path, topic="duplicates")


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "prompt_mean", "constant"])
def test_what_truncated_documents_carry(aggregation, rows, tmp_path):
    """The share of sum w|A| by the definitions of the aggregations; the first group has no advantages."""
    for row in rows[:GROUP]:
        row["reward"] = 1.0
    more = [f"aggregation={aggregation}"] + (["aggregation.divisor=7"] if aggregation == "constant" else [])
    lengths = [sum(row["loss_mask"]) for row in rows]
    of_group = [sum(lengths[n // GROUP * GROUP :][:GROUP]) for n in range(len(rows))]
    w = {
        "sample_mean": [1 / (64 * n) for n in lengths],
        "token_mean": [1 / sum(lengths)] * 64,
        "prompt_mean": [1 / (16 * n) for n in of_group],
        "constant": [1 / (64 * 7)] * 64,
    }[aggregation]
    cut = [row["truncated"] for row in rows]
    size = [w[n] * lengths[n] * (0.5 if n >= GROUP else 0) for n in range(64)]
    carried = sum(size[n] for n in range(64) if cut[n]) / sum(size)
    path = write_jsonl(tmp_path / "rollouts.jsonl", rows)
    findings = diagnose(str(path), ["loss=grpo", *more]).findings
    says = next(one.says for one in findings if one.topic == "truncation")
    assert cut[0]
    assert sum(cut) > 2
    assert f"{100 * sum(cut) / 64:.3g} % of the documents were truncated" in says
    assert f"They carry {100 * carried:.3g} % of the sum of w|A|" in says
    mean = fmean(0.0 if n < GROUP else -0.5 for n in range(64) if cut[n])
    assert f"their mean advantage is {mean:+.2g}" in says


def test_advantages_of_zero(rows, tmp_path):
    for row in rows[:40]:
        row["reward"] = 1.0
    said = found(rows, tmp_path, topic="advantages", level="look")
    assert "62.5 % of the documents (10 of 16 groups) have zero advantages" in said
    assert "the gradient is 0.375 times that of the others alone" in said
    for row in rows:
        row["reward"] = 0.25
    assert "Every advantage is 0" in found(rows, tmp_path, topic="advantages")


def test_sampler_against_trainer(rollouts, rows, tmp_path):
    """Mean and maximum over all tokens, and the clip's share, by hand."""
    gaps = [[t - s for t, s in zip(one.trainer, one.sampler, strict=True)] for one in rollouts]
    every = [abs(gap) for one in gaps for gap in one]
    said = found(rows, tmp_path, topic="mismatch", level="fine")
    assert f"differ by {fmean(every):.2g} a token on average and {max(every):.2g} at most" in said
    assert "takes 0 % of the ratios out of the clip of loss=grpo" in said
    share = fmean(not -3e-4 <= math.expm1(fmean(one)) <= 4e-4 for one in gaps)
    path = write_jsonl(tmp_path / "rollouts.jsonl", rows)
    says = next(one for one in diagnose(str(path), ["loss=gspo"]).findings if one.topic == "mismatch")
    assert says.level == "look"
    assert f"takes {100 * share:.3g} % of the ratios out of the clip of loss=gspo" in says.says
    for row in rows:
        row["sampling_log_probs"] = row["old_log_probs"]
    assert "sampling_log_probs are old_log_probs" in found(rows, tmp_path, topic="mismatch", level="?")


def test_what_training_refuses_is_refused(rows, tmp_path):
    rows[3]["old_log_probs"][4] = math.nan
    path = write_jsonl(tmp_path / "rollouts.jsonl", rows)
    with pytest.raises(DataError, match=r"rollouts.jsonl:4:old_log_probs: is nan at position 4, which is trained"):
        diagnose(str(path), [])
    del rows[3]["sampling_log_probs"], rows[3]["old_log_probs"][4:]
    rows[3] |= {"old_log_probs": rows[3]["old_log_probs"] + [-1.0] * (len(rows[3]["token_ids"]) - 4)}
    write_jsonl(path, rows)
    diagnose(str(path), [])
    with pytest.raises(DataError, match=r"rollouts.jsonl:4:sampling_log_probs: is missing"):
        diagnose(str(path), ["correction=token_mask"])
    with pytest.raises(ConfigError, match="needs an existing file"):
        diagnose(str(tmp_path / "none"), [])
    with pytest.raises(ConfigError, match=r"aggregation.reducer=math.fsum needs null for pgtk doctor"):
        diagnose(str(path), ["aggregation.reducer=math.fsum"])


def test_rollouts_without_groups_or_rewards(rows, tmp_path):
    for row in rows:
        row["advantage"] = 0.5
        del row["group_id"], row["reward"], row["truncated"]
    path = write_jsonl(tmp_path / "rollouts.jsonl", rows)
    levels = {one.topic: one.level for one in diagnose(str(path), [*LOSS, "advantage=given"]).findings}
    assert (levels["groups"], levels["truncation"], levels["advantages"]) == ("?", "?", "fine")


def test_without_log_probs_nothing_is_told_from_them(rows, tmp_path):
    """Four answers to imitate, two of them equal: neither chance nor a log-prob of 0 is made of what is not there."""
    rows = [{"token_ids": row["token_ids"][:4], "loss_mask": [False] * 3 + [True]} for row in rows[::16]]
    imitated = ("loss=reinforce", "aggregation=token_mean", "advantage=given")

    def said():
        path = write_jsonl(tmp_path / "examples.jsonl", rows)
        return {one.topic: (one.level, one.says) for one in diagnose(str(path), imitated).findings}

    for number, row in enumerate(rows):
        row["token_ids"][3] = number
    assert said()["duplicates"] == ("fine", "No two documents are equal.")
    assert said()["mask"] == ("fine", "It trains 4 tokens, 1 a document, after the prompts.")
    assert said()["alignment"][0] == said()["mismatch"][0] == "?"
    assert "The file does not have both kinds of log-probs" in said()["mismatch"][1]
    rows[1] = rows[0]
    level, says = said()["duplicates"]
    assert level == "look"
    assert says.startswith("1 pair of documents are equal. 1 document repeat another one; without log-probs")
    assert "They carry 25 % of the sum of w|A|" in says
