"""pgtk convert: dumps of other trainers as one Parquet file of recorded rollouts."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pgtoolkit.batch import Document
from pgtoolkit.dumps import alignment
from pgtoolkit.dumps.alignment import Comparison, SamplingPolicy
from pgtoolkit.dumps.systems import Dropped, System, Unusable, branches
from pgtoolkit.errors import ConfigError, DataError, StorageError
from pgtoolkit.rollouts.recording import write_parquet
from pgtoolkit.rollouts.rows import Row, Rules, parse_row
from pgtoolkit.system.plain_files import replacing
from pgtoolkit.system.report import plural, refusal
from pgtoolkit.tasks.row_files import Problems, in_order

_ASKED_DOCUMENTS = 8
"""Documents that a model is asked about."""


@dataclass
class Conversion:
    """What became of a dump.

    dropped: reason -> documents. notes: sentence -> how many documents it is true of. fields: of every row. groups:
    group -> documents. trajectories: how many attempts are named. sample: the first documents. proofs: what tells that
    log-probs stand at their own tokens.
    """

    files: int
    documents: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    fields: frozenset[str] = frozenset()
    groups: Counter[int] = field(default_factory=Counter)
    trajectories: int = 0
    sample: list[Document] = field(default_factory=list)
    proofs: list[str] = field(default_factory=list)

    def count(self, row: Row) -> None:
        """Raises DataError where a row does not know the same as those before it."""
        fields = frozenset(name for name, value in vars(row).items() if value is not None)
        self.fields = self.fields or fields
        if fields != self.fields:
            raise DataError(
                f"{row.id} needs the fields of the first document (got {', '.join(sorted(fields ^ self.fields))} "
                "in one of them alone). A file of recorded rollouts has a column for all or for none. Convert "
                "different kinds of dumps one by one."
            )
        if self.documents == 0 or self.tokens + len(row.token_ids) <= alignment.COMPARED_TOKENS:
            self.sample.append(row.document(None if row.advantage is not None else 0.0, row.group_id or 0, row.id))
        self.documents += 1
        self.tokens += len(row.token_ids)

    def reasons(self) -> list[str]:
        """Why documents were dropped."""
        return [f"{plural(count, 'document')}: {reason}" for reason, count in self.dropped.items()]


def policy_of(path: str, overrides: list[str]) -> SamplingPolicy:
    """The model of the overrides; ConfigError for one that cannot have sampled, and for keys of other things."""
    config = alignment.configured(path, overrides)
    others = [one for one in overrides if not one.startswith(("model", "rollout.temperature=", "trainer.device="))]
    if others or config.model.name != "huggingface":
        needs, got = "a model folder and the temperature it sampled at", ", ".join(others) or "model=tiny"
        reason = "They prove that log-probs stand at their tokens; nothing is trained."
        raise ConfigError(refusal("pgtk convert", needs, got, reason, "model=huggingface model.path=FOLDER"))
    return SamplingPolicy(config)


def convert(system: System, path: str, out: Path, reward_key: str | None, policy: SamplingPolicy | None) -> Conversion:
    """Write `out`, whole or not at all; raises DataError for what cannot be used, or whose log-probs are misplaced."""
    files = _files(path, system)
    conversion = Conversion(len(files))
    try:
        with replacing(out) as file:
            write_parquet(file, _rows(system, files, reward_key, conversion))
            _check_alignment(conversion, policy)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror or error}") from error
    return conversion


def _files(path: str, system: System) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_dir():
        files = [file for file in place.rglob(system.files) if file.is_file()]
        got = f"a folder with none of them; it has {', '.join(sorted(os.listdir(place))[:8]) or 'nothing'}"
    else:
        files, got = [place] if place.is_file() else [], "no such file or folder"
    if not files:
        raise DataError(refusal(f"PATH={path}", f"files {system.files}", got, "They are the dump.", "their folder"))
    return in_order(files)


def _records(file: Path) -> Iterator[tuple[str, dict]]:
    """(place, record) of each record of a file: of torch, or JSONL with an object or an array of objects per line."""
    if file.suffix == ".pt":
        yield from ((str(number), sample) for number, sample in enumerate(_pickled(file)))
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line) if line.strip() else []
            except ValueError as error:
                raise DataError(f"{file}:{number}: not JSON: {error}") from error
            if isinstance(record, list):
                # The texts of a line are a group, however they name it: numbers begin anew when a run is resumed.
                yield from ((f"{number}[{place}]", text | {"line": number}) for place, text in enumerate(record))
            else:
                yield from ((str(number), branch) for branch in branches(record))


def _pickled(file: Path) -> list[dict]:
    """The samples of one of slime's files, which are read whole, one rollout each; nothing in them is run."""
    try:
        payload = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        got = next((line for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), str(error))
        raise DataError(
            f"{file} needs plain numbers, texts, lists and tensors (got more: {got.strip()[:200]}). Loading it would "
            "run code from the file. Where you trust it, save its samples again with slime, without their metadata."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise DataError(f"{file} is not a complete file of torch.save: {error}. Copy it again.") from error
    if not isinstance(payload, dict) or not isinstance(payload.get("samples"), list):
        # miles' training data has a file per rank, and ranks that share a model hold the same samples.
        raise DataError(f"{file} needs a list of samples (got none). Use a file of --save-debug-rollout-data.")
    return payload["samples"]


def _rows(system: System, files: list[Path], reward_key: str | None, conversion: Conversion) -> Iterator[Row]:
    problems, rules = Problems("the dump cannot be converted"), Rules(alignment.ANY_TOKEN, ("old_log_probs",))
    common = os.path.commonpath([file.parent for file in files])
    numbers, trajectories, ids = {}, {}, set()
    for file in files:
        if system.marker and not (file.parent / system.marker).exists():
            raise DataError(
                f"{file} needs the file {system.marker} beside it (got none). It is written when the step's export is "
                "complete. Wait for it, or convert the other steps."
            )
        last_prompt, run = None, 0
        for place, record in _records(file):
            label = f"{os.path.relpath(file, common)}:{place}"
            try:
                prepared = system.prepare(record, conversion.notes)
                raw = {ours: prepared.get(theirs) for ours, theirs in system.columns.items()}
                if isinstance(reward := raw.get("reward"), dict):
                    if reward_key not in reward:
                        raise Unusable(f"has several rewards ({', '.join(map(str, reward))}). Use --reward-key KEY")
                    raw["reward"] = reward[reward_key]
            except Dropped as reason:
                conversion.dropped[str(reason)] += 1
                continue
            except Unusable as reason:
                problems.add(label, str(reason))
                continue
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                fields = (", ".join(record) if isinstance(record, dict) else type(record).__name__)[:200]
                reason = f"is not a record of this system ({type(error).__name__}: {error}); its fields are {fields}"
                problems.add(label, reason)
                continue
            group = raw.get("group_id")
            attempt = raw.get("trajectory")
            if group is None and (prompt := prepared.get("prompt")) is not None:
                if (file, run, attempt) not in trajectories:
                    run, last_prompt = run + (prompt != last_prompt), prompt
                group = run
            if group is not None:
                raw["group_id"] = numbers.setdefault((file, group), len(numbers))
                conversion.groups[raw["group_id"]] += 1
            if attempt is not None:
                raw["trajectory"] = trajectories.setdefault((file, group, attempt), len(trajectories))
                conversion.trajectories = len(trajectories)
            row = parse_row(raw | {"id": raw.get("id", label)}, rules)
            if isinstance(row, list):
                for name, reason in row:
                    problems.add(f"{label}:{name}", reason)
                continue
            if row.id in ids:
                problems.add(label, f"is step and sample {row.id} again: a run that was resumed; remove the first ones")
            ids.add(row.id)
            conversion.count(row)
            yield row
    problems.raise_if_any()
    if not conversion.documents:
        raise DataError(f"nothing can be converted: {'; '.join(conversion.reasons()) or 'there are no documents'}")


def _check_alignment(conversion: Conversion, policy: SamplingPolicy | None) -> None:
    """Prove that log-probs are those of their own tokens, or raise DataError where they are not."""
    proofs, documents = conversion.proofs, [one for one in conversion.sample if one.num_trained]
    if pairs := [pair for pair in map(alignment.recorded_pair, documents) if pair]:
        comparison = Comparison(pairs)
        _refuse_misplaced("sampling_log_probs beside old_log_probs", comparison)
        proofs.append(f"sampling_log_probs stand at the tokens of old_log_probs {comparison}")
    if policy is None:
        proofs.append("not compared with the policy that sampled: add model=huggingface model.path=FOLDER")
        return
    most = policy.max_positions
    short = [one for one in documents if one.num_tokens <= most][:_ASKED_DOCUMENTS]
    if not short:
        proofs.append(f"not compared with the model: every document is longer than its {most} positions")
    for name, _, comparison in policy.compare(short):
        _refuse_misplaced(name, comparison)
        fits = f"{name} {'are' if comparison.fits else 'are not'} the model's {comparison}"
        proofs.append(f"{fits}; they differ by {comparison.size:.2g} a token")


def _refuse_misplaced(names: str, comparison: Comparison) -> None:
    if comparison.whose:
        raise DataError(
            f"{names} needs the log-prob of each token itself (got that {comparison.whose} {comparison}). Every ratio "
            "would compare two different tokens. Nothing was written. Move the log-probs by one place in the dump's "
            "writer."
        )


def render(conversion: Conversion, name: str, system: System, out: Path) -> str:
    """What `pgtk convert` prints."""
    groups, sizes = len(conversion.groups), Counter(conversion.groups.values())
    of_groups = f" of {plural(groups, 'group')}" if groups else ", without groups"
    of_groups += f", {plural(conversion.trajectories, 'trajectory')}" if conversion.trajectories else ""
    documents, files = plural(conversion.documents, "document"), plural(conversion.files, "file")
    lines = [f"{out}: {documents}{of_groups}, {plural(conversion.tokens, 'token')}, from {files} of {name}"]
    lines += [f"  dropped   {sentence}" for sentence in conversion.reasons() or ["nothing"]]
    lines += [f"  note      {plural(count, 'document')} {sentence}" for sentence, count in conversion.notes.items()]
    if groups:
        several = ", ".join(f"{count} of {size}" for size, count in sorted(sizes.items()))
        lines.append(f"  groups    {several if len(sizes) <= 6 else f'of {min(sizes)} to {max(sizes)}'} documents")
    columns = {"reward": "the dump has none", "group_id": "documents in a row with the same prompt"} | system.columns
    for ours, theirs in columns.items():
        if ours in conversion.fields or ours in ("reward", "group_id"):
            known = theirs if ours in conversion.fields else "the dump has none"
            lines.append(f"  column    {ours}: {known}")
    return "\n".join([*lines, *(f"  proof     {proof}" for proof in conversion.proofs)])


def next_commands(fields: Sequence[str], path: str) -> list[str]:
    """The commands that come next."""
    estimator = "" if "reward" in fields and "group_id" in fields else " advantage=given"
    more = f"{path}{estimator} model=huggingface model.path=FOLDER"
    return [f"pgtk doctor {more}", f"pgtk rollout=recorded rollout.path={more}"]
