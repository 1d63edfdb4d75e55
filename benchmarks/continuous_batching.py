"""Seconds of a batch of completions by our decoding and by transformers' continuous batching.

    python benchmarks/continuous_batching.py FOLDER [--shape 0.5b] [--completions 256]
        [--length 512] [--cases ours sdpa flash compiled]

The job is that of benchmarks/rollouts.py: prompts of 64 to 160 tokens with 8 completions each, all
of `length` tokens, drawn at temperature 1 in bfloat16, with their log-probs. First both write
completions of a small model greedily, in float32, and the tokens are compared. Each case is a
process of its own with a time limit; numbers are medians of the calls after the first, which warms
up. Then the log-probs of one completion are compared with those of a forward pass. `sdpa` is
`generate_batch` where flash-attn is missing; `flash` needs flash-attn or flash_attn_by_torch.py;
`compiled` is `flash` with `default_compile_level=1`. With `--shape tiny` the script can be tried on
a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rollouts_job import BODIES, GROUP, write_inputs
from torch import Tensor
from transformers import (
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from pgtoolkit.model.compiled import switch_on
from pgtoolkit.model.policy import Policy
from pgtoolkit.sampling.draw import draw, uniform_numbers

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CASES = {
    "ours": "our decoding, model.compile=true",
    "sdpa": "continuous batching, paged|sdpa",
    "flash": "continuous batching, flash-attn",
    "compiled": "the same, default_compile_level=1",
}
PAGE = 256
"""Tokens of a page of transformers' cache, its default."""

Run = Callable[[int], tuple[list[list[int]], list[list[float]]]]
"""A call of a case, given its number: the tokens and the log-probs of each completion."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=BODIES, default="0.5b")
    parser.add_argument("--completions", type=int, default=256, help="by 8")
    parser.add_argument("--length", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--calls", type=int, default=4, help="of each case, the first warms up")
    parser.add_argument("--seconds-per-case", type=float, default=120)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        _measure(arguments)
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_inputs(arguments.folder, arguments.completions // GROUP, arguments.shape)
    print(f"{torch.cuda.get_device_name() if GPU else 'CPU'}, torch {torch.__version__}")
    _compare_greedy(arguments.folder)
    num_tokens = arguments.completions * arguments.length
    print(f"{'case':36} {'s':>8} {'tokens/s':>9}  all calls", flush=True)
    for case in arguments.cases:
        seconds = _in_process(case, arguments.seconds_per_case)
        # A case that takes longer than its limit has perhaps no call but the first.
        later = seconds[1:] or seconds
        if not later:
            print(f"{CASES[case]:36} failed", flush=True)
            continue
        median = statistics.median(later)
        calls = " ".join(f"{x:.2f}" for x in seconds)
        print(f"{CASES[case]:36} {median:8.2f} {num_tokens / median:9.0f}  {calls}", flush=True)
    return 0


def _in_process(case: str, limit: float) -> list[float]:
    """Return the seconds of a case's calls, as far as it came."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        print(f"{CASES[case]} was ended after {limit:.0f} s")
    results = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    if child.returncode:
        print(output[-2500:], flush=True)
    notes = [result for result in results if "seconds" not in result]
    if notes:
        print(f"{case}: {notes}", flush=True)
    return [result["seconds"] for result in results if "seconds" in result]


