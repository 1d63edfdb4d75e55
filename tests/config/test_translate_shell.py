"""How `pgtk translate` reads shell scripts: bash itself is the reference, with a stub to train."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from builders.refusals import refusal

from pgtoolkit.cli import main
from pgtoolkit.config.translate_shell import Script

STUB = '#!/bin/sh\nprintf "%s\\n" "$@" end >> trained\n'
"""Writes the words that it is given, and a line `end` behind them."""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A current folder with a program `train`, which bash finds, and a file to source."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    Path("train").write_text(STUB)
    Path("train").chmod(0o755)
    Path("common.sh").write_text("BS=32\nreturn\nBS=1\n")
    return tmp_path


def of_bash(script: str) -> list[list[str]]:
    """Return the words of each `train` that bash runs, when it runs a script of this text."""
    Path("run.sh").write_text(script)
    Path("trained").write_text("")
    environment = os.environ | {"HOME": "~"}
    subprocess.run(["bash", "run.sh"], capture_output=True, input="", env=environment, text=True)
    calls = Path("trained").read_text().replace(str(Path.cwd()), ".").split("end\n")[:-1]
    return [call.split("\n")[:-1] for call in calls]


def read(script: str) -> list[list[str]]:
    """Return the words of each `train` that is read in a script of this text."""
    commands = Script(script, Path(".")).commands
    return [command.words[1:] for command in commands if command.words[0] == "train"]


PLAIN = {
    "uncalled": "f() { BS=4; local n=1; }\ntrain $BS",
    "decided": 'f() { BS=4; }; [ "${DEBUG:-0}" = 1 ] && f\ntrain $BS',
    "if": 'if [ "${DEBUG:-0}" = 1 ]; then BS=4; elif [[ $BS -ge 16 ]]; then BS=5; fi\ntrain $BS',
    "negated": 'if ! [ "$BS" != 16 ]; then BS=5; else BS=6; fi\ntrain $BS',
    "numbers": "N=3; if (( N > 2 )); then BS=$((BS / N - 7 / 2 % 3 + -1)); fi\ntrain $BS",
    "case": 'case "$BS" in 1|2) BS=1;; 16) BS=3;; *) BS=4;; esac\ntrain $BS',
    "called": "f() { BS=32; }; function g { f; BS+=1; }; g\ntrain $BS",
    "local": "f() { local n=$1 m; m=$2; shift 2; train $n $m $# $@ ${1:-a} ${9:-b}; }\n"
    "f 3 '4 5' c d; f 6 7\ntrain $BS",
    "returned": "f() { g; return; BS=9; }; g() { BS=5; }; f\ntrain $BS",
    "arguments": 'f() { train "$@" "$*" $#; }; f "a b" c\nset -- x y; shift; train $1 $#',
    "wrapped": 'train() { command train "$@" more; }\ntrain $BS',
    "sourced": "source ./common.sh\ntrain $BS",
    "given": "echo 'BS=$1' > given.sh; source given.sh 8; train $BS ${1:-none}",
    "must": "train ${BS:?no} ${BS?}",
    "dot": '. "$(dirname "$0")/common.sh"; train $BS',
    "appended": "M=/tmp; M+=/model; A=(a b); A+=(c); A+=d\ntrain $M ${A[@]} $A ${A[1]} $BS",
    "subshell": "( BS=32 ); { C=1; }; BS=3 true; echo 2 | read BS; BS=8 &\ntrain $BS $C",
    "unset": "C=; train ${NO:-32} ${C-a} ${C:-b} ${NO:=7} $NO ${C:+c} ${NO:+d} e${C}",
    "eval": 'eval "BS=$((BS * 2))"\ntrain $BS',
    "one": "for BS in 32; do train $BS; done\nfor n in; do BS=1; done; train $BS",
    "each": "for n in 1 2; do A+=(a.b=$n); BS=$n; train $n; done; train ${A[@]} $BS $n",
    "text": "export C=1; A=5; bash -c 'A=${A:-2}; train $A $C $1' x y; D=7 bash -c \"train $A\"\n"
    "nohup bash -euc 'train $C; exit; train 9'; train $A",
    "file": "export C=1; A=5; echo 'train ${A:-2} $C $D $1 $#' > more.sh; D=4 bash more.sh x y\n"
    "export D=3; exec sh more.sh z; train 9",
    "never set": 'A+=(x.a=1 "${NO[@]:-y z}"); A+=(x.b=2); train "${A[*]}" p"${A[@]}"s ${A[*]}',
    "comment": ": <<'EOF'\ntrain 1 \"\nEOF\ncat > x <<-E; train $BS\ntrain 2\n\tE\n: '\ntrain 3\n'",
    "not_run": "if false; then train 1; fi; f() { train 2; }; train $BS; exit 0; train 4",
    "chain": "cd . && BS=3 && train $BS; true || BS=4; false && BS=5; train $BS",
    "words": "A=' a  b '; B=(); C='k=1 2'; train $A \"$A\" x$A \"${B[@]}\" '' $C [\"x\"] a$A.",
    "nested": 'train "${NO:-"$BS x"}" "${NO:-\'it\'}" ${NO:-"a b"} ${BS-"c d"} "$(pwd)x" | cat',
    "options": "while [[ $# -gt 0 ]]; do BS=$1; shift; done\n"
    "train $BS",
    "exports": "export BS=7 C=1; declare -a A=(x y); readonly D=$BS; train $BS $C $A $D",
    "failed": "[ $BS = 16 ] || { echo no; exit 1; }; [ -z '' ] && BS=2; train $BS",
    "exec": "exec 3>&1; train 1; exec train $BS; train 3",
}  # fmt: skip
"""Scripts, which begin with 16, of which every word is seen."""


@pytest.mark.parametrize("script", PLAIN.values(), ids=PLAIN)
def test_what_is_plainly_seen_is_what_bash_hands_over(folder, script):
    script = f"BS=16\n{script}\n"
    expected = of_bash(script)
    assert expected
    assert read(script) == expected


UNKNOWN = [
    "(( BS *= 2 ))",
    "let BS/=2",
    ": $((BS*=2))",
    "X=$((BS = 32))",
    "read -r BS <<< 32",
    "mapfile -t BS <<< 32",
    "printf -v BS %d 32",
    "for BS in 8 32; do break; done",
    "for n in $(echo 1 2); do BS=$n; done",
    "while getopts b: o -b 3; do BS=1; done",
    "BS=2; unset BS",
    "f() { local BS=4; }; f; BS+=2",
    'A=("$(echo)" 16); BS=3${A[*]}',
    "for (( BS=1; BS < 3; BS++ )); do :; done",
    "while ls run.sh; do BS=32; break; done",
    "until grep -q x common.sh; do BS=32; break; done",
    'if [ -n "$PATH" ]; then BS=32; fi',
    "[ -f run.sh ] && BS=32",
    "ls nothing || BS=32",
    "f() { BS=32; }; [ -f run.sh ] && f",
    "f() { [ -f run.sh ] && return; BS=1; }; BS=32; f",
    'case "$PATH" in q*) BS=8;; *:*) BS=32;; esac',
    'case "$PATH" in *:*) BS=32; exit_code=1;; esac',
    "if [ -f run.sh ]; then BS=32; else exit; fi; BS=$(cat common.sh | tail -c2)",
    "BS=(32 8); BS[0]=5",
    "BS=(32 8); unset 'BS[0]'",
    "BS=$(echo 32)",
    "BS=`echo 32`",
    "BS=$((BS ** 2))",
    "BS=-7; BS=$((BS / 2))",
    "BS=$((BS > 2 ? 3 : 4))",
    "BS=040; BS=$((BS + 1))",
    "BS=1+2; BS=$(($BS * 3))",
    "BS=file.txt; BS=${BS%.txt}",
    "A=32; ref=A; BS=${!ref}",
    "for BS in *.s[h]; do :; done",
    'A=(3 2); IFS=,; BS="${A[*]}"',
]
"""What changes a variable in a way that is not followed."""


@pytest.mark.parametrize("change", UNKNOWN)
def test_what_is_not_plainly_seen_is_not_known_and_keeps_no_old_value(folder, change):
    script = f"BS=16\n{change}\ntrain a $BS data.x=$BS z\n"
    for words in read(script):
        assert words[0] == "a"
        assert words[-1] == "z"
        assert all("$" in word or "`" in word for word in words[1:-1])
    assert read(script)
    assert of_bash(script)[0][1:] != ["16", "data.x=16", "z"]


def test_what_makes_a_name_unknown_is_said_with_its_line(folder, capsys):
    name = "actor_rollout_ref.rollout.n"
    start = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.seed=$S"
    Path("run.sh").write_text(f"N=4; S=1\nlet N*=2\n{start} {name}=$N\n")
    assert main(["translate", "run.sh"]) == 0
    page = capsys.readouterr().out
    assert "\n  $N is not known after line 2, let N*=2\n" in page
    assert f"\n  {name}=$N: what it follows from is known when their program runs" in page
    assert "$S" not in page


def test_many_defaults_do_not_hide_the_key_that_they_follow_from(folder, capsys):
    """Whether there is a critic, of which verl has some 80 keys, is not known."""
    start = "python3 -m verl.trainer.main_ppo data.train_batch_size=64"
    Path("run.sh").write_text(f"{start} algorithm.adv_estimator=$ESTIMATOR\n")
    assert main(["translate", "run.sh"]) == 0
    page = capsys.readouterr().out
    (line,) = [line for line in page.splitlines() if "adv_estimator=$ESTIMATOR" in line]
    assert re.match(r"  algorithm.adv_estimator=\$ESTIMATOR and \d\d of their defaults: ", line)
    assert "critic." not in line


ANY = {
    "source": ("source ./nothing.sh", "./nothing.sh is not found"),
    "eval": ('eval "$(cat common.sh)"', "its text is not known"),
    "export": ("export $(cat common.sh | head -1)", "its names are not known"),
    "function": ("[ -f common.sh ] && f() { BS=32; }\nf", "its function is not certain"),
}


@pytest.mark.parametrize(("change", "reason"), ANY.values(), ids=ANY)
def test_what_may_change_any_variable_leaves_none_known(folder, change, reason):
    script = f"BS=16\n{change}\nC=2\ntrain $BS ${{D:-5}} $C x$E\n"
    (command,) = [read for read in Script(script, Path(".")).commands if read.words[0] == "train"]
    assert command.words == ["train", "$BS", "${D:-5}", "2", "x$E"]
    line = change.count("\n") + 2
    said = change.rpartition("\n")[2].partition(";")[0]
    assert command.assumed == [f"after line {line}, {said}, each variable may be another: {reason}"]


def test_what_sets_up_an_environment_is_assumed_to_set_nothing_else(folder):
    script = "BS=16\nsource .venv/bin/activate\neval $(conda shell.bash hook)\ntrain $BS\n"
    command = Script(script, Path(".")).commands[-1]
    assert command.words == ["train", "16"]
    assert [sentence.partition(" sets ")[0] for sentence in command.assumed] == [
        "line 2, source .venv/bin/activate",
        "line 3, eval $(conda shell.bash hook)",
    ]


def test_a_file_that_a_script_sources_is_found_beside_it(folder):
    Path("jobs").mkdir()
    Path("jobs/sizes.sh").write_text("BS=64\nlet N=3\n")
    script = "BS=16\nsource sizes.sh\ntrain $BS $N\n"
    command = Script(script, Path("jobs")).commands[-1]
    assert command.words == ["train", "64", "$N"]
    assert command.assumed == [
        "jobs/sizes.sh, which it sources, is read",
        "$N is not known after line 2 of jobs/sizes.sh, let N=3",
    ]


def test_settings_keep_their_keys_where_their_values_are_not_known(folder):
    script = """
