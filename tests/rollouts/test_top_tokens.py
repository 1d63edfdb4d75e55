"""The likeliest tokens of the sampler: as they are sampled, recorded, kept in a checkpoint, and
read by score centering."""

import json

import pytest
import torch
from builders.rollout_rows import good_row, recorded_rollouts, write_jsonl
from builders.runs import assert_equal, module_and_loader
from keys.small_runs import logits_of, settings, specified

from pgtoolkit.completion import Completion, Prompt
from pgtoolkit.document import TOP_VECTORS, Document
from pgtoolkit.errors import DataError
from pgtoolkit.families import Cispo, Icepop, Reinforce
from pgtoolkit.rollouts.group_rollouts import as_completion
from pgtoolkit.rollouts.recording import write_batch
from pgtoolkit.rollouts.saved_batches import STATE
from pgtoolkit.runs.records import expect
from pgtoolkit.sampling.draw import likeliest_tokens
from pgtoolkit.tasks.conversation import Conversation

TEMPERATURE = 0.7
CENTERED = (
    "loss=cispo",
    "loss.score_centering=true",
    f"rollout.temperature={TEMPERATURE}",
    "rollout.old_log_probs=sampling",
    "sampler.keep_top=5",
)


def test_of_equal_scores_the_smaller_ids_come_first():
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    scores[0] = 0.0
    scores[1, 3:9] = 4.0
    scores[2, 40] = -0.0
    scores[2, 41] = 0.0
    scores[3] = -torch.inf
    scores[3, 7] = -1e30
    ids, log_probs = likeliest_tokens(scores, 5)
    for row, of_row in zip(scores.tolist(), ids.tolist(), strict=True):
        assert of_row == sorted(range(50), key=lambda token: (-row[token], token))[:5]
    expected = scores.log_softmax(-1).gather(-1, ids.long())
    torch.testing.assert_close(log_probs, expected, rtol=1e-6, atol=1e-6)
    ids, log_probs = likeliest_tokens(scores[:, :3], 5)
    assert ids[0].tolist() == [0, 1, 2, -1, -1]
    assert log_probs[0, 3:].tolist() == [-torch.inf] * 2


@pytest.mark.parametrize("static", ["true", "false"])
def test_the_likeliest_tokens_are_those_of_the_logits(static):
    """At the temperature of sampling; what is drawn stays the same, to the bit."""
    common = settings(
        f"rollout.temperature={TEMPERATURE}",
        "rollout.old_log_probs=sampling",
        f"sampler.static_cache={static}",
    )
    module, loader = module_and_loader(*common, "sampler.keep_top=5")
    documents = next(iter(loader)).documents
    plain = next(iter(module_and_loader(*common)[1])).documents
    for document, other in zip(documents, plain, strict=True):
        assert torch.equal(document.tokens, other.tokens)
        assert torch.equal(document.old_log_probs, other.old_log_probs)
        assert other.sampling_top_ids is None
        predicting = document.loss_mask.nonzero()[:, 0] - 1
        rows = (logits_of(module, document) / TEMPERATURE).log_softmax(-1)[predicting]
        kept = rows.gather(-1, document.sampling_top_ids.long())
        torch.testing.assert_close(document.sampling_top_log_probs, kept.float())
        assert torch.equal(kept.sort(descending=True).values, rows.topk(5).values)
        drawn = document.tokens[document.loss_mask]
        is_drawn = document.sampling_top_ids == drawn[:, None]
        old = document.old_log_probs[:, None].expand_as(is_drawn)
        assert torch.equal(document.sampling_top_log_probs[is_drawn], old[is_drawn])


def per_position(documents: list[Document], name: str) -> torch.Tensor:
    """Return the rows of the trained tokens at the positions that predict them, -1 elsewhere;
    the last token of a document predicts nothing."""
    rows = []
    for document in documents:
        of_trained = iter(getattr(document, name))
        unused = torch.full_like(getattr(document, name)[0], -1)
        rows += [next(of_trained) if trained else unused for trained in document.loss_mask[1:]]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("loss", "family"),
    [
        ("reinforce", Reinforce(score_centering=True)),
        ("cispo", Cispo(score_centering=True)),
        ("icepop", Icepop(score_centering=True)),
    ],
)
def test_the_loss_of_recorded_rows_is_that_of_the_specification(tmp_path, loss, family):
    """The second step of a policy whose weights have moved, on what the first ones sampled; the
    documents are written and read again."""
    _, loader = module_and_loader(*settings(*CENTERED))
    documents = next(iter(loader)).documents
    write_batch(tmp_path, 0, documents)
    recorded = [f"rollout.path={tmp_path}", "rollout=recorded", "advantage=given"]
    chosen = [f"loss={loss}", "loss.score_centering=true", f"rollout.temperature={TEMPERATURE}"]
    module, steps = module_and_loader(*settings(*recorded, *chosen))
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.3 if weight.ndim > 1 else 1)
    step = next(iter(steps))
    for document, other in zip(step.documents, documents, strict=True):
        for name in TOP_VECTORS:
            assert_equal(getattr(document, name), getattr(other, name))
    expected, gradient = specified(
        module,
        step.documents,
        loss=loss,
        temperature=TEMPERATURE,
        sampling_top_ids=per_position(step.documents, "sampling_top_ids"),
        sampling_top_log_probs=per_position(step.documents, "sampling_top_log_probs"),
        **vars(family),
    )
    metrics = module.training_step(step, 0)["metrics"]
    for name in ("loss", "score_centering", "top_mass_sampling", "top_mass_new"):
        value = expected.loss if name == "loss" else expected.metrics[name]
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-9), name
    torch.testing.assert_close(
        [p.grad for p in module.parameters()], gradient, rtol=1e-5, atol=1e-8
    )


