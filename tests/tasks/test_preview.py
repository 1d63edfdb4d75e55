"""Notes before a run: prompts and answers that the tokenizer changes or repeats, and answers that
no completion can contain."""

from collections.abc import Iterator, Sequence

import pytest
from builders.models import save_with_tokenizer, small_llama
from builders.runs import SHORT, config_of, with_model
from tasks.test_chat import CHATML, CONVERSATION, LLAMA, task_config, tokenizer_of
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pgtoolkit.assembly.build import build
from pgtoolkit.assembly.preview import notes_on_ends, notes_on_rows
from pgtoolkit.cli import main
from pgtoolkit.completion import Prompt
from pgtoolkit.errors import DataError
from pgtoolkit.tasks.chat_template import ChatTemplate, chat_of
from pgtoolkit.tasks.prompts import TokenizedTask


class Rows:
    """A task of these rows: (text, answer), and messages if it is a conversation."""

    def __init__(self, *rows: tuple):
        self._rows = [Prompt(*row[:2], i, f"p:{i + 1}", *row[2:]) for i, row in enumerate(rows)]

    def rows(self) -> Iterator[Prompt]:
        return iter(self._rows)


def notes(
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[tuple],
    stop: Sequence[str] = (),
    longest: int = 9,
    **changes: object,
) -> list[str]:
    """Return the notes on these rows; `changes`: of the task's configuration."""
    config = task_config(**changes)
    task = TokenizedTask(
        Rows(*rows), tokenizer, [], chat_of(config, tokenizer), stop, longest=longest
    )
    return notes_on_rows(task, config)


def test_prompts_that_contain_marks_of_the_template_are_noted():
    templated = "<|im_start|>user\n6 * 7?<|im_end|>\n<|im_start|>assistant\n"
    rows = [("6 * 7?", "42"), (templated, "42"), (templated, "42"), ("6?", "6", CONVERSATION)]
    assert notes(tokenizer_of(CHATML), rows) == [
        "2 of the first 4 prompts hold '<|im_start|>', which the chat template writes itself, "
        "first that at p:2: they go through the template a second time. Use task.chat=never, or "
        "prompts without it."
    ]
    assert notes(tokenizer_of(CHATML), rows[:3], chat="never") == []
    # The marks of this template are not special tokens.
    words = "{% for m in messages %}{{ 'Question: ' + m['content'] + '\nAnswer:' }}{% endfor %}"
    (note,) = notes(tokenizer_of(words), [("6?", "6"), ("Question: 6?\nAnswer:", "6")])
    assert note.startswith(
        "1 of the first 2 prompts hold 'Question:', which the chat template writes itself"
    )
    inside = [{"role": "user", "content": templated}, {"role": "user", "content": "?"}]
    (note,) = notes(tokenizer_of(LLAMA), [("?", "6", inside)])
    assert note.startswith("1 of the first 1 prompts hold '<|im_end|>'")


def test_prompts_that_begin_with_bos_twice_are_noted():
    """The tokenizer adds <bos> to every text, also to one that begins with it."""
    tokenizer = tokenizer_of(None)
    assert notes(tokenizer, [("6?", "6"), ("<bos>6?", "6")]) == [
        "1 of the first 2 prompts begin with <bos> twice, first that at p:2: the tokenizer adds "
        "one to that of the text. Leave <bos> out of the prompts."
    ]


def test_prompts_that_the_tokenizer_changes_are_noted():
    tokenizer = tokenizer_of(None)
    assert notes(tokenizer, [("What?", "6")]) == []
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    (note,) = notes(tokenizer, [("what?", "6"), ("What?", "6")])
    assert note == (
        "1 of the first 2 prompts are other texts as tokens, first 'What?' at p:2, which becomes "
        "'<bos>what?': the model sees what its tokenizer makes of them."
    )


def test_a_model_without_an_end_is_noted():
    assert notes_on_ends([3], 4, []) == notes_on_ends([], 4, ["."]) == []
    (note,) = notes_on_ends([9], 4, [])
    assert "no end-of-sequence token (got only 9, of which it has no weights)" in note
    assert "(got none)" in notes_on_ends([], 4, [])[0]


