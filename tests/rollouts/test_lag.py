"""`rollout.lag`: each batch is of the weights of so many updates before the step that begins it."""

import json

import pytest
from builders.ages import BATCH, CUTS, assert_of_their_versions, cut, trained
from builders.runs import SHORT, assert_equal, built, checkpoint_of, copy_as_of, metrics_of, run

from pgtoolkit.config.schedule import steps_before, steps_of
from pgtoolkit.config.schema import AccumulationConfig, LastStep
from pgtoolkit.rollouts.steps import StepLoader


@pytest.mark.parametrize(
    ("lag", "how", "old"),
    [
        *((0, CUTS[0], "training"), (1, CUTS[1], "sampling"), (3, CUTS[0], "training")),
        *((5, how, old) for how, old in zip(CUTS[2:], ("sampling", "training") * 2, strict=True)),
    ],
)
def test_a_batch_is_of_the_weights_of_so_many_updates_ago(lag, how, old):
    """Sampled with them, and with their log-probs as old ones; of the first weights while there are no others."""
    count = {16: 7, 12: 9, 40: 7}.get(how[0], 11)  # fewer of the large steps
    found = trained(count, f"rollout.lag={lag}", f"rollout.old_log_probs={old}", "loss=grpo", *cut(*how))
    assert_of_their_versions(*found, lambda first: max(0, first - lag))


def test_ages_of_a_lag():
    """Two steps per batch; the numbers in full."""
    ages = {lag: [m["staleness"] for _, m in trained(8, f"rollout.lag={lag}")[2]] for lag in (0, 1, 2, 3)}
    assert ages == {
        0: [0, 1, 0, 1, 0, 1, 0, 1],
        1: [0, 1, 1, 2, 1, 2, 1, 2],
        2: [0, 1, 2, 3, 2, 3, 2, 3],
        3: [0, 1, 2, 3, 3, 4, 3, 4],
    }


class Begun:
    """An endless source of batches; notes at which step each of them, and each step, begins."""

    num_documents = None

    def __init__(self):
        self.positions, self.batches = [], {}

    def before_step(self, position):
        self.positions.append(position)

    def document(self, position):
        self.batches.setdefault(position // BATCH, len(self.positions) - 1)
        return None

    def batch_end(self, position):
        return (position // BATCH + 1) * BATCH


@pytest.mark.parametrize("last", ["short", "drop", "carry"])
@pytest.mark.parametrize("docs", [1, 3, 5, 8, 15, 16, 17, 40])
def test_when_a_batch_begins_is_known_ahead(docs, last):
    if last == "drop" and docs > BATCH:
        return
    accumulation, source = AccumulationConfig(docs, 8, None, LastStep(last)), Begun()
    loader = StepLoader(source, accumulation, False, 99)
    for _ in range(40):
        loader._take()
    assert len(source.batches) > 2
    for now, position in enumerate(source.positions):
        for batch, first in source.batches.items():
            if batch > position // BATCH:
                assert steps_before(batch, position, BATCH, accumulation) == first - now
    if last != "carry":
        assert source.batches[2] == 2 * steps_of(BATCH, accumulation)


def test_a_step_without_an_update_makes_what_was_sampled_before_it_less_old():
    module, loader = built(*SHORT, "rollout.lag=3")
    ages = []
    for number, step in enumerate(loader):
        if number == 2:  # as if its loss had not been finite
            module.num_skipped_steps += 1
        else:
            ages.append(module.training_step(step, number)["metrics"]["staleness"])
    assert ages == [0, 1, 2, 2, 3]


AHEAD = {
    "lag": ["rollout.lag=5", *cut(5, "short")],
    "carry": ["rollout.lag=3", *cut(12, "carry")],
    "overlap": ["rollout.max_staleness=5", "rollout.old_log_probs=sampling", *cut(5, "short")],
    "drop": ["rollout.max_staleness=5", "rollout.old_log_probs=sampling", *cut(5, "drop")],
}


@pytest.mark.parametrize(
    "chosen", ["lag", "overlap", *(pytest.param(name, marks=pytest.mark.slow) for name in ("carry", "drop"))]
)
def test_a_run_continues_bit_for_bit_from_every_step(tmp_path, chosen):
    overrides = [*AHEAD[chosen], "trainer.max_steps=9"]
    whole = run(tmp_path / "whole", *overrides)
    for step in range(1, 9, 1 if chosen in ("lag", "overlap") else 2):
        resumed = copy_as_of(whole, step, tmp_path / f"after {step}")
        run(resumed, *overrides, "trainer.checkpoint_every=9", resume=True)
        assert metrics_of(resumed) == metrics_of(whole)
        assert_equal(checkpoint_of(resumed, 9), checkpoint_of(whole, 9))


def test_batches_are_recorded_once_they_are_used_with_the_version_that_wrote_them(tmp_path):
    saved = tmp_path / "saved.jsonl"
    run(tmp_path / "run", "rollout.lag=3", f"rollout.save_path={saved}", "trainer.max_steps=7")
    versions = {}
    for path in sorted(saved.iterdir()):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == BATCH
        (versions[path.name],) = {row["model_version"] for row in rows}
    assert versions == {f"batch-00000{number}.jsonl": version for number, version in enumerate([0, 0, 1, 3])}