A=(x.a=1 x.b=2); B="y.a=1 y.b=2"; C=(z.a=1)
for i in $(echo 1 2); do A+=(x.c=$i); done
if [ -f common.sh ]; then B="$B y.c=3"; else B="y.a=1 y.b=4"; fi
C[0]=z.a=5
train "${A[@]}" $B "${C[@]}"
"""
    expected = "x.a=1 x.b=2 x.c=$A y.a=1 y.b=$B y.c=$B z.a=$C $C"
    assert [" ".join(words) for words in read(script)] == [expected]


@pytest.mark.parametrize("command", ["docker run image bash -c 'trl grpo'", "bash absent.sh a=1"])
def test_a_shell_whose_commands_are_not_read_is_named(folder, capsys, command):
    Path("run.sh").write_text(command)
    start = command.partition(" 'trl" if "'" in command else " a=")[0]
    says = f"starts {start}, whose commands are not read: translate a file, run.sh, that has them"
    assert says in refusal(capsys, "translate", Path("run.sh"))


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("A=1\ntrl grpo --beta 'x\n", "line 2 of it is not read as bash: no ' follows"),
        ("if true; then\ntrl grpo --beta 1\n", "no elif or else or fi follows"),
        ("trl grpo --beta 1\n)\n", "line 2 of it is not read as bash: ) is not expected"),
        ("declare -i A=1\ntrl grpo --beta $A\n", "line 1, declare -i A=1: declare -i is not read"),
        ("select x in a; do trl grpo --beta 1; done\n", "line 1 of it is not read as bash: select"),
        ("f() { f; f; }; while ls; do f; done\n", "its loops and functions are too many to follow"),
    ],
)
def test_what_is_no_script_is_refused_with_the_line(folder, capsys, script, says):
    Path("run.sh").write_text(script)
    assert says in refusal(capsys, "translate", Path("run.sh"))