def test_answers_that_no_completion_can_equal_are_noted():
    tokenizer = tokenizer_of(None)
    rows = [("?", "1234567890"), ("?", " 123456789\n"), ("?", "12 ; 34"), ("?", "<|im_start|>")]
    assert notes(tokenizer, rows) == [
        "1 of the first 4 answers are longer than a completion may be "
        "(rollout.max_completion_length=9), first that at p:1, of 10 tokens: '1234567890'. No "
        "completion can equal them. Use final answers alone, or rollout.max_completion_length=11."
    ]
    assert notes(tokenizer, rows, longest=10, verifier="regular_expression") == []
    assert notes(tokenizer, rows[1:], stop=[";"]) == [
        "1 of the first 3 answers are texts that the model's tokens cannot write, first '12 ; 34' "
        "at p:2, which becomes '12': no completion can equal them. Write them as the tokenizer "
        "does, and without texts of rollout.stop."
    ]
    assert len(notes(tokenizer, rows, verifier="regular_expression")) == 1
    for verifier in ("math_verify", "mine.score"):  # They may accept other forms of an answer.
        (note,) = notes(tokenizer, rows, verifier=verifier)
        assert note.endswith(
            "(rollout.max_completion_length=9), first that at p:1, of 10 tokens: '1234567890'. A "
            "completion that repeats them is cut off. Use rollout.max_completion_length=11."
        )
        assert notes(tokenizer, rows[1:], verifier=verifier) == []
        long = [("?", "1" * 20)]  # perhaps a worked solution
        assert notes(tokenizer, long, longest=16, verifier=verifier) == []
    verifiers = {"a": {"verifier": "mine.score"}, "b": {"verifier": "exact_match"}}
    assert len(notes(tokenizer, rows, verifier=None, verifiers=verifiers)) == 1


def test_check_and_the_start_of_a_run_print_the_notes(tmp_path, capsys, caplog):
    folder = save_with_tokenizer(small_llama(), tmp_path / "model")
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "12=", "answer": "123456"}\n{"prompt": "3=", "answer": "3"}\n')
    tiny = [setting for setting in SHORT if not setting.startswith("task.")]
    rows = ["task=prompts", f"task.path={file}"]
    note = "1 of the first 2 answers are longer than a completion may be"
    for settings in (tiny, with_model(folder, of=tiny)):
        assert main(["check", *settings, *rows]) == 0
        shown = capsys.readouterr().out
        assert f"{note} (rollout.max_completion_length=4), first that at" in shown
        assert "is short for this task" not in shown
    sets = f"evaluation.sets={{a: {{path: {file}}}}}"
    evaluated = ("evaluation.every=6", "evaluation.max_completion_length=5", sets)
    module, loader = build(config_of(*with_model(folder, *rows, *evaluated, of=tiny)))
    loader.source.close()
    module.evaluator.close()
    texts = [record.getMessage() for record in caplog.records]
    assert any(text.startswith(f"note: {note} (rollout.max_completion_length=4)") for text in texts)
    of_set = f"note: evaluation set a: {note} (evaluation.max_completion_length=5)"
    assert any(text.startswith(of_set) for text in texts)


def test_check_refuses_a_prompt_that_the_tokenizer_cannot_encode(tmp_path, capsys):
    folder = save_with_tokenizer(small_llama(), tmp_path / "model")
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    tiny = [setting for setting in SHORT if not setting.startswith("task.")]
    rows = ["task=prompts", f"task.path={file}"]
    assert main(["check", *with_model(folder, of=tiny), *rows]) == 2
    page = capsys.readouterr().out
    (problem,) = page.partition("Problems (1)\n")[2].splitlines()
    assert "the prompt '1+2=' at p.jsonl:1 cannot be encoded" in problem


def test_the_text_of_a_template_without_tokens_is_named():
    vocabulary = {character: number for number, character in enumerate("1+2=[]")}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = "{{ messages[0]['content'] }}!?"
    task = TokenizedTask(None, tokenizer, chat=ChatTemplate(tokenizer))
    with pytest.raises(DataError, match=r"no token for '!', '\?', in the text .*!\?'"):
        task.encode([Prompt("1+2=", "3", 0, "p.jsonl:1")])
    with pytest.raises(DataError, match=r"no token for '4', which prompts and answers"):
        task.encode([Prompt("1+4=", "5", 0, "p.jsonl:1")])
