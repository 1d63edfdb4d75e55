"""pgtk convert: dumps of other trainers as one Parquet file of recorded rollouts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from pgtoolkit.batch import Document
from pgtoolkit.dumps.alignment import LOG_PROBS, OWN, WHOSE, Branches, Judge, Judged
from pgtoolkit.dumps.configuration import configured
from pgtoolkit.dumps.records import Converted, Unusable
from pgtoolkit.dumps.systems import REFUSED, SYSTEMS, System
from pgtoolkit.errors import ConfigError, DataError, StorageError
from pgtoolkit.rollouts.rows import Row, Rules, parse_row
from pgtoolkit.rollouts.writer import write_parquet
from pgtoolkit.system.plain_files import replacing
from pgtoolkit.system.report import plural, refusal
from pgtoolkit.tasks.row_files import Problems, in_order

ANY_TOKEN = 2**31 - 1
_SAMPLE_TOKENS, _JUDGED = 2**17, 8
"""The documents that alignment is told from: so many tokens, and documents that a model is asked of."""


def system_of(name: str) -> System:
    """Raises ConfigError for a system whose dumps cannot be replayed, or that is not known."""
    if name in REFUSED:
        what, use = REFUSED[name]
        needs, reason = "dumps with token ids and log-probs", "A text tokenized again need not give its tokens."
        raise ConfigError(refusal(name, needs, what, f"The loss needs the log-prob of every token. {reason}", use))
    if name not in SYSTEMS:
        known = ", ".join(SYSTEMS)
        reason = "Any other dump becomes rows of docs/data.md by a script of yours."
        raise ConfigError(refusal("SYSTEM", f"one of {known}", name, reason, "one of these"))
    return SYSTEMS[name]


def judge_of(path: str, overrides: list[str]) -> Judge:
    """The model of the overrides; ConfigError for one that is none that sampled, and for keys of other things."""
    config = configured(path, overrides)
    others = [one for one in overrides if not one.startswith(("model", "rollout.temperature=", "trainer.device="))]
    if others or config.model.name != "huggingface":
        needs, got = "a model folder and the temperature it sampled at", ", ".join(others) or "model=tiny"
        reason = "They prove that log-probs stand at their tokens; nothing is trained."
        raise ConfigError(refusal("pgtk convert", needs, got, reason, "model=huggingface model.path=FOLDER"))
    return Judge(config)


def convert(system: System, path: str, out: Path, reward_key: str | None, judge: Judge | None) -> Converted:
    """Write `out`, whole or not at all; raises DataError for what cannot be used, or whose log-probs are misplaced."""
    files = _files(path, system)
    found = Converted(reward_key, len(files))
    try:
        with replacing(out) as file:
            write_parquet(file, _counted(_rows(system, files, found), found))
            _check(found, judge)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error.strerror or error}") from error
    return found


def _files(path: str, system: System) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_dir():
        files = [file for file in place.rglob(system.names) if file.is_file()]
        got = f"a folder with none of them; it has {', '.join(sorted(os.listdir(place))[:8]) or 'nothing'}"
    else:
        files, got = [place] if place.is_file() else [], "no such file or folder"
    if not files:
        raise DataError(refusal(f"PATH={path}", f"files {system.names}", got, "They are the dump.", "their folder"))
    return in_order(files)


def _rows(system: System, files: list[Path], found: Converted) -> Iterator[Row]:
    problems, rules = Problems("the dump cannot be converted"), Rules(ANY_TOKEN, ("old_log_probs",))
    common, numbers, sizes, ids = os.path.commonpath([file.parent for file in files]), {}, Counter(), set()
    for file in files:
        last, run = None, 0  # equal prompts that follow each other
        for place, record in system.read(file):
            label = f"{os.path.relpath(file, common)}:{place}"
            try:
                raw = system.row(record, found)
            except Unusable as reason:
                problems.add(label, str(reason))
                continue
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                what = f"{type(error).__name__}: {error}"
                problems.add(label, f"is no record of this system ({what}); its fields are {fields[:200]}")
                continue
            if raw is None:
                continue
            key, prompt_length = raw.pop("group_id", None), raw.pop("prompt_length", None)
            if key is None and prompt_length is not None:
                prompt = raw["token_ids"][:prompt_length]
                run, last = run + (prompt != last), prompt
                key = run
            if key is not None:
                raw["group_id"] = numbers.setdefault((str(file), key), len(numbers))
                sizes[raw["group_id"]] += 1
            row = parse_row(raw | {"id": raw.get("id", label)}, rules)
            if isinstance(row, list):
                for name, reason in row:
                    problems.add(f"{label}:{name}", reason)
                continue
            if row.id in ids:
                problems.add(label, f"is step and sample {row.id} again: a run that was resumed; remove the first ones")
            ids.add(row.id)
            yield row
    problems.raise_if_any()
    found.groups = Counter(sizes.values())


def _counted(rows: Iterator[Row], found: Converted) -> Iterator[Row]:
    """The rows, counted; raises DataError where they do not all know the same."""
    for row in rows:
        fields = frozenset(name for name, value in vars(row).items() if value is not None)
        found.fields = found.fields or fields
        if fields != found.fields:
            raise DataError(
                f"{row.id} needs the fields of the first document (got {', '.join(sorted(fields ^ found.fields))} in "
                "one of them alone). A file of recorded rollouts has a column for all or for none. Convert different "
                "kinds of dumps one by one."
            )
        if found.documents == 0 or found.tokens + len(row.token_ids) <= _SAMPLE_TOKENS:
            advantage = None if row.advantage is not None else 0.0
            found.sample.append(row.document(advantage, row.group_id or 0, row.id))
        found.documents += 1
        found.tokens += len(row.token_ids)
        yield row
    if not found.documents:
        raise DataError(f"nothing can be converted: {'; '.join(_dropped(found)) or 'there are no documents'}")


def _dropped(found: Converted) -> list[str]:
    return [f"{plural(count, 'document')}: {reason}" for reason, count in found.dropped.items()]


def _check(found: Converted, judge: Judge | None) -> None:
    """Prove that log-probs are those of their own tokens, or raise DataError where they are not."""
    in_groups = sorted(found.sample, key=attrgetter("group"))
    for name in sorted(found.fields & set(LOG_PROBS)):
        branches = Branches(name)
        for _, group in groupby(in_groups, attrgetter("group")):
            branches.add(list(group))
        _refuse_misplaced(name, branches.shift, f"told from {len(branches.shared)} places where documents part")
        if branches.shift == OWN:
            found.proofs.append(f"{name} stand at their own tokens: {branches.evidence}")
        elif judge is None:
            found.proofs.append(
                f"{name}: nothing tells yet whether they stand at their own tokens ({len(branches.shared)} places "
                "where documents of a prompt part). Add model=huggingface model.path=FOLDER of the policy that sampled"
            )
        if judge is not None:
            found.proofs.append(_by_model(name, found.sample, judge))


def _by_model(name: str, sample: list[Document], judge: Judge) -> str:
    documents = [one for one in sample if one.num_trained and one.num_tokens <= judge.max_positions][:_JUDGED]
    if not documents:
        return f"{name}: no document of at most {judge.max_positions} tokens for the model to judge"
    for document in documents:
        if int(document.tokens.max()) >= judge.vocabulary_size:
            raise DataError(
                f"{document.name} needs token ids of the model's vocabulary, below {judge.vocabulary_size} (got "
                f"{int(document.tokens.max())}). Another model wrote it. Use model.path of the policy that sampled."
            )
    judged = Judged(name, judge, documents)
    _refuse_misplaced(name, judged.shifts.shift, f"correlations with the model at places {judged.shifts}")
    _, what, advice = judged.verdict
    return f"{what} They differ from its own by {judged.size:.2g} on average. {advice}".rstrip()


def _refuse_misplaced(name: str, shift: int | None, evidence: str) -> None:
    if shift in WHOSE:
        raise DataError(
            f"{name} needs the log-prob of each token itself (got that {WHOSE[shift]}; {evidence}). Every ratio would "
            "compare two different tokens. Nothing was written. Move the log-probs by one place in the dump's writer."
        )


def page(found: Converted, name: str, system: System, out: Path) -> str:
    """What `pgtk convert` prints."""
    groups, sizes = sum(found.groups.values()), found.groups
    of = f" of {plural(groups, 'group')}" if groups else ", without groups"
    documents, files = plural(found.documents, "document"), plural(found.files, "file")
    lines = [f"{out}: {documents}{of}, {plural(found.tokens, 'token')}, from {files} of {name}"]
    lines += [f"  dropped   {sentence}" for sentence in _dropped(found) or ["nothing"]]
    lines += [f"  note      {plural(count, 'document')} {sentence}" for sentence, count in found.notes.items()]
    if groups:
        several = ", ".join(f"{count} of {size}" for size, count in sorted(sizes.items()))
        lines.append(f"  groups    {several if len(sizes) <= 6 else f'of {min(sizes)} to {max(sizes)}'} documents")
    known = {*found.fields, "reward", "group_id"}  # also that the dump has none
    lines += [f"  column    {column}: {source}" for column, source in system.columns.items() if column in known]
    lines += [f"  proof     {proof}" for proof in found.proofs]
    return "\n".join(lines)


def following(fields: frozenset[str], path: str) -> list[str]:
    """The commands that come next."""
    estimator = "" if "reward" in fields and "group_id" in fields else " advantage=given"
    model = "model=huggingface model.path=FOLDER"
    return [
        f"pgtk doctor {path}{estimator} {model}",
        f"pgtk rollout=recorded rollout.path={path}{estimator} {model}",
    ]
