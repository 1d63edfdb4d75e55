"""The tokens that truncated sampling has kept: as they are sampled, recorded, kept in a checkpoint,
and taken for log-probs in training."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from builders.rollout_rows import good_row, recorded_rollouts, write_jsonl
from builders.runs import assert_equal, module_and_loader
from keys.small_runs import logits_of, settings, specified

from pgtoolkit.batch import pack, pack_sampled
from pgtoolkit.document import TOP_VECTORS, Document
from pgtoolkit.errors import DataError
from pgtoolkit.model.attention import local_tokens
from pgtoolkit.rollouts.group_rollouts import kept_ids
from pgtoolkit.rollouts.recording import write_batch
from pgtoolkit.rollouts.saved_batches import STATE
from pgtoolkit.runs.records import expect
from pgtoolkit.sampling.generation_settings import processors
from pgtoolkit.training.module import PolicyGradientModule

TEMPERATURE = 0.7
SIZES = {"sequence_data_parallel": 2, "tensor_parallel": 1}
COMMON = (f"rollout.temperature={TEMPERATURE}", "rollout.old_log_probs=sampling")
TRUNCATED = (*COMMON, "rollout.top_p=0.75", "rollout.top_k=8")


def moved(module: PolicyGradientModule) -> PolicyGradientModule:
    """Make the distributions of a tiny model at its start less even."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(25 if weight.ndim > 1 else 1)
    return module


def sampled(*overrides: str) -> tuple[PolicyGradientModule, list[Document]]:
    module, loader = module_and_loader(*settings(*overrides))
    moved(module)
    return module, next(iter(loader)).documents


