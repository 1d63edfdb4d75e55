"""Settings of this process that the user's code changes are put back, with a single note, and files
beside that code hide no library."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from pgtoolkit.cli import main
from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.system.functions import blaming, import_function
from pgtoolkit.tasks.verifiers import make_verifier

ROOT = Path(__file__).parents[2]

CHANGES = {
    "the working directory": (lambda: os.chdir("/"), os.getcwd),
    "the handler of SIGINT": (
        lambda: signal.signal(signal.SIGINT, lambda *_: None),
        lambda: signal.getsignal(2),
    ),
    "torch.set_grad_enabled": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "torch.set_default_dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        torch.get_default_dtype,
    ),
    "torch.set_default_device": (
        lambda: torch.set_default_device("meta"),
        torch.get_default_device,
    ),
    "torch.set_num_threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "torch.set_deterministic_debug_mode": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.get_deterministic_debug_mode,
    ),
    "torch.set_float32_matmul_precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "numpy.seterr": (lambda: np.seterr(all="raise"), np.geterr),
    "warnings.filters": (
        lambda: warnings.simplefilter("error"),
        lambda: [item for item in warnings.filters if item[0] == "error"],
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_a_call_changes_is_put_back_and_noted_once(name, caplog):
    change, value = CHANGES[name]
    before = value()
    for _ in range(2):
        with blaming(f"verifier of {name}", DataError, "a text"):
            change()
            assert value() != before
        assert value() == before
    with pytest.raises(DataError), blaming(f"verifier of {name}", DataError, "a text"):
        raise ValueError(change())
    assert value() == before
    (note,) = caplog.messages
    assert note.startswith(f"note: verifier of {name} changed {name}, which was put back")


def test_a_warning_of_a_library_is_printed_where_pythonwarnings_makes_errors(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONWARNINGS", "error,e::DeprecationWarning,error:::mine,ignore")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("error", module="mine")
        assert main(["--version"]) == 0
        warnings.warn("of a library", stacklevel=1)
        with pytest.raises(UserWarning):
            warnings.warn_explicit("of the user's module", UserWarning, "mine.py", 1, "mine")
    assert os.environ["PYTHONWARNINGS"] == (
        "default,default::DeprecationWarning,error:::mine,ignore"
    )
    assert "note: PYTHONWARNINGS makes errors of warnings" in capsys.readouterr().err


def test_settings_that_an_import_changes_are_put_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "changing.py").write_text(
        "import os, torch\ntorch.set_grad_enabled(False)\nos.chdir('/')\ndef f(completion, "
        "answer):\n    return 1\n"
    )
    assert make_verifier("changing.f")("a", "b") == 1
    assert torch.is_grad_enabled()
    assert os.getcwd() == str(tmp_path)


@pytest.mark.slow
def test_a_module_that_is_first_to_import_torch_leaves_torchs_own_settings(tmp_path):
    """So it is in the process that checks a run and then trains it."""
    (tmp_path / "changing.py").write_text(
        "import torch\ntorch.set_grad_enabled(False)\ntorch.set_default_dtype(torch.float64)\n"
        "def f(completion, answer):\n    return 1\n"
    )
    program = (
        "import sys\nfrom pgtoolkit.tasks.verifiers import make_verifier\nassert 'torch' not in "
        "sys.modules\n"
        "make_verifier('changing.f')\nimport torch\nprint(torch.is_grad_enabled(), "
        "torch.get_default_dtype())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "True torch.float32"


@pytest.mark.slow
def test_files_beside_a_module_of_the_user_hide_no_library(tmp_path):
    """A library imports libraries. The named module is the user's, and so is a module that only the
    user has."""
    for name in ("profile", "statistics", "matplotlib", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')\n")
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    (tmp_path / "mine.py").write_text(
        "import cProfile, statistics, numpy\n"
        "def f(completion, answer):\n    import helper\n    return helper.VALUE + "
        "statistics.fmean([1, 2])\n"
    )
    program = (
        "import sys\nfrom pgtoolkit.tasks.verifiers import make_verifier\n"
        "print(make_verifier('mine.f')('a', 'b'))\nimport torch, matplotlib, profile\n"
        "print(sys.path.index(sys.argv[1]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", program, str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == "8.5"
    assert int(done.stdout.split()[1]) > 1  # the user's folder comes after Python's own


def test_the_named_module_is_that_of_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder, value in (("installed", 1), ("here", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_named_module.py").write_text(
            f"def f(completion, answer):\n    return {value}\n"
        )
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.chdir(tmp_path / "here")
    assert make_verifier("my_named_module.f")("a", "b") == 2


def test_a_function_in_a_file_that_a_library_hides_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "statistics.py").write_text("def score(completion, answer):\n    return 1\n")
    with pytest.raises(
        ConfigError, match=rf"has a module statistics, which hides {tmp_path}/statistics.py: rename"
    ):
        import_function("task.verifier", "statistics.score")


def test_a_module_with_a_similar_name_is_proposed(tmp_path, monkeypatch):
    """A file has no modules inside, so it stands for no part of a longer path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_jugde.py").write_text("")
    for path, use in (
        ("my_judge.score", "my_jugde.score"),
        ("my_judge.parts.score", "package.module.function"),
    ):
        with pytest.raises(ConfigError, match=rf"Use task.verifier={use}\."):
            import_function("task.verifier", path)


def test_a_long_text_of_an_exception_is_shortened(tmp_path, monkeypatch):
    def fail():
        raise ValueError("begin" + "x" * 10**7 + "end")

    with pytest.raises(DataError) as caught, blaming("task.verifier=f", DataError, "a text"):
        fail()
    assert len(str(caught.value)) < 11_000
    assert str(caught.value).endswith("xend")
    assert "begin" in str(caught.value)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud.py").write_text("raise ValueError('x' * 10**7)\n")
    with pytest.raises(ConfigError) as caught:
        import_function("task.verifier", "loud.f")
    assert len(str(caught.value)) < 2000
