"""A small server that speaks as much of vLLM's protocol as pgtk uses, around a real model, with
faults to choose.

    python vllm_server.py [--fault NAME] [--after CALLS] [--marks FILE] serve FOLDER --port PORT
    [options of vLLM]

It is a program of its own: pgtk starts it as it starts vLLM (`sampler.executable`). It is as strict
    as vLLM: options
that it does not know, a folder without config.json, weights that are missing or belong to no part
of the model, and what is longer than the model's context are refused in vLLM's words. Like vLLM it
has a child process, whose number it prints. --marks: where it notes how it was started, and each
call; PORT in it is its own. The fault begins after so many calls for completions; `POST /fault
{"name": ..., "after": ...}` sets another one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


class Engine:
    """The model, sampled from one request at a time."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.lock = threading.Lock()
        self.running = threading.Event()  # not while it is paused
        self.running.set()
        self.calls = 0
        self.asleep = False
        self.cached: dict[tuple, object] = {}  # which weights have seen a prompt, as of its salt
        torch.set_num_threads(1)
        config = AutoConfig.from_pretrained(options.folder)
        longest = config.max_position_embeddings
        options.max_model_len = options.max_model_len or longest
        if options.max_model_len > longest:
            sys.exit(
                f"Value error, User-specified max_model_len ({options.max_model_len}) is greater "
                "than the derived one"
            )
        self.tokenizer = (
            None if options.skip_tokenizer_init else AutoTokenizer.from_pretrained(options.folder)
        )
        self.model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, options.dtype)
        ).eval()
        self._load(self._of(options.folder))
        self.worker = self._worker()

    def _worker(self):
        """vLLM's worker with the class that was asked for, by whose methods it is called from
        outside."""
        engine, bases = self, ()
        if name := self.options.worker_extension_cls:
            module, _, attribute = name.rpartition(".")
            bases = (getattr(importlib.import_module(module), attribute),)

        class Worker(*bases):
            device = torch.device("cpu")

            def reload_weights(self, weights_iterator=None, weights_path=None):
                engine.reload(dict(weights_iterator or engine._of(weights_path)))

        return Worker()

    def forget(self) -> None:
        """Level 2 of sleep: the numbers are gone."""
        self.model = copy.deepcopy(self.model)
        for weight in self.model.parameters():
            weight.data.fill_(torch.nan)

    def failing(self, fault: str) -> bool:
        return self.options.fault == fault and self.calls > self.options.after

    def reload(self, weights: dict) -> None:
        if self.options.fault == "stale":
            return
        self.model = copy.deepcopy(self.model)
        self._load(weights)

    def _of(self, folder: str) -> dict:
        """The weights in a folder."""
        index = Path(folder) / "model.safetensors.index.json"
        files = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        loaded = {
            name: load_file(Path(folder) / name)
            for name in sorted({*files.values()}) or ["model.safetensors"]
        }
        weights = {name: tensor for tensors in loaded.values() for name, tensor in tensors.items()}
        if files and files != {name: file for file, tensors in loaded.items() for name in tensors}:
            raise ValueError("the index does not name the tensors of the files")
        return weights

    def _load(self, weights: dict) -> None:
        """Exactly the weights that the model has; one that has several names, as that of a tied
        head, has one there."""
        rooms = self.model.state_dict()
        if strange := sorted(weights.keys() - rooms.keys()):
            raise ValueError(
                f"There is no module or parameter named '{strange[0]}' in "
                f"{type(self.model).__name__}"
            )
        for name, tensor in weights.items():
            if tensor.shape != rooms[name].shape:
                raise ValueError(
                    f"Attempted to load weight {name} of {[*tensor.shape]} into "
                    f"{[*rooms[name].shape]}"
                )
            rooms[name].copy_(tensor)
        given = {rooms[name].data_ptr() for name in weights}
        if missing := sorted(name for name, room in rooms.items() if room.data_ptr() not in given):
            raise ValueError(f"Following weights were not initialized from checkpoint: {missing}")

    def score(self, body: dict) -> list[dict | None]:
        """The log-probs of a prompt's own tokens, in the form of vLLM's answer."""
        tokens = body["prompt"]
        with torch.no_grad():
            log_probs = self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        rows = zip(log_probs, tokens[1:], strict=False)
        return [
            None,
            *({str(token): {"logprob": float(row[token]), "rank": 1}} for row, token in rows),
        ]

    def complete(self, body: dict) -> list[dict]:
        """The choices of one prompt, in the form of vLLM's answer."""
        if self.failing("another_prompt"):
            body = body | {"prompt": [*body["prompt"][1:], body["prompt"][0]]}
        if self.failing("ignores_temperature"):
            body = body | {"temperature": 1.0}
        model = self.cached.setdefault((body.get("cache_salt"), *body["prompt"]), self.model)
        choices = []
        for index in range(body["n"]):
            generator = torch.Generator()
            if body.get("seed") is None:
                generator.seed()
            else:
                generator.manual_seed(body["seed"] + index)
            choices.append(self._choice(body, model, generator))
        return choices if not self.failing("identical") else [choices[0]] * len(choices)

    def _choice(self, body: dict, model, generator) -> dict:
        tokens, log_probs, reason, stop_reason = [], [], "length", None
        while len(tokens) < body["max_tokens"]:
            with torch.no_grad():
                logits = (
                    model(torch.tensor([[*body["prompt"], *tokens]]), use_cache=False)
                    .logits[0, -1]
                    .float()
                )
            greedy = body["temperature"] == 0
            scaled = logits / (1.0 if greedy else body["temperature"])
            if (top_p := body.get("top_p", 1.0)) < 1:
                scaled = TopPLogitsWarper(top_p)(None, scaled[None])[0]
            chances = scaled.softmax(-1)
            token = int(
                chances.argmax() if greedy else torch.multinomial(chances, 1, generator=generator)
            )
            raw = self.options.logprobs_mode == "raw_logprobs" or self.failing("unprocessed")
            kept = logits if raw else scaled
            tokens.append(token)
            log_probs.append(float(kept.log_softmax(-1)[token]))
            if token in body["stop_token_ids"]:
                reason = "stop"
                break
            # Some decoders give a token's text only with the next one.
            text = (
                self.tokenizer.decode(tokens[: -1 if self.failing("late_stop") else None])
                if body.get("stop")
                else ""
            )
            if found := [one for one in body.get("stop", []) if one in text]:
                reason, stop_reason = "stop", found[0]
                break
        if self.failing("foreign_token"):
            tokens[0] = logits.numel() + 5
        if self.failing("zeros"):
            log_probs = [0.0] * len(tokens)
        if self.failing("nan_log_probs"):
            log_probs[-1] = float("nan")
        if self.failing("null_log_probs"):
            log_probs[-1] = None
        return {
            "finish_reason": reason,
            "stop_reason": stop_reason,
            "text": "",
            "logprobs": None if body.get("logprobs") is None else {"token_logprobs": log_probs},
            "token_ids": tokens if body.get("return_token_ids") else None,
            "prompt_token_ids": body["prompt"] if body.get("return_token_ids") else None,
        }


