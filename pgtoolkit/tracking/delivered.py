"""Which rows of a run an MLflow run holds already, and whether they are the same."""

from __future__ import annotations

from collections.abc import Iterable

TELLING = ("loss", "documents_seen")
"""The metrics by which a row is told from another of its step: its loss, and where it has none, what it has seen. One
or two calls fetch them for the whole run, and a row arrives whole, in one transaction."""

SUPERSEDED = "superseded_by"
"""Tag of an MLflow run whose values are no longer the run's: the number of the one that has them."""


class Delivered:
    """The steps whose row is in the store, each with the values of TELLING."""

    def __init__(self, steps: Iterable[int] = ()):
        self._values: dict[int, dict[str, set[float]]] = {step: {} for step in steps}

    @classmethod
    def metrics(cls, client, run) -> Delivered:
        """Of the run's own metrics."""
        delivered = cls()
        for name in TELLING:
            if name in run.data.metrics:
                for point in client.get_metric_history(run.info.run_id, name):
                    delivered._values.setdefault(point.step, {}).setdefault(name, set()).add(point.value)
        return delivered

    @classmethod
    def of_system(cls, run) -> Delivered:
        """Of the machine's load, whose rows are counted and never written anew: the last says which are there."""
        last = max((m.step for m in run.data.to_proto().metrics if m.key.startswith("system/")), default=-1)
        return cls(range(last + 1))

    def __contains__(self, step: int) -> bool:
        return step in self._values

    def differing(self, rows: list[dict]) -> list[int]:
        """The steps of the rows that the store has with other values."""
        return [row["step"] for row in rows if row["step"] in self and self._differs(row)]

    def _differs(self, row: dict) -> bool:
        there = self._values[row["step"]]
        return any(there.get(name, set()) != ({row[name]} if name in row else set()) for name in TELLING)


def in_words(steps: list[int]) -> str:
    """The steps, of which there may be very many."""
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, the first of them {steps[0]}"