def kept_by_loops(logits: list[float], top_k: int | None, top_p: float | None) -> dict[int, float]:
    """Return the log-probs of the tokens that are kept: the likeliest top_k, then of these the
    likeliest until they have top_p of the probability."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))[:top_k]
    weights = {v: math.exp((logits[v] - logits[order[0]]) / TEMPERATURE) for v in order}
    total = math.fsum(weights.values())
    kept = []
    mass = 0.0
    for v in order:
        if mass >= (top_p or 1) * total:
            break
        kept.append(v)
        mass += weights[v]
    return {v: math.log(weights[v] / mass) for v in kept}


@pytest.mark.parametrize("static", ["true", "false"])
@pytest.mark.parametrize(("top_k", "top_p"), [(8, 0.75), (3, None), (None, 0.6)])
def test_the_kept_tokens_are_those_of_the_logits(static, top_k, top_p):
    """What is drawn stays the same whether or not they are recorded, to the bit; the first ratios
    are 1, with the sampler's log-probs as with the trainer's."""
    common = (
        *COMMON[:1],
        f"rollout.top_p={'null' if top_p is None else top_p}",
        f"rollout.top_k={'null' if top_k is None else top_k}",
        f"sampler.static_cache={static}",
    )
    module, documents = sampled(*common, "rollout.old_log_probs=sampling")
    _, plain = sampled(*common, "sampler.keep_top=0")
    sizes = set()
    for document, other in zip(documents, plain, strict=True):
        assert torch.equal(document.tokens, other.tokens)
        assert torch.equal(document.old_log_probs, other.sampling_log_probs)
        assert other.sampling_kept_ids is None
        assert document.sampling_top_ids is None
        predicting = document.loss_mask.nonzero()[:, 0] - 1
        drawn = document.tokens[document.loss_mask].tolist()
        for place, row in enumerate(logits_of(module, document)[predicting].tolist()):
            kept = kept_by_loops(row, top_k, top_p)
            ids = [v for v in document.sampling_kept_ids[place].tolist() if v >= 0]
            assert sorted(ids) == sorted(kept)
            sizes.add(len(kept))
            assert document.old_log_probs[place].item() == pytest.approx(
                kept[drawn[place]], abs=1e-5
            )
    assert sizes == {3} if top_p is None else len(sizes) > 2


@pytest.mark.parametrize(
    ("anchor", "overrides"),
    [
        ("training", ("rollout.passes=2",)),
        ("sampling", ("kl=k3", "kl.reference=initial", "kl.coefficient=0.1")),
        ("sampling", ("kl=k3", "kl.place=reward", "kl.reference=initial")),
        ("proximal", ("correction=token_mask", "entropy.coefficient=0.1")),
        ("sampling", ("loss=tpo", "advantage=none")),
        ("sampling", ("loss=gspo", "entropy.top_fraction=0.5", "kernel=torch")),
    ],
)
def test_the_first_ratio_is_one(anchor, overrides):
    """Whichever log-probs are the old ones, and beside what else reads log-probs: a reference that
    is the policy is at a distance of 0."""
    replaced = (*TRUNCATED, f"rollout.old_log_probs={anchor}", *overrides)
    module, loader = module_and_loader(*settings(*replaced))
    moved(module)
    if module.reference is not None:
        module.reference.model.load_state_dict(module.policy.model.state_dict())
    metrics = module.training_step(next(iter(loader)), 0)["metrics"]
    for name in {"kl_ref", "kl_reward"} & metrics.keys():
        assert abs(metrics[name]) < 1e-6
    if "kl=k3" in overrides:
        assert {"kl_ref", "kl_reward"} & metrics.keys()
    assert metrics["max_ratio_new_old"] == pytest.approx(1, abs=2e-6)
    assert metrics["min_ratio_new_old"] == pytest.approx(1, abs=2e-6)
    assert metrics["kept_set_overflow_fraction"] == 0
    if anchor != "sampling":
        assert metrics["difference_old_sampling"] < 1e-6


@pytest.mark.parametrize("kernel", ["fused_linear", "torch"])
def test_the_trainers_log_probs_are_the_samplers(kernel):
    """By a forward pass without a loss."""
    module, documents = sampled(*TRUNCATED, f"kernel={kernel}")
    micro_batch = pack_sampled(documents)
    predicting = micro_batch.labels >= 0
    expected = torch.cat([document.old_log_probs for document in documents])
    log_probs = module.log_probs(micro_batch)
    assert (log_probs[predicting] - expected).abs().max() < 1e-6
    plain = module.log_probs(replace(micro_batch, sampling_kept_ids=None))
    assert (log_probs - plain)[predicting].max() > 0.1


def test_the_shards_of_a_sequence_have_their_own_sets():
    """At the labels of each, and none at padding."""
    _, documents = sampled(*TRUNCATED)
    micro_batch = pack(documents)
    layouts = [SimpleNamespace(size=SIZES.get, rank_in=lambda _, r=rank: r) for rank in range(2)]
    pieces = [local_tokens(micro_batch, layout) for layout in layouts]
    length = len(micro_batch.labels)
    assert {len(piece.sampling_kept_ids) for piece in pieces} == {len(pieces[0].labels)}
    for name in ("labels", "sampling_kept_ids"):
        joined = torch.cat([getattr(piece, name) for piece in pieces])[:length]
        assert torch.equal(joined, getattr(micro_batch, name))


def test_top_k_keeps_the_smaller_ids_of_equal_scores():
    settings_of_k = module_and_loader(*settings("rollout.top_k=3", "sampler.keep_top=0"))
    sampler = settings_of_k[1].source.sampler
    scores = torch.tensor([[1.0, 5.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    (process,) = processors(sampler.settings)
    kept = [[v for v, x in enumerate(row) if x > -math.inf] for row in process(None, scores)]
    assert kept == [[1, 2, 3], [0, 1, 2]]


def per_position(documents: list[Document]) -> torch.Tensor:
    """Return the kept tokens at the positions that predict the trained ones, -1 elsewhere; the last
    token of a document predicts nothing."""
    rows = []
    for document in documents:
        of_trained = iter(document.sampling_kept_ids)
        unused = torch.full_like(document.sampling_kept_ids[0], -1)
        rows += [next(of_trained) if trained else unused for trained in document.loss_mask[1:]]
    return torch.stack(rows)


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_the_loss_of_recorded_rows_is_that_of_the_specification(tmp_path, loss):
    """The second step of a policy whose weights have moved, on what the first ones sampled; the
    documents are written and read again."""
    _, documents = sampled(*TRUNCATED)
    write_batch(tmp_path, 0, documents)
    recorded = [f"rollout.path={tmp_path}", "rollout=recorded", "advantage=given"]
    chosen = [f"loss={loss}", f"rollout.temperature={TEMPERATURE}", "accumulation.max_tokens=40"]
    module, steps = module_and_loader(*settings(*recorded, *chosen))
    moved(module)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.05)
    step = next(iter(steps))
    for document, other in zip(step.documents, documents, strict=True):
        assert_equal(document.sampling_kept_ids, other.sampling_kept_ids)
    expected, gradient = specified(
        module,
        step.documents,
        temperature=TEMPERATURE,
        sampling_kept_ids=per_position(step.documents),
        loss=loss,
        **vars(module.loss.family),
    )
    metrics = module.training_step(step, 0)["metrics"]
    for name in ("loss", "ratio_new_old", "max_ratio_new_old", "kl_new_old"):
        value = expected.loss if name == "loss" else expected.metrics[name]
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-8), name
    assert metrics["max_ratio_new_old"] > 1.001
    torch.testing.assert_close(
        [p.grad for p in module.parameters()], gradient, rtol=1e-5, atol=1e-8
    )


def test_a_document_with_a_larger_set_is_not_trained(tmp_path):
    """It keeps its reward and its place in every count; so also where it was recorded."""
    module, loader = module_and_loader(
        *settings(*COMMON, "rollout.top_p=0.5", "sampler.keep_top=2")
    )
    moved(module)
    step = next(iter(loader))
    overflows = [document.kept_set_overflows for document in step.documents]
    assert 0 < sum(overflows) < len(overflows)
    weights = []
    for micro_batch in step.micro_batches:
        weights += micro_batch.excluded.tolist() if micro_batch.excluded is not None else []
    assert sum(weights) == sum(overflows)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.05)
    expected, gradient = specified(
        module,
        step.documents,
        loss="grpo",
        temperature=TEMPERATURE,
        sampling_kept_ids=per_position(step.documents),
        factors=per_label([0.0 if over else 1.0 for over in overflows], step.documents),
        **vars(module.loss.family),
    )
    metrics = module.training_step(step, 0)["metrics"]
    share = sum(overflows) / len(overflows)
    assert metrics["kept_set_overflow_fraction"] == pytest.approx(share)
    assert metrics["num_documents"] == len(overflows)
    assert metrics["loss"] == pytest.approx(expected.loss, rel=1e-5, abs=1e-8)
    torch.testing.assert_close(
        [p.grad for p in module.parameters()], gradient, rtol=1e-5, atol=1e-8
    )
    write_batch(tmp_path, 0, step.documents)
    recorded = [f"rollout.path={tmp_path}", "rollout=recorded", "advantage=given"]
    _, steps = module_and_loader(*settings(*recorded, f"rollout.temperature={TEMPERATURE}"))
    again = next(iter(steps)).documents
    assert [document.kept_set_overflows for document in again] == overflows
    outlines = [steps.source.outline(place) for place in range(len(overflows))]
    assert [outline.kept_set_overflows for outline in outlines] == overflows


def per_label(values: list[float], documents: list[Document]) -> torch.Tensor:
    """Return the value of each document at all of its positions."""
    lengths = [len(document.tokens) - 1 for document in documents]
    return torch.tensor(values).repeat_interleave(torch.tensor(lengths))


def test_one_token_more_tells_that_there_may_be_others():
    likeliest = torch.tensor([[3, 1, -1], [3, 1, 5], [2, -1, -1]])
    assert kept_ids(likeliest).tolist() == [[3, 1], [-1, -1], [2, -1]]


ROW = good_row(1)
KEPT = [[], None] + [[99 if token < 50 else 1, token] for token in ROW["token_ids"][2:]]


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (2, [100, 9], r"has \[100, 9\] at position 2; the vocabulary"),
        (2, [9, 9], "has a token twice at position 2"),
        (3, [98, 97], r"has \[98, 97\] at position 3, and not the token that was sampled"),
        (3, "text", "needs a list of integers for every token"),
    ],
)
def test_rows_whose_kept_tokens_cannot_be_right_are_refused(tmp_path, place, value, reason):
    changed = [*KEPT[:place], value, *KEPT[place + 1 :]]
    rows = [good_row(0), ROW | {"sampling_kept_ids": changed}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=f"rows.jsonl:2:sampling_kept_ids: .*{reason}"):
        recorded_rollouts(path)


def test_rows_with_and_without_kept_tokens_are_trained_together(tmp_path):
    """Without them the log-prob is over the vocabulary; score centering refuses them."""
    path = write_jsonl(
        tmp_path / "rows.jsonl", [good_row(0), ROW | {"sampling_kept_ids": KEPT}, good_row(2)]
    )
    rollouts = recorded_rollouts(path)
    kept = [rollouts.document(place).sampling_kept_ids for place in range(3)]
    assert kept[0] is None
    assert kept[2] is None
    assert kept[1].tolist() == KEPT[2:]
    with pytest.raises(DataError, match="score centering needs untruncated sampling"):
        recorded_rollouts(path, needs=TOP_VECTORS)


def test_a_state_with_kept_tokens_is_loaded_to_the_bit():
    _, loader = module_and_loader(*settings(*TRUNCATED))
    next(iter(loader))
    state = loader.source.state_dict()
    expect(state, STATE)
    assert state["documents"][0]["sampling_kept_ids"].dtype == torch.int32
    _, again = module_and_loader(*settings(*TRUNCATED))
    again.source.load_state_dict(state)
    assert_equal(again.source.state_dict(), state)
