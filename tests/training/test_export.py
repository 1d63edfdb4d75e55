"""`pgtk export` writes a model that transformers loads, with the logits of the code that trains."""

import shutil
from pathlib import Path

import pytest
import torch
from builders.documents import document_of
from builders.models import save_with_tokenizer, small_llama
from builders.runs import SHORT, checkpoint_of, config_of, run, with_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pgtoolkit.assembly.export import card
from pgtoolkit.assembly.train import train
from pgtoolkit.cli import main
from pgtoolkit.config.schema import Config
from pgtoolkit.model.setup import build_policy
from pgtoolkit.rollouts.steps import make_step


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    return run(folder, "trainer.max_steps=2", "rollout.temperature=0.5")


@torch.no_grad()
def logits_in_training(
    folder: Path, config: Config, step: int, tokens: torch.Tensor
) -> torch.Tensor:
    """Return (T, V) logits of the code that trains, with the weights of a checkpoint."""
    policy = build_policy(config.model, "0123456789=", on_gpu=False)
    weights = checkpoint_of(folder, step)["model"]
    # A tied head is saved under the name of the embedding alone.
    assert weights.keys() == dict(policy.model.named_parameters()).keys()
    policy.model.load_state_dict(weights, strict=False)
    (micro_batch,) = make_step([document_of(tokens)], 99, {}).micro_batches
    return policy.head(policy.hidden_states(micro_batch))


@torch.no_grad()
def logits_of_export(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens[None]).logits[0]


def test_the_exported_model_has_the_logits_of_the_newest_checkpoint(trained, tmp_path, capsys):
    folder = tmp_path / "a" / "model"
    folder.mkdir(parents=True)  # an empty folder is accepted
    assert main(["export", str(trained), str(folder)]) == 0
    assert "step 2 of" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor(tokenizer("12345=54321").input_ids)
    assert tokens.tolist() == [1, 2, 3, 4, 5, 10, 5, 4, 3, 2, 1]
    expected = logits_in_training(trained, config_of(*SHORT), 2, tokens)
    assert torch.equal(logits_of_export(folder, tokens), expected)
    assert not torch.equal(expected, logits_in_training(trained, config_of(*SHORT), 1, tokens))
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".md"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model"]
    assert tokenizer.padding_side == "left"


def test_the_exported_model_samples_as_the_rollouts_did(trained, tmp_path):
    assert main(["export", str(trained), str(tmp_path / "model")]) == 0
    sampling = GenerationConfig.from_pretrained(tmp_path / "model")
    assert sampling.do_sample is True
    assert sampling.temperature == 0.5
    assert sampling.top_p == 1.0
    assert sampling.top_k == 0
    assert sampling.max_new_tokens == 4
    assert sampling.eos_token_id == 11
    assert sampling.pad_token_id == 11


def test_the_card_describes_the_run_and_its_code_samples(trained, tmp_path, monkeypatch, capsys):
    assert main(["export", str(trained), str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert (
        "loss gspo, aggregation constant, seed 0, task reverse. These are the weights after step 2 "
        "of 2."
    ) in card
    assert "rollout.temperature=0.5" in card
    assert "  hidden_size: 32" in card
    code = card.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path / "model")
    capsys.readouterr()
    exec(code, {})
    prompt = capsys.readouterr().out.partition("=")[0]
    assert len(prompt) == 3
    assert prompt.isdecimal()


def test_the_card_shows_the_chat_template_that_was_used(trained):
    settings = ("model=huggingface", "model.path=/m", "task=sums", "task.system_prompt=Brief.")
    text = card(config_of(*settings), trained, 2, "{{ messages }}\n")
    assert "````jinja\n{{ messages }}\n````" in text
    assert (
        "prompt = tokenizer.apply_chat_template([{'role': 'system', 'content': 'Brief.'}, "
        "{'role': 'user', 'content': '...'}], add_generation_prompt=True, return_tensors='pt', "
        "return_dict=True)"
    ) in text
    for unused in (
        card(config_of(*settings[:3], "task.chat=never"), trained, 2, "{{ messages }}"),
        card(config_of(*settings[:3]), trained, 2, None),
    ):
        assert "None: the model was trained on texts as they are." in unused
        assert 'prompt = tokenizer("...", return_tensors="pt")' in unused


def test_a_model_of_a_folder_keeps_all_its_end_tokens_and_its_number_type(tmp_path):
    """The run has all that an export needs, and its own settings of sampling."""
    save_with_tokenizer(
        small_llama(num_hidden_layers=2, tie_word_embeddings=True).bfloat16(), tmp_path / "base"
    )
    (tmp_path / "base" / "generation_config.json").write_text(
        '{"eos_token_id": [11, 3, 7], "repetition_penalty": 1.1}'
    )
    overrides = ("model.gradient_checkpointing=true", "trainer.max_steps=1")
    config = config_of(*with_model(tmp_path / "base", *overrides))
    train(config, tmp_path / "run")
    tokens = torch.tensor([1, 2, 3, 10, 3, 2, 1])
    expected = logits_in_training(tmp_path / "run", config, 1, tokens)
    shutil.rmtree(tmp_path / "base")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    sampling = GenerationConfig.from_pretrained(tmp_path / "model")
    assert sampling.eos_token_id == [11, 3, 7]
    assert sampling.repetition_penalty is None

    # The checkpoint has float32 in its file, and says that the model is used in bfloat16.
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    assert AutoModelForCausalLM.from_pretrained(checkpoint).dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert torch.equal(model(tokens[None]).logits[0], expected)

    weights = load_file(tmp_path / "model" / "model.safetensors")
    trained = checkpoint_of(tmp_path / "run", 1)["model"]
    assert all(torch.equal(weight, trained[name].bfloat16()) for name, weight in weights.items())
    # A folder of this machine says nothing to others.
    assert "base_model" not in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    ("run", "folder", "status", "message"),
    [
        ("nowhere", "model", 2, "got nowhere: no such folder"),
        (
            "trained",
            "full",
            2,
            "needs a new or empty folder (got one with 1 entry). Nothing is overwritten.",
        ),
        ("trained", "full/file", 2, "(got a file)"),
        ("trained", "full/file/model", 6, "cannot be read or written"),
        ("without checkpoint", "model", 2, "needs a checkpoint (got none)"),
        ("without a key", "model", 2, "does not fit this version of pgtoolkit"),
    ],
)
def test_an_export_is_refused_in_one_line_and_writes_nothing(
    trained, tmp_path, capsys, monkeypatch, run, folder, status, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "trained").symlink_to(trained)
    config = (trained / "config.yaml").read_text()
    (tmp_path / "without checkpoint").mkdir()
    (tmp_path / "without checkpoint" / "config.yaml").write_text(config)
    if run == "without a key":
        shutil.copytree(trained, run)
        changed = config.replace("  max_bad_steps: 3\n", "")
        assert changed != config
        (tmp_path / run / "config.yaml").write_text(changed)
    assert main(["export", run, folder]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "model").exists()
