"""Rules on what a run's file makes a command execute, write and send.

A file that somebody else wrote may name programs, folders and addresses. They have to be typed, or
are printed before a start.
"""

from __future__ import annotations

import configparser
import contextlib
import netrc
import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from pgtoolkit.config.evaluation_sets import needs_sampler
from pgtoolkit.config.keys import default, keys_of, plain_value
from pgtoolkit.config.own_code import short_name, typed_key
from pgtoolkit.config.schema import Config
from pgtoolkit.runs.records import leaves
from pgtoolkit.system.functions import is_of_session, not_in_file
from pgtoolkit.system.redaction import redact
from pgtoolkit.system.report import Report, refusal, say, text
from pgtoolkit.tracking.store_address import STORE_VARIABLE, absolute_uri


def commands_not_typed(config: Config, typed: Iterable[tuple[str, object]]) -> list[str]:
    """Return a problem for each program that a run's file names and the user has not typed.

    typed: the keys that were typed, with their values.
    """
    values = dict(pair for key, value in typed for pair in leaves({key: value}))
    problems = []
    for key, value in named_commands(config).items():
        # A reference in place of the value could stand for any program.
        if key not in values or "${" in str(values[key]):
            problems.append(
                refusal(
                    setting=f"{key}={text(value)}",
                    needs="to be typed",
                    got="it from the run's file",
                    reason="It is run as a command, which the file of a run does not decide.",
                    use=f"{key}=VALUE on the command line",
                )
            )
    return problems


def written_elsewhere(config: Config, run_dir: Path, typed: set[str]) -> list[str]:
    """Return a problem for each folder outside of its directory that a run's file has it write to.

    typed: keys that were typed, which may name any folder.
    """
    problems = []
    for name, value in folders_outside(config, run_dir).items():
        if name not in typed:
            problems.append(
                refusal(
                    setting=f"{name}={value}",
                    needs="to be typed",
                    got="it from the run's file",
                    reason="The run would write outside of its directory.",
                    use=f"{name}=FOLDER on the command line",
                )
            )
    return problems


def folders_outside(config: object, run_dir: Path) -> dict[str, str]:
    """Return key -> folder outside of the run's directory that the run writes to."""
    inside = run_dir.resolve()
    outside = {}
    for key in keys_of(config):
        folder = plain_value(config, key.name) if key.writes else None
        if folder and not Path(folder).resolve().is_relative_to(inside):
            outside[key.name] = folder
    return outside


def named_commands(config: object) -> dict[str, str | list[str]]:
    """Return key -> program, or its arguments, for those that are not the default."""
    named: dict[str, str | list[str]] = {}
    for key in keys_of(config):
        if key.code == "command":
            value = plain_value(config, key.name)
            if value not in (None, default(config, key.name)):
                named[key.name] = value
    return named


def named_functions(config: object) -> dict[str, str]:
    """Return key -> dotted path, for the functions and classes that a configuration names."""
    named: dict[str, object] = {}
    for key in keys_of(config):
        if key.code == "function":
            value = plain_value(config, key.name)
            if not key.free:
                named[key.name] = value
            elif isinstance(value, dict):
                words = ("path",) if key.gathers else ("verifier", "environment")
                for name, path in leaves(value):
                    if name.rpartition(".")[2] in words:
                        named[f"{key.name}.{name}"] = path
    return {key: path for key, path in named.items() if isinstance(path, str) and "." in path}


def functions(config: Config, report: Report) -> None:
    """Refuse functions and classes that a session of Python has defined."""
    for key, path in named_functions(config).items():
        if is_of_session(path):
            report.problems.append(not_in_file(short_name(typed_key(key, config)), path))


def before_start(config: Config) -> list[str]:
    """Return the lines to print before a start.

    They name the user's code that is imported, and the addresses that get credentials.
    """
    return [*imports(config), *credentials(config)]


