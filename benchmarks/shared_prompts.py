"""Measure what an update gains where the completions of a prompt share it.

    python benchmarks/shared_prompts.py [--tiny] [--rounds 9] [--cases 32x8x112+512 8x8x300+40]
        [--max-tokens 65536] [--compile]

Each case is prompts x completions x tokens of a prompt + tokens of a completion. First the hidden
states and gradients of a few documents in the device's number type, with and without sharing, are
compared with those of float32; it ends where sharing is further off. Then the update of one process
is timed both ways in turn, after two rounds that warm up: forward and backward pass of all
micro-batches with the fused head and the loss. Prints medians, their ratio, tokens and peak memory.
The model has the shape of Qwen2.5-0.5B and random weights; on a CPU, and with `--tiny`, it is a
small Llama.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from dataclasses import replace

import torch
from rollouts_job import BODIES
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from pgtoolkit.batch import Step, pack
from pgtoolkit.document import Document
from pgtoolkit.families import Grpo
from pgtoolkit.kernels.losses import Computation
from pgtoolkit.losses.aggregation import aggregation_of
from pgtoolkit.losses.objective import Loss
from pgtoolkit.model import attention, compiled, fixed_order, lora
from pgtoolkit.model.policy import Policy
from pgtoolkit.model.settings import HuggingFaceModelSettings
from pgtoolkit.rollouts.steps import make_step
from pgtoolkit.training.module import PolicyGradientModule
from pgtoolkit.training.settings import OptimizerSettings

WARM_UP = 2
"""Rounds that are not counted."""

CASES = ("32x8x112+512", "32x8x300+40", "16x8x1024+256", "8x16x2048+512", "4x8x8192+1024")
ON_A_CPU = ("8x8x300+40", "8x8x40+40")
SMALL = BODIES["tiny"] | {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}


def documents(case: str, vocabulary: int) -> list[Document]:
    """Return the documents of a case, of random tokens."""
    sizes = re.fullmatch(r"(\d+)x(\d+)x(\d+)\+(\d+)", case)
    if sizes is None:
        raise SystemExit(f"{case} is not PROMPTSxCOMPLETIONSxPROMPT+COMPLETION, as in {CASES[0]}")
    prompts, completions, of_prompt, of_completion = map(int, sizes.groups())
    draw = torch.Generator().manual_seed(0)
    made = []
    for group in range(prompts):
        prompt = torch.randint(0, vocabulary, (of_prompt,), generator=draw)
        for number in range(completions):
            own = torch.randint(0, vocabulary, (of_completion,), generator=draw)
            tokens = torch.cat([prompt, own])
            made.append(
                Document(
                    tokens=tokens,
                    loss_mask=torch.arange(len(tokens)) >= of_prompt,
                    advantages=torch.randn(1, generator=draw).expand(of_completion),
                    old_log_probs=None,
                    on_policy=True,
                    group=group,
                    name=f"completion {number} of prompt {group}",
                )
            )
    return made


def policy_of(
    shape: dict, device: str, dtype: torch.dtype, compiles: bool, lora_rank: int | None = None
) -> Policy:
    """Return a model with random weights and the attention that sharing needs.

    lora_rank: of adapters, which alone are trained then; their weights are random, too.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**shape | {"max_position_embeddings": 16384}))
    if lora_rank is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        settings = HuggingFaceModelSettings(path="", fp32_lm_head=False, lora_rank=lora_rank)
        lora.add_adapters(model, settings)
        for adapter in lora.adapted_layers(model).values():
            # Where B is 0, A has no gradient.
            torch.nn.init.normal_(lora.factors(adapter)[1], std=0.02)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    attention.use_packed_attention(model)
    if compiles:
        compiled.switch_on(model)
    return Policy(model.train(), None, dtype, compiled=compiles)


def module_of(policy: Policy) -> PolicyGradientModule:
    """Return a module that trains the policy by GRPO with the fused head."""
    computation = Computation("fused_linear", check_finite=False)
    loss = Loss(Grpo(), aggregation_of("token_mean"))
    module = PolicyGradientModule(
        policy, loss, computation, OptimizerSettings(learning_rate=1e-6), max_steps=1
    ).to(policy.model.device)
    vars(module)["manual_backward"] = torch.Tensor.backward
    return module


