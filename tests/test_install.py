"""`.ci/install.py` hands pip's settings to uv, where that is on the machine."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_uv_gets_the_indexes_and_limits_that_pip_has(tmp_path):
    (tmp_path / "uv").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "uv").chmod(0o755)
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://one.test/simple\nfind-links = /wheels\n"
        "extra-index-url =\n  https://two.test/simple\n  https://three.test/simple\n"
        "[install]\nconstraint = /limits.txt\n"
    )
    pips = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment = pips | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "PIP_FIND_LINKS": "/others",
        "PIP_NO_INDEX": "1",
    }
    command = [sys.executable, str(ROOT / ".ci" / "install.py"), "-e", "."]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert words[:3] == ["pip", "install", "--index-strategy"]
    assert words[-2:] == ["-e", "."]
    given = [*itertools.pairwise(words)]
    for pair in (
        ("-c", str(ROOT / "constraints.txt")),
        ("--constraint", "/limits.txt"),
        ("--index-url", "https://one.test/simple"),
        ("--extra-index-url", "https://two.test/simple"),
        ("--extra-index-url", "https://three.test/simple"),
        ("--find-links", "/others"),
    ):
        assert pair in given
    assert "/wheels" not in words
    assert "--no-index" in words