def imports(*configs: Config) -> list[str]:
    """Return a line with the user's code that configurations name, and the keys that name it."""
    # The keys of a dictionary are a set that keeps its order.
    keys_by_path: dict[str, dict[str, None]] = {}
    for config in configs:
        for key, path in named_functions(config).items():
            if not path.startswith("pgtoolkit."):
                keys_by_path.setdefault(path, {})[typed_key(key, config)] = None
    imported = [f"{path} ({', '.join(keys)})" for path, keys in keys_by_path.items()]
    return [f"imports {', '.join(imported)}"] if imported else []


def credentials(config: Config) -> list[str]:
    """Return a line for each kind of credentials of this machine that the run sends somewhere."""
    lines = []
    tracking = config.tracking
    uri = absolute_uri(tracking.uri)
    if tracking.name == "mlflow" and is_server(uri):
        names = mlflow_credentials()
        if names:
            source = STORE_VARIABLE if tracking.uri is None else "tracking.uri"
            lines.append(f"sends {names} to {redact(uri)} ({source})")
    uses_wandb = "wandb" in (tracking.name, *tracking.also)
    if uses_wandb:
        lines += _wandb_credentials()
    urls = getattr(config.sampler, "urls", None)
    if urls and needs_sampler(config) and _VLLM_KEY in os.environ:
        lines.append(f"sends {_VLLM_KEY} to {redact(', '.join(urls))} (sampler.urls)")
    return lines


def announce(config: Config, before: set[str] | None = None) -> None:
    """Print the lines of `before_start`.

    before: lines that were printed, which are not repeated; new ones are added to it.
    """
    lines = [line for line in before_start(config) if line not in (before or ())]
    for line in lines:
        say(f"note: {line}", error=True)
    if before is not None:
        before.update(lines)


def is_server(uri: str | None) -> bool:
    """Return whether a store is a server on the network."""
    return bool(uri) and "://" in uri and not uri.startswith("sqlite:")


def mlflow_credentials() -> str:
    """Return the names of the credentials on this machine that MLflow sends to any server.

    The text is empty if there are none.
    """
    names = [name for name in _MLFLOW_CREDENTIALS if os.environ.get(name)]
    file = Path.home() / ".mlflow" / "credentials"
    if file.is_file():
        names.append(str(file))
    return " and ".join(names)


def _wandb_credentials() -> list[str]:
    """Return a line on the key that wandb sends; none where it has none, or is offline.

    wandb, which is slow to import, takes it from the environment, .netrc or its settings.
    """
    default_folder = Path.home() / ".config" / "wandb"
    file = Path(os.environ.get("WANDB_CONFIG_DIR") or default_folder).expanduser() / "settings"
    parser = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, ValueError, configparser.Error):
        parser.read(file)  # wandb itself says what is wrong with it
    settings = dict(parser["default"]) if parser.has_section("default") else {}
    mode = os.environ.get("WANDB_MODE") or settings.get("mode", "online")
    address = os.environ.get("WANDB_BASE_URL") or settings.get("base_url", _WANDB_SERVER)
    sources = [name for name in _WANDB_CREDENTIALS if os.environ.get(name)]
    sources += _netrc_with_key(address)
    sources += [f"{file}"] if "api_key" in settings else []
    if not sources or mode not in ("online", "run", "shared"):
        return []
    name = sources[0] if sources[0] in _WANDB_CREDENTIALS else f"the key in {sources[0]}"
    return [f"sends {name} to {redact(address)} (wandb)"]


def _netrc_with_key(address: str) -> list[str]:
    """Return the user's .netrc file, if it has a password for a server."""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    if not path.is_file() and not os.environ.get("NETRC"):
        path = Path.home() / "_netrc"
    try:
        login = netrc.netrc(path).authenticators(urlsplit(address).netloc)
    except (OSError, ValueError, netrc.NetrcParseError):
        return []
    return [f"{path}"] if login is not None and login[2] else []


_MLFLOW_CREDENTIALS = (
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
)
_WANDB_CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_WANDB_SERVER = "https://api.wandb.ai"
_VLLM_KEY = "VLLM_API_KEY"
"""The environment variable with the key that `sampling/vllm.py` sends."""