def check(policy: Policy) -> None:
    """Compare a few documents, with and without sharing, with float32; SystemExit if sharing is
    further off."""
    few = documents("3x4x70+30", policy.vocabulary_size)

    def numbers(policy: Policy, shares: bool) -> list[Tensor]:
        """Return the states that predict trained tokens, and all gradients."""
        micro_batch = pack(few, shares=shares).to(policy.model.device)
        policy.model.zero_grad()
        states = policy.hidden_states(micro_batch)[micro_batch.labels >= 0]
        weights = torch.linspace(-1, 1, states.numel(), device=states.device).view_as(states)
        (states.float() * weights).sum().backward()
        gradients = [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]
        return [states.detach(), *gradients]

    exact = numbers(replace(policy, compute_dtype=torch.float32), False)
    whole, shared, again = (numbers(policy, shares) for shares in (False, True, True))
    errors = []
    for values in (whole, shared):
        distances = [
            float((value.double() - right.double()).norm() / right.double().norm().clamp(min=1e-9))
            for value, right in zip(values, exact, strict=True)
        ]
        errors.append(max(distances))
    repeats = all(torch.equal(a, b) for a, b in zip(shared, again, strict=True))
    same = "equal to the bit" if torch.equal(whole[0], shared[0]) else "not equal to the bit"
    print(
        f"check against float32: whole {errors[0]:.1e}, shared {errors[1]:.1e}; states of both "
        f"{same}; shared {'repeats' if repeats else 'DOES NOT REPEAT'} to the bit",
        flush=True,
    )
    if errors[1] > 1.3 * errors[0] + 1e-5:
        raise SystemExit("sharing is further from float32 than whole documents are")
    policy.model.zero_grad(set_to_none=True)


def measure(module: PolicyGradientModule, case: str, rounds: int, max_tokens: int) -> None:
    """Time the updates of a case, and print a line."""
    made = documents(case, module.policy.vocabulary_size)
    steps = {shares: make_step(made, max_tokens, share_prompts=shares) for shares in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    peaks = {}
    losses = {}
    for _ in range(WARM_UP + rounds):
        for shares, step in steps.items():
            if module.policy.model.device.type == "cpu":
                # as in a run without sharing, which has the attention of GPUs on these alone
                module.policy.model.set_attn_implementation(attention.NAME if shares else "sdpa")
            time_taken, losses[shares] = timed(module, step)
            seconds[shares].append(time_taken)
            if torch.cuda.is_available():
                peaks[shares] = torch.cuda.max_memory_allocated() / 1e9
    whole, shared = (statistics.median(seconds[shares][WARM_UP:]) for shares in (False, True))
    tokens = {shares: sum(map(num_computed, step.micro_batches)) for shares, step in steps.items()}
    print(
        f"{case}: tokens {tokens[False]} and {tokens[True]} shared "
        f"({tokens[False] / tokens[True]:.2f}); update {whole:.3f} s and {shared:.3f} s "
        f"({whole / shared:.2f} times as fast); micro-batches "
        f"{len(steps[False].micro_batches)} and {len(steps[True].micro_batches)}"
        + "".join(f"; {peak:.1f} GB" for peak in peaks.values()),
        flush=True,
    )
    if abs(losses[True] - losses[False]) > 1e-3 * abs(losses[False]) + 1e-6:
        raise SystemExit(f"the loss is {losses[True]} shared, and {losses[False]} whole")


def num_computed(micro_batch) -> int:
    return sum(micro_batch.document_lengths) - sum(micro_batch.shared)


def timed(module: PolicyGradientModule, step: Step) -> tuple[float, float]:
    """Return the seconds of forward and backward pass of a step, and its loss."""
    module.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    outputs = module.backward_of_all(step.micro_batches, step.totals)
    loss = float(sum(output.loss.detach().double() for output in outputs))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--rounds", type=int, default=9, help="that are counted")
    parser.add_argument("--cases", nargs="+", help="PROMPTSxCOMPLETIONSxPROMPT+COMPLETION")
    parser.add_argument("--max-tokens", type=int, default=65536, help="of a micro-batch")
    parser.add_argument("--compile", action="store_true", help="as model.compile=true")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    tiny = arguments.tiny or not on_gpu
    fixed_order.switch(True)
    policy = policy_of(
        SMALL if tiny else BODIES["0.5b"],
        "cuda" if on_gpu else "cpu",
        torch.bfloat16 if on_gpu else torch.float32,
        arguments.compile,
    )
    check(policy)
    module = module_of(policy)
    for case in arguments.cases or (ON_A_CPU if tiny else CASES):
        measure(module, case, arguments.rounds, arguments.max_tokens)


if __name__ == "__main__":
    main()
