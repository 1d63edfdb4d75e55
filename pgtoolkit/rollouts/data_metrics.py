"""What the documents of a step tell without the model: rewards, lengths, groups without a signal."""

from __future__ import annotations

from collections.abc import Iterable

from pgtoolkit.batch import Document


def data_metrics(documents: list[Document], num_updates: int) -> dict[str, float]:
    """Means over the documents of one step; a metric that the data does not know is left out.

    staleness is the number of optimizer updates between the policy that generated a document and the one in training.
    """
    columns = {
        "reward": [d.reward for d in documents],
        "exact_match": [d.exact_match for d in documents],
        "truncated_fraction": [d.truncated for d in documents],
        # Subtracted as integers: counters near 2**24 would not survive a cast to float32 first.
        "staleness": [None if d.model_version is None else num_updates - d.model_version for d in documents],
        "completion_length": [d.num_trained for d in documents],
        "zero_advantage_group_fraction": _groups_without_signal(documents),
    }
    return {name: sum(known) / len(known) for name, values in columns.items() if (known := _known(values))}


def _groups_without_signal(documents: list[Document]) -> Iterable[bool]:
    silent: dict[int, bool] = {}
    for document in documents:
        has_signal = bool((document.advantages[document.loss_mask] != 0).any())
        silent[document.group] = silent.get(document.group, True) and not has_signal
    return silent.values()


def _known(values: Iterable) -> list[float]:
    return [float(value) for value in values if value is not None]