def rows_with(**changes: object) -> list[dict]:
    """Return three rows of tokens with the likeliest ones of a sampler. changes: of the second."""
    rows = []
    for number in range(3):
        row = good_row(number)
        ids = [[], None] + [[token, 99 if token < 50 else 1] for token in row["token_ids"][2:]]
        top = [[], None] + [[old, -9.0] for old in row["old_log_probs"][2:]]
        row |= {"sampling_top_ids": ids, "sampling_top_log_probs": top}
        rows.append({**row, **(changes if number == 1 else {})})
    return rows


GOOD = rows_with()[1]


def changed(name: str, place: int, value: object) -> dict[str, object]:
    return {name: [*GOOD[name][:place], value, *GOOD[name][place + 1 :]]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (changed("sampling_top_ids", 2, [100, 9]), r"has \[100, 9\] at position 2"),
        (changed("sampling_top_ids", 2, [9, 9]), "has a token twice at position 2"),
        (changed("sampling_top_ids", 3, []), "has no token at position 3, which is trained"),
        (changed("sampling_top_ids", 3, "text"), "needs a list of integers for every token"),
        ({"sampling_top_ids": [[1]]}, "has 1 entries and token_ids has 5"),
        ({"sampling_top_ids": ...}, "is missing"),
        (changed("sampling_top_log_probs", 2, [-1.0]), "gives the token at position 2 -1, and"),
        (changed("sampling_top_log_probs", 2, [0.5, -9.0]), "a log-prob is at most 0"),
        (changed("sampling_top_log_probs", 2, [None, -9.0]), r"has \[nan, .*at most 0"),
        (
            changed("sampling_top_log_probs", 3, [-1.25, -0.1]),
            "at position 3 that add up to 1.191, more than 1",
        ),
        (
            {"sampling_log_probs": [0, 0, -1.25, -1.5, -1.625]},
            r"sampling_log_probs are others \(-1.25 and -1.375 at position 2\)",
        ),
    ],
)
def test_rows_whose_likeliest_tokens_cannot_be_right_are_refused(tmp_path, changes, reason):
    rows = [
        {name: value for name, value in row.items() if value is not ...}
        for row in rows_with(**changes)
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=f"rows.jsonl:2:sampling_top[^:]*: .*{reason}"):
        recorded_rollouts(path, needs=TOP_VECTORS)


def test_rows_are_read_as_wide_as_their_widest_and_only_where_they_are_needed(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", rows_with(**changed("sampling_top_ids", 2, [9])))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["sampling_top_ids"][2] = [rows[1]["token_ids"][2], 1]
    rows[1]["sampling_top_log_probs"][2] = [rows[1]["old_log_probs"][2], None]
    rows[1]["sampling_top_log_probs"][2][1] = -8.0
    rows[1]["sampling_top_ids"][3] = rows[1]["sampling_top_ids"][3][:1]
    rows[1]["sampling_top_log_probs"][3] = rows[1]["sampling_top_log_probs"][3][:1]
    write_jsonl(path, rows)
    document = recorded_rollouts(path, needs=TOP_VECTORS).document(1)
    tokens = rows[1]["token_ids"]
    assert document.sampling_top_ids.tolist()[:2] == [[tokens[2], 1], [tokens[3], -1]]
    assert document.sampling_top_log_probs[1, 1] == -torch.inf
    assert recorded_rollouts(path).document(1).sampling_top_ids is None


def test_a_state_with_the_likeliest_tokens_is_loaded_to_the_bit(tmp_path):
    """Documents, and completions that are not scored yet."""
    _, loader = module_and_loader(*settings(*CENTERED))
    next(iter(loader))
    state = loader.source.state_dict()
    expect(state, STATE)
    assert state["documents"][0]["sampling_top_ids"].dtype == torch.int32
    _, again = module_and_loader(*settings(*CENTERED))
    again.source.load_state_dict(state)
    assert_equal(again.source.state_dict(), state)


def test_the_turns_of_a_conversation_keep_theirs():
    prompt = Prompt("1", "1", 0, "here", messages=())
    conversation = Conversation(prompt, None, [])
    turns = []
    for turn in range(2):
        ids = torch.full((2, 3), turn, dtype=torch.int32)
        turns.append(
            Completion(
                torch.tensor([1, 2]), torch.zeros(2), "stop", 0, top_ids=ids, top_log_probs=-ids / 1
            )
        )
        conversation.add_turn(turns[-1], "text")
        conversation.add([7], False, {"role": "user", "content": "on"})
    completion = as_completion(conversation)
    assert torch.equal(completion.top_ids, torch.cat([turn.top_ids for turn in turns]))
    assert torch.equal(completion.top_log_probs, torch.cat([turn.top_log_probs for turn in turns]))
