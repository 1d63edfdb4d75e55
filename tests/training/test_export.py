"""`pgtk export`: transformers loads what a run has learned, to the same logits."""

import shutil

import pytest
import torch
from builders.models import save_with_tokenizer, small_llama
from builders.runs import SHORT, checkpoint_of, config_of, run, with_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pgtoolkit.batch import Document
from pgtoolkit.cli import main
from pgtoolkit.model.setup import build_policy
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.train import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(
        tmp_path_factory.mktemp("export") / "run", "trainer.max_steps=2", "rollout.temperature=0.5"
    )


@torch.no_grad()
def logits_in_training(folder, config, step, tokens):
    """Of one document, by the code that trains, with the weights of a checkpoint."""
    config = config
    policy = build_policy(config.model, "0123456789=", on_gpu=False)
    weights = checkpoint_of(folder, step)["model"]
    # a tied head has one name of two
    assert weights.keys() == dict(policy.model.named_parameters()).keys()
    policy.model.load_state_dict(weights, strict=False)
    count = len(tokens)
    document = Document(
        tokens, torch.arange(count) > 0, torch.zeros(count - 1), torch.zeros(count - 1), 0, "one"
    )
    (micro_batch,) = make_step([document], 99, {}).micro_batches
    return policy.head(policy.hidden_states(micro_batch))


@torch.no_grad()
def logits_loaded(folder, tokens):
    return AutoModelForCausalLM.from_pretrained(folder)(input_ids=tokens[None]).logits[0]


def test_the_exported_model_has_the_logits_of_the_newest_checkpoint(trained, tmp_path, capsys):
    folder = tmp_path / "a" / "model"
    folder.mkdir(parents=True)  # an empty one is taken
    assert main(["export", str(trained), str(folder)]) == 0
    assert "step 2 of" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor(tokenizer("12345=54321").input_ids)
    assert tokens.tolist() == [1, 2, 3, 4, 5, 10, 5, 4, 3, 2, 1]
    expected = logits_in_training(trained, config_of(*SHORT), 2, tokens)
    assert torch.equal(logits_loaded(folder, tokens), expected)
    assert not torch.equal(expected, logits_in_training(trained, config_of(*SHORT), 1, tokens))
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".md"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["model"]
    assert tokenizer.padding_side == "left"
    sampling = GenerationConfig.from_pretrained(folder)  # as the rollouts did
    assert (sampling.do_sample, sampling.temperature, sampling.top_p, sampling.top_k) == (
        True,
        0.5,
        1.0,
        0,
    )
    assert (sampling.max_new_tokens, sampling.eos_token_id, sampling.pad_token_id) == (4, 11, 11)


def test_the_card_tells_the_run_and_its_code_runs(trained, tmp_path, monkeypatch, capsys):
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


def test_a_model_of_a_folder_keeps_all_its_ends_and_its_number_type(tmp_path):
    """All that an export needs is in the run; what it samples by is the run's own."""
    save_with_tokenizer(
        small_llama(num_hidden_layers=2, tie_word_embeddings=True).bfloat16(), tmp_path / "base"
    )
    (tmp_path / "base" / "generation_config.json").write_text(
        '{"eos_token_id": [11, 3, 7], "repetition_penalty": 1.1}'
    )
    chosen = "model.gradient_checkpointing=true", "trainer.max_steps=1"
    settings = config_of(*with_model(tmp_path / "base", *chosen))
    train(settings, tmp_path / "run")
    tokens = torch.tensor([1, 2, 3, 10, 3, 2, 1])
    expected = logits_in_training(tmp_path / "run", settings, 1, tokens)
    shutil.rmtree(tmp_path / "base")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    sampling = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (sampling.eos_token_id, sampling.repetition_penalty) == ([11, 3, 7], None)
    step = tmp_path / "run" / "checkpoints" / "step-000001"
    assert (
        AutoModelForCausalLM.from_pretrained(step).dtype == torch.bfloat16
    )  # as it is to be used; float32 in the file
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(step, dtype=torch.float32)(tokens[None]).logits[0],
        expected,
    )
    weights, trained = (
        load_file(tmp_path / "model" / "model.safetensors"),
        checkpoint_of(tmp_path / "run", 1)["model"],
    )
    assert all(torch.equal(weight, trained[name].bfloat16()) for name, weight in weights.items())
    # a folder of this machine
    assert "base_model" not in (tmp_path / "model" / "README.md").read_text()


def test_what_cannot_be_exported_is_refused(trained, tmp_path, capsys, monkeypatch):
    def refused(*arguments, status=2):
        assert main(["export", *map(str, arguments)]) == status
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1
        return said

    monkeypatch.chdir(tmp_path)
    assert "got nowhere: no such folder" in refused("nowhere", "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "needs a new or empty folder (got one with 1 entry). Nothing is overwritten." in refused(
        trained, "full"
    )
    assert "(got a file)" in refused(trained, "full/file")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text((trained / "config.yaml").read_text())
    assert "needs a checkpoint (got none)" in refused("begun", "model")
    assert "cannot be read or written" in refused(trained, "full/file/model", status=6)
    shutil.copytree(trained, "old")
    config = (trained / "config.yaml").read_text().replace("  max_bad_steps: 3\n", "")
    (tmp_path / "old" / "config.yaml").write_text(config)
    assert "does not fit this version of pgtoolkit" in refused("old", "model")
    assert not (tmp_path / "model").exists()
