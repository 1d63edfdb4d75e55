"""Reads the files of accelerate and DeepSpeed that a run of TRL names.

What changes the numbers of a step is taken from them: how many processes train, in what number
type, and DeepSpeed's own optimizer and schedule. What transformers compares with TRL's own keys is
compared here, too: it refuses to start where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pgtoolkit.config.trainer_keys import Table, flat
from pgtoolkit.config.translate_code import Unread
from pgtoolkit.errors import ConfigError
from pgtoolkit.system.report import is_number, refusal, text

Values = dict[str, object]

_OF_KIND = ("multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
"""Options of accelerate that choose a kind of several processes, whatever its file says."""

_OF_BOTH = ("gradient_accumulation_steps", "gradient_clipping")
"""Settings of DeepSpeed that accelerate's file has, or an option of accelerate."""

_COMPARED = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "fp16.enabled": "fp16",
}
"""A key of DeepSpeed's -> the key of TRL's that transformers compares it with."""

_ADAMW = ("adam", "adamw")
"""Optimizers of DeepSpeed that are AdamW, in small letters: Adam is by default."""


class LaunchFiles:
    """The files that a run's options name, read into its values.

    values: by the names of TRL's table; options of the launcher begin with `launch.`. Changed in
    place. read: sentences on files that were read. find: returns the file of a name, in a list.
    mapping: returns the keys of a file.
    """

    def __init__(
        self,
        table: Table,
        values: Values,
        find: Callable[[object], list[Path]],
        mapping: Callable[[Path], Values],
    ):
        self.values = values
        self.read: list[str] = []
        self._table = table
        self._find = find
        self._mapping = mapping
        self._of_deepspeed: Values = {}
        self._source = ""
        for option in ("launch.config_file", "launch.accelerate_config"):
            self._read_accelerate(option)
        for option in ("launch.deepspeed_config_file", "deepspeed"):
            self._read_deepspeed(option)
        self._take_section()
        if self.values.get("launch.distributed_type") == "DEEPSPEED" or self.values.get(
            "launch.use_deepspeed"
        ):
            for key in _OF_BOTH:
                if f"launch.{key}" in self.values:  # an option comes before the file
                    self._of_deepspeed[key] = self.values[f"launch.{key}"]
                    self._source = "the option of accelerate"
        self._compare()

    def _read_accelerate(self, option: str) -> None:
        """Read accelerate's own file, or one that TRL has by a name such as zero2."""
        name = self.values.get(option)
        packaged = self._table.content["accelerate_configs"]
        for file in self._find(name):
            content = self._mapping(file)
            if content.get("compute_environment", "LOCAL_MACHINE") == "LOCAL_MACHINE":
                self._take(option, str(file), content)
            return
        if option == "launch.accelerate_config" and type(name) is str and name in packaged:
            self._take(option, f"TRL's {name}.yaml", packaged[name])

    def _take(self, option: str, file: str, content: Mapping[str, object]) -> None:
        """Take what changes the numbers out of a configuration of accelerate."""
        misplaced = [name for name in ("gradient_clipping", *_COMPARED) if name in content]
        if misplaced:
            raise ConfigError(
                refusal(
                    setting=file,
                    needs="no key but accelerate's own",
                    got=" and ".join(dict.fromkeys(misplaced)),
                    reason="accelerate refuses such a file: it knows these under deepspeed_config "
                    "alone.",
                    use="them as keys of the run, and delete them there",
                )
            )
        del self.values[option]
        kind = str(content.get("distributed_type", "NO")).upper()
        has_kind = any(self.values.get(f"launch.{name}") for name in _OF_KIND)
        taken = []
        if kind == "NO" and not has_kind:
            self.values["launch.num_processes"] = 1
            taken.append("its distributed_type is NO, so that one process trains")
        elif self._splits(content):
            self.values["launch.num_processes"] = Unread("parallelism_config")
            taken.append("its parallelism_config splits a model among processes")
        elif "launch.num_processes" not in self.values:
            count = content.get("num_processes")
            if isinstance(count, int) and count > 0:
                self.values["launch.num_processes"] = count
                taken.append(f"num_processes={count}")
            else:
                self.values["launch.num_processes"] = Unread("the machine's")
        legacy = "fp16" if content.get("fp16") else "no"
        precision = content.get("mixed_precision") or legacy
        is_open = self.values.get("bf16") is False and not self.values.get("fp16")
        if "launch.mixed_precision" not in self.values and is_open:  # else TRL's keys say it
            self.values["launch.mixed_precision"] = precision
            taken.append(f"mixed_precision={text(precision)}")
        if kind in ("FSDP", "DEEPSPEED"):
            self.values["launch.distributed_type"] = kind
        settings = content.get("deepspeed_config")
        if kind == "DEEPSPEED" and isinstance(settings, dict):
            file_of_deepspeed = settings.get("deepspeed_config_file")
            if file_of_deepspeed is not None:
                self.values.setdefault("launch.deepspeed_config_file", file_of_deepspeed)
            for key in _OF_BOTH:
                if settings.get(key) is not None:
                    self._of_deepspeed[key] = settings[key]
                    self._source = file
        self.read.append(f"{file} is read, too{': ' * bool(taken)}{', '.join(taken)}")

    def _splits(self, content: Mapping[str, object]) -> bool:
        """Return whether several processes hold parts of one model, or of one document."""
        sizes = content.get("parallelism_config")
        by_name = sizes if isinstance(sizes, dict) else {}
        parts = [by_name.get(f"parallelism_config_{part}_size") for part in ("tp", "cp", "sp")]
        return any(isinstance(size, int) and size > 1 for size in parts)

    def _read_deepspeed(self, option: str) -> None:
        """Read DeepSpeed's own file."""
        for file in self._find(self.values.get(option)):
            del self.values[option]
            content = self._mapping(file)
            if option == "launch.deepspeed_config_file":  # where accelerate fills it in
                content = {"gradient_accumulation_steps": 1} | content
            self._of_deepspeed |= dict(flat(content, ["optimizer.params.betas"]))
            self._source = str(file)
            self.values.setdefault("launch.distributed_type", "DEEPSPEED")
            self.read.append(f"{file} is read, too")

    def _take_section(self) -> None:
        """Take the keys of DeepSpeed's that stand in TRL's own file, without a file of theirs."""
        keys = [name for name in self.values if name.startswith("deepspeed.")]
        for name in keys:
            self._of_deepspeed[name.removeprefix("deepspeed.")] = self.values.pop(name)
        if keys:
            self._source = "the key deepspeed"
            self.values.setdefault("launch.distributed_type", "DEEPSPEED")

    def _compare(self) -> None:
        """Refuse what transformers refuses; note DeepSpeed's own optimizer and schedule."""
        for part in ("optimizer", "scheduler"):
            kind = self._of_deepspeed.get(f"{part}.type")
            if kind is not None and not (part == "optimizer" and str(kind).lower() in _ADAMW):
                self.values[f"deepspeed.{part}"] = kind
        for theirs, ours in _COMPARED.items():
            self._compare_one(theirs, ours, self._of(ours))
        betas = [self._of("adam_beta1"), self._of("adam_beta2")]
        self._compare_one("optimizer.params.betas", "adam_beta1 and adam_beta2", betas)
        precision = self._of("bf16")
        is_on = not self._of("fp16") if precision is None else precision
        self._compare_one("bf16.enabled", "bf16", is_on)
        sizes = [self._of("per_device_train_batch_size"), self._of("gradient_accumulation_steps")]
        processes = self.values.get("launch.num_processes")
        if isinstance(processes, int) and isinstance(sizes[0], int) and isinstance(sizes[1], int):
            product = processes * sizes[0] * sizes[1]
            words = "per_device_train_batch_size x gradient_accumulation_steps x processes"
            self._compare_one("train_batch_size", words, product)

    def _of(self, name: str) -> object:
        """Return the value of TRL's key, or its default; Unread where unsloth has its own."""
        by_unsloth = self._table.content["unsloth"]["own"]
        if name not in self.values and self.values.get("launch.unsloth") and name in by_unsloth:
            return Unread(name)
        return self.values.get(name, self._table.rows[name].default)

    def _compare_one(self, theirs: str, ours: str, value: object) -> None:
        """Raise ConfigError where DeepSpeed's number or switch is another one than TRL's."""
        number = self._of_deepspeed.get(theirs)
        known = [number, value] if not isinstance(value, list) else [*value]
        if number in (None, "auto") or not all(is_number(each) for each in known):
            are_switches = isinstance(number, bool) and isinstance(value, bool)
            if not are_switches:
                return
        if number != value:
            raise ConfigError(
                refusal(
                    setting=f"{theirs} in {self._source}",
                    needs=f"{text(value)}, as {ours} is, or auto",
                    got=text(number),
                    reason="transformers does not start with both.",
                    use=f"{theirs}: auto",
                )
            )