class Handler(BaseHTTPRequestHandler):
    """server.engine: what answers."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        engine, path = self.server.engine, urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self._may():
            return self._answer(401, {"error": "Unauthorized"})
        body = json.loads(text) if text else {}
        if path.path == "/v1/completions":
            mark(
                engine.options,
                f"complete {'score' if 'prompt_logprobs' in body else body.get('seed')}",
            )
            engine.running.wait()
        else:
            mark(engine.options, " ".join(filter(None, [self.path, body.get("method")])))
        with engine.lock:
            if path.path == "/fault":
                engine.options.fault, engine.options.after, engine.calls = (
                    body["name"],
                    body["after"],
                    0,
                )
                self._answer(200)
            elif path.path == "/v1/completions":
                self._complete(engine, body)
            elif engine.options.fault == "no_development_mode":
                self._answer(404)
            elif path.path == "/collective_rpc":
                try:
                    getattr(engine.worker, body["method"])(
                        *body.get("args", ()), **body.get("kwargs", {})
                    )
                except Exception as error:
                    return self._answer(500, {"error": f"{type(error).__name__}: {error}"})
                self._answer(200, {"results": [None]})
            elif path.path in ("/pause", "/resume"):
                (engine.running.clear if path.path == "/pause" else engine.running.set)()
                self._answer(200)
            elif path.path in ("/reset_prefix_cache", "/sleep", "/wake_up"):
                if path.path == "/reset_prefix_cache":
                    engine.cached.clear()
                if path.query == "level=2":
                    engine.forget()
                engine.asleep = path.path == "/sleep" or (
                    engine.asleep and "kv_cache" not in path.query
                )
                self._answer(200)
            else:
                self._answer(404)
        return None

    def _may(self) -> bool:
        """As vLLM, which guards these paths alone."""
        key = os.environ.get("VLLM_API_KEY")
        return (
            not key
            or not self.path.startswith("/v1")
            or self.headers.get("Authorization") == f"Bearer {key}"
        )

    def _complete(self, engine: Engine, body: dict) -> None:
        engine.calls += "prompt_logprobs" not in body
        if engine.failing("dies"):
            print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(1)
        for_a_moment = (
            engine.failing("busy_for_a_moment") and engine.calls < engine.options.after + 3
        )
        if engine.failing("busy") or for_a_moment:
            return self._answer(503, {"error": "busy"})
        if body.get("stop") and engine.tokenizer is None:
            return self._answer(400, {"error": "no tokenizer, no stop strings"})
        if body.get("temperature", 1.0) < 0:
            return self._answer(400, {"error": "temperature must be non-negative"})
        if len(body["prompt"]) + body["max_tokens"] > engine.options.max_model_len:
            return self._answer(
                400,
                {"error": f"This model's maximum context length is {engine.options.max_model_len}"},
            )
        if engine.asleep:
            return self._answer(500, {"error": "the engine is asleep"})
        if engine.failing("no_json"):
            return self._answer(200, "<html>a proxy</html>")
        if engine.failing("sends_on"):
            return self._answer(302)
        if "prompt_logprobs" in body:
            return self._answer(200, {"choices": [{"prompt_logprobs": engine.score(body)}]})
        return self._answer(200, {"choices": engine.complete(body)})

    def _answer(self, status: int, content: object = None) -> None:
        if self.server.engine.failing("endless"):
            return self._endless()
        text = (
            b""
            if content is None
            else (content if isinstance(content, str) else json.dumps(content)).encode()
        )
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/health")
        if self.server.engine.failing("gzip"):
            text = gzip.compress(text + b" " * 2**24)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            if self.server.engine.failing("trickles"):
                for place in range(12):
                    self.wfile.write(text[place : place + 1])
                    time.sleep(0.25)
                text = text[12:]
            if self.server.engine.failing("breaks_off"):
                self.close_connection, text = True, text[:12]
            self.wfile.write(text)
        return None

    def _endless(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            for _ in range(2**12):  # 256 MiB
                self.wfile.write(b"10000\r\n" + b" " * 2**16 + b"\r\n")
            mark(self.server.engine.options, "endless to its end")

    def log_message(self, *_: object) -> None:
        pass


def mark(options: argparse.Namespace, line: str) -> None:
    if options.marks:
        with open(options.marks, "a") as file:
            file.write(f"{line}\n")


def main(handler: type[Handler] = Handler) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault")
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--marks")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("folder")
    parser.add_argument("--port", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--max-model-len", type=int)
    for name in (
        "host",
        "max-num-seqs",
        "gpu-memory-utilization",
        "tensor-parallel-size",
        "generation-config",
        "seed",
    ):
        parser.add_argument(f"--{name}")
    for name in ("worker-extension-cls", "api-server-count", "kv-cache-memory-bytes"):
        parser.add_argument(f"--{name}")
    for name in ("skip-tokenizer-init", "enforce-eager", "enable-sleep-mode", "disable-log-stats"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--disable-uvicorn-access-log", action="store_true")
    options = parser.parse_args()
    options.marks = options.marks and options.marks.replace("PORT", str(options.port))
    names = (
        "CUDA_VISIBLE_DEVICES",
        "VLLM_SERVER_DEV_MODE",
        "VLLM_USE_V2_MODEL_RUNNER",
        "VLLM_API_KEY",
        "RANK",
    )
    variables = {name: os.environ.get(name) for name in names}
    mark(options, f"start {json.dumps([variables, sys.argv[1:], os.environ.get('PYTHONPATH')])}")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    print(f"engine {child.pid} of server {os.getpid()}", flush=True)
    if options.fault == "does_not_start":
        sys.exit("ValueError: free memory on device is less than desired GPU memory utilization")
    if options.fault == "model_refused":
        print("ValidationError: 1 validation error for VllmConfig", flush=True)
        sys.exit(
            "  Value error, Model Runner V2 does not yet support: stock torch.compile "
            "[type=value_error]"
        )
    if not Path(options.folder, "config.json").is_file():
        sys.exit(
            f"ValueError: Invalid repository ID or local directory specified: '{options.folder}'."
        )
    # Only now: most faults of a start are told at once.
    global torch, load_file, AutoConfig, AutoModelForCausalLM, AutoTokenizer, TopPLogitsWarper
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.generation import TopPLogitsWarper

    engine = Engine(options)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler)
    server.engine = engine
    mark(options, "up")
    server.serve_forever()


if __name__ == "__main__":
    main()
