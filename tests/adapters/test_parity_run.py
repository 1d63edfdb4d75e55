"""`pgtk parity`: our reading of TRL and verl is what their own functions compute."""

import json

import pytest
from builders.parity_steps import recorded, theirs

from pgtoolkit.comparison import parity_script
from pgtoolkit.comparison.parity_run import request, run, with_ran
from pgtoolkit.comparison.parity_step import RecordedStep
from pgtoolkit.comparison.parity_switches import TheirSide, differences
from pgtoolkit.comparison.parity_theirs import their_numbers
from pgtoolkit.errors import ConfigError

TRL = [
    {"beta": 0.1, "delta": 1.5, "epsilon_high": 0.28},
    {"loss_type": "bnpo", "beta": 0.1, "use_bias_correction_kl": False},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "cispo", "epsilon_high": 1.3},
    {"loss_type": "sapo", "entropy_coef": 0.1},
    {"mask_truncated_completions": True},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "steps_per_generation": 1},
    {"use_vllm": True},
    {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "temperature": 0.7},
]
VERL = [
    {},
    {"actor__clip_ratio_c": 1.5, "actor__use_kl_loss": True, "actor__kl_loss_coef": 0.3},
    {"actor__policy_loss__loss_mode": "gspo", "actor__loss_agg_mode": "seq-mean-token-mean"},
    {
        "actor__policy_loss__loss_mode": "cispo",
        "actor__loss_agg_mode": "seq-mean-token-sum",
        "actor__entropy_coeff": 0.1,
    },
    {"actor__policy_loss__loss_mode": "sapo"},
    {"actor__policy_loss__loss_mode": "gpg", "algorithm__adv_estimator": "rloo"},
    {"algorithm__adv_estimator": "opo", "actor__use_kl_loss": True, "actor__kl_loss_type": "k1+"},
    {"algorithm__filter_groups__enable": True, "algorithm__norm_adv_by_std_in_grpo": False},
    {"algorithm__rollout_correction__rollout_is": "token"},
    {
        "algorithm__rollout_correction__rollout_is": "sequence",
        "algorithm__rollout_correction__rollout_is_threshold": "0.5_2.0",
    },
    {"actor__loss_agg_mode": "seq-mean-token-sum-norm", "actor__loss_scale_factor": 7},
]
CASES = [("TRL", "trl", flags) for flags in TRL] + [("verl", "verl", flags) for flags in VERL]


def as_ran(step: RecordedStep, side: TheirSide, dtype: str = "float64") -> TheirSide:
    given = json.loads(json.dumps(request(step, side, dtype)))
    return with_ran(step, side, json.loads(json.dumps(parity_script.made_of(given))))


@pytest.mark.parametrize(("trainer", "package", "flags"), CASES, ids=str)
def test_our_reading_is_what_their_functions_compute(trainer, package, flags, tmp_path):
    pytest.importorskip(package, reason=f"the extra {package}")
    side = theirs(tmp_path, trainer, **flags)
    for seed in (0, 1):
        step = recorded(seed)
        ran = as_ran(step, side)
        assert {"loss", "gradient"} <= ran.ran.keys()
        apart = differences(ran.numbers(step), their_numbers(step, side.convention))
        for name in ran.ran:
            # verl adds 1e-8 to lengths; TRL has SAPO's temperatures in float32.
            assert apart[name][1] < 1e-7, (name, apart[name])
        assert float(ran.ran["gradient"].abs().max()) > 1e-3
    in_float32 = as_ran(step, side, "float32").numbers(step)
    apart = differences(in_float32, their_numbers(step, side.convention))
    assert max(apart[name][1] for name in ran.ran) < 1e-6


def test_functions_that_fail_leave_no_file_and_their_last_line_is_shown(tmp_path):
    """A file that is there holds their numbers."""
    step = recorded(0)
    side = theirs(tmp_path, "verl")
    source = tmp_path / "step.json"
    source.write_text(json.dumps(request(step, side) | {"trainer": "neither"}))
    with pytest.raises(KeyError, match="neither"):
        parity_script.main(str(source), str(tmp_path / "made.json"))
    assert not (tmp_path / "made.json").exists()
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nprintf 'first\\nImportError: no vllm\\n' >&2\nexit 1\n")
    broken.chmod(0o755)
    says = r"needs the Python of an environment with verl \(got: ImportError: no vllm\)\. Its own"
    with pytest.raises(ConfigError, match=says):
        run(step, side, broken)