def _measure(arguments: argparse.Namespace) -> None:
    """Print the seconds of each call of a case, a line of JSON each."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder / "model")
    prompts = [
        tokenizer(json.loads(line)["prompt"])["input_ids"]
        for line in (arguments.folder / "prompts.jsonl").read_text().splitlines()
    ][: arguments.completions // GROUP]
    dtype = torch.bfloat16 if GPU else torch.float32
    model = Qwen2ForCausalLM.from_pretrained(arguments.folder / "model", dtype=dtype)
    model = model.to(DEVICE).eval().requires_grad_(False)
    rows = [prompt for prompt in prompts for _ in range(GROUP)]
    if arguments.case == "ours":
        run = _ours(model, rows, arguments.length)
    else:
        run = _continuous(model, rows, arguments.length, arguments.case)
    tokens: list[list[int]] = []
    log_probs: list[list[float]] = []
    for call in range(arguments.calls):
        started = _now()
        tokens, log_probs = run(call)
        seconds = _now() - started
        lengths = [len(row) for row in tokens]
        assert lengths == [arguments.length] * arguments.completions, (len(lengths), set(lengths))
        print("\n" + json.dumps({"seconds": seconds}), flush=True)
        if call == 0:
            peak = torch.cuda.max_memory_allocated() / 1e9 if GPU else 0.0
            apart = _apart(arguments.folder, rows[-1], tokens[-1], log_probs[-1])
            print(json.dumps({"peak_gb": peak, "log_probs_apart": apart}), flush=True)
    os._exit(0)  # nothing that a library does at the end is measured


@torch.no_grad()
def _apart(folder: Path, prompt: list[int], tokens: list[int], log_probs: list[float]) -> float:
    """Return the mean distance of a completion's log-probs from those of a forward pass in the same
    type."""
    dtype = torch.bfloat16 if GPU else torch.float32
    model = Qwen2ForCausalLM.from_pretrained(folder / "model", dtype=dtype).to(DEVICE).eval()
    logits = model(torch.tensor([prompt + tokens], device=DEVICE)).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.float(), -1)
    expected = expected.gather(-1, torch.tensor(tokens, device=DEVICE)[:, None])[:, 0]
    return (expected.cpu() - torch.tensor(log_probs)).abs().mean().item()


def _ours(model: Qwen2ForCausalLM, rows: list[list[int]], length: int) -> Run:
    """Return a call of our decoding as sampler=transformers makes it, with a float32 LM head."""
    if GPU:
        switch_on(model)
    policy = Policy(model, None, model.dtype, compiled=GPU)
    copied = policy.copied(policy.compute_dtype)

    def run(call: int) -> tuple[list[list[int]], list[list[float]]]:
        copied.load(policy.weights())
        uniform = uniform_numbers([(call, row) for row in range(len(rows))], length).to(DEVICE)
        tokens, log_probs = copied.decode(
            rows,
            length,
            True,
            draw=1.0 if GPU else draw,
            uniform=uniform,
            check=lambda: None,
            ends=[],
        )
        copied.unload()
        return tokens.cpu().tolist(), log_probs.cpu().tolist()

    return run


def _continuous(model: Qwen2ForCausalLM, rows: list[list[int]], length: int, case: str) -> Run:
    """Return a call of `generate_batch`, whose manager is kept from call to call.

    Each prompt is given once for each of its completions: with `num_return_sequences`,
    `generate_batch` of transformers 5.17 makes all of them and returns the first. The cache has
    room for the job and a quarter more, since transformers starts no further completion while less
    than 15 % is free. By default it takes all of the GPU, and the first call attends once over all
    of it.
    """
    implementation = "paged|sdpa" if case == "sdpa" else "flash_attention_2"
    model.set_attn_implementation(implementation)
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        max_new_tokens=length,
        eos_token_id=-1,
        pad_token_id=0,
    )
    pages = max(-(-(len(row) + length) // PAGE) for row in rows) + 1
    options = {
        "return_logprobs": True,
        "block_size": PAGE,
        "num_blocks": len(rows) * pages * 5 // 4,
        "max_batch_tokens": 8192 if GPU else 256,
    }
    if case == "compiled":
        options["default_compile_level"] = 1

    def run(_: int) -> tuple[list[list[int]], list[list[float]]]:
        outputs = model.generate_batch(
            inputs=rows,
            generation_config=settings,
            continuous_batching_config=ContinuousBatchingConfig(**options),
            persistent_manager=True,
        )
        errors = {str(x.error) for x in outputs.values() if x.error}
        assert not errors, errors
        completions = list(outputs.values())
        return [x.generated_tokens for x in completions], [x.logprobs for x in completions]

    return run


def _compare_greedy(folder: Path) -> None:
    """Say how many greedy tokens of a small model in float32 are equal; all must be."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**BODIES["tiny"])).to(DEVICE).eval().requires_grad_(False)
    prompts = torch.randint(1, 500, (4, 12)).tolist()
    prompts = [prompt[: 6 + 2 * place] for place, prompt in enumerate(prompts)]
    length = 24

    def likeliest(logits: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, tokens = torch.log_softmax(logits.float(), -1).max(-1)
        return tokens, log_probs

    policy = Policy(model, None, torch.float32)
    uniform = torch.zeros(len(prompts), length, device=DEVICE, dtype=torch.float64)
    ours, our_log_probs = policy.decode(
        prompts, length, True, draw=likeliest, uniform=uniform, check=lambda: None, ends=[]
    )
    model.set_attn_implementation("paged|sdpa")
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=length, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            return_logprobs=True, num_blocks=32, max_batch_tokens=128
        ),
    )
    theirs = [output.generated_tokens for output in outputs.values()]
    apart = (our_log_probs.cpu() - torch.tensor([x.logprobs for x in outputs.values()])).abs().max()
    equal = (ours.cpu() == torch.tensor(theirs)).sum().item()
    print(f"greedy in float32: {equal} of {ours.numel()} tokens equal, log-probs {apart:.1e} apart")
    assert equal == ours.numel()


def _now() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    raise SystemExit(main())
