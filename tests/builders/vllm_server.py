"""A small server with as much of vLLM's protocol as pgtk uses, around a real model, with faults.

    python vllm_server.py [--fault NAME] [--after CALLS] [--marks FILE] [--together COUNT] serve
    FOLDER --port PORT [options of vLLM]

pgtk starts this program as it starts vLLM (`sampler.executable`). It is as strict as vLLM: it
refuses, in vLLM's words, unknown options, a folder without config.json, weights that are missing or
that the model does not have, and requests longer than the model's context. Like vLLM it has a child
process, whose process id it prints.

--marks: the file in which it notes how it was started, and each call; PORT in the name stands for
its port. --together: it is up once this file has the starts of so many servers, or of a multiple of
that. --fault begins after --after calls for completions. `POST /fault {"name": ..., "after": ...}`
sets another one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
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

OPTIONS = (
    "host",
    "max-num-seqs",
    "gpu-memory-utilization",
    "tensor-parallel-size",
    "generation-config",
    "seed",
    "worker-extension-cls",
    "api-server-count",
    "kv-cache-memory-bytes",
)
SWITCHES = (
    "skip-tokenizer-init",
    "enforce-eager",
    "enable-sleep-mode",
    "disable-log-stats",
    "disable-uvicorn-access-log",
)
NOTED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_API_KEY",
    "RANK",
)


class Engine:
    """The model, from which one request at a time is sampled."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.lock = threading.Lock()
        self.running = threading.Event()  # clear while the server is paused
        self.running.set()
        self.calls = 0
        self.asleep = False
        self.cached: dict[tuple, object] = {}
        """The weights that first saw a prompt, by its cache salt and its tokens."""
        torch.set_num_threads(1)
        longest = positions_of(options.folder)
        options.max_model_len = options.max_model_len or longest
        if options.max_model_len > longest:
            sys.exit(
                f"Value error, User-specified max_model_len ({options.max_model_len}) is greater "
                "than the derived one"
            )
        self.tokenizer = None
        if not options.skip_tokenizer_init:
            self.tokenizer = Tokenizer.from_file(f"{options.folder}/tokenizer.json")
        self.model = model_of(options.folder, getattr(torch, options.dtype))
        self._load(self._weights_in(options.folder))
        self.worker = self._worker()

    def _worker(self):
        """Return vLLM's worker; it inherits from the class of --worker-extension-cls, whose methods
        can be called over HTTP."""
        engine = self
        bases = ()
        extension = self.options.worker_extension_cls
        if extension:
            module, _, attribute = extension.rpartition(".")
            bases = (getattr(importlib.import_module(module), attribute),)

        class Worker(*bases):
            device = torch.device("cpu")

            def reload_weights(self, weights_iterator=None, weights_path=None):
                engine.reload(dict(weights_iterator or engine._weights_in(weights_path)))

        return Worker()

    def forget(self) -> None:
        """Lose the weights, as in vLLM's sleep of level 2."""
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

    def _weights_in(self, folder: str) -> dict:
        """Read the weights in a folder, by name."""
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
        """Copy weights into the model, which must be all that it has.

        A weight with several names, as that of a tied head, needs only one of them.
        """
        parameters = self.model.state_dict()
        unknown = sorted(weights.keys() - parameters.keys())
        if unknown:
            raise ValueError(
                f"There is no module or parameter named '{unknown[0]}' in "
                f"{type(self.model).__name__}"
            )
        for name, tensor in weights.items():
            if tensor.shape != parameters[name].shape:
                raise ValueError(
                    f"Attempted to load weight {name} of {[*tensor.shape]} into "
                    f"{[*parameters[name].shape]}"
                )
            parameters[name].copy_(tensor)
        loaded = {parameters[name].data_ptr() for name in weights}
        missing = sorted(
            name for name, tensor in parameters.items() if tensor.data_ptr() not in loaded
        )
        if missing:
            raise ValueError(f"Following weights were not initialized from checkpoint: {missing}")

    def score(self, body: dict) -> list[dict | None]:
        """Return the log-probs of a prompt's tokens, in the form of vLLM's answer."""
        tokens = body["prompt"]
        log_probs = self.model(torch.tensor(tokens)).float().log_softmax(-1)
        rows = zip(log_probs, tokens[1:], strict=False)
        return [
            None,
            *({str(token): {"logprob": float(row[token]), "rank": 1}} for row, token in rows),
        ]

    def complete(self, body: dict) -> list[dict]:
        """Return completions of a prompt, in the form of vLLM's answer."""
        if self.failing("another_prompt"):
            body = body | {"prompt": [*body["prompt"][1:], body["prompt"][0]]}
        if self.failing("ignores_temperature"):
            body = body | {"temperature": 1.0}
        model = self.cached.setdefault((body.get("cache_salt"), *body["prompt"]), self.model)
        # Choices that have begun alike, at least with the prompt, have the same next logits.
        next_logits = functools.cache(lambda *tokens: model(torch.tensor(tokens))[-1].float())
        choices = []
        for index in range(body["n"]):
            generator = torch.Generator()
            if body.get("seed") is None:
                generator.seed()
            else:
                generator.manual_seed(body["seed"] + index)
            choices.append(self._choice(body, next_logits, generator))
        return choices if not self.failing("identical") else [choices[0]] * len(choices)

    def _text(self, tokens: list[int]) -> str:
        """Return the text of tokens; some decoders know that of a token only after the next one."""
        known = tokens[: -1 if self.failing("late_stop") else None]
        return self.tokenizer.decode(known, skip_special_tokens=False)

    def _choice(self, body: dict, next_logits, generator) -> dict:
        """Sample a completion, token by token, until a stop or the limit."""
        tokens = []
        log_probs = []
        top = []
        reason = "length"
        stop_reason = None
        while len(tokens) < body["max_tokens"]:
            logits = next_logits(*body["prompt"], *tokens)
            greedy = body["temperature"] == 0
            scaled = logits / (1.0 if greedy else body["temperature"])
            top_k = body.get("top_k") or 0
            if top_k > 0:
                scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -float("inf"))
            top_p = body.get("top_p", 1.0)
            if top_p < 1:
                scaled = within(scaled, top_p)
            probabilities = scaled.softmax(-1)
            if greedy:
                token = int(probabilities.argmax())
            else:
                token = int(torch.multinomial(probabilities, 1, generator=generator))
            raw = self.options.logprobs_mode == "raw_logprobs" or self.failing("unprocessed")
            tokens.append(token)
            log_probs.append(float((logits if raw else scaled).log_softmax(-1)[token]))
            likeliest = scaled.log_softmax(-1).topk(body.get("logprobs") or 0)
            others = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
            pairs = [(token, log_probs[-1]), *others]
            top.append({f"token_id:{other}": max(value, -9999.0) for other, value in pairs})
            if token in body["stop_token_ids"]:
                reason = "stop"
                break
            stops = [stop for stop in body.get("stop") or [] if stop in self._text(tokens)]
            if stops:
                reason = "stop"
                stop_reason = stops[0]
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
            "logprobs": None
            if body.get("logprobs") is None
            else {"token_logprobs": log_probs, "top_logprobs": top},
            "token_ids": tokens if body.get("return_token_ids") else None,
            "prompt_token_ids": body["prompt"] if body.get("return_token_ids") else None,
        }


class Handler(BaseHTTPRequestHandler):
    """Answers requests with the model of `server.engine`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        engine = self.server.engine
        url = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self._has_key():
            return self._answer(401, {"error": "Unauthorized"})
        body = json.loads(text) if text else {}
        if url.path == "/v1/completions":
            mark(
                engine.options,
                f"complete {'score' if 'prompt_logprobs' in body else body.get('seed')}",
            )
            engine.running.wait()
        else:
            mark(engine.options, " ".join(filter(None, [self.path, body.get("method")])))
        with engine.lock:
            if url.path == "/fault":
                engine.options.fault = body["name"]
                engine.options.after = body["after"]
                engine.calls = 0
                self._answer(200)
            elif url.path == "/v1/completions":
                self._complete(engine, body)
            elif engine.options.fault == "no_development_mode":
                self._answer(404)
            elif url.path == "/collective_rpc":
                try:
                    getattr(engine.worker, body["method"])(
                        *body.get("args", ()), **body.get("kwargs", {})
                    )
                except Exception as error:
                    return self._answer(500, {"error": f"{type(error).__name__}: {error}"})
                self._answer(200, {"results": [None]})
            elif url.path in ("/pause", "/resume"):
                if url.path == "/pause":
                    engine.running.clear()
                else:
                    engine.running.set()
                self._answer(200)
            elif url.path in ("/reset_prefix_cache", "/sleep", "/wake_up"):
                if url.path == "/reset_prefix_cache":
                    engine.cached.clear()
                if url.query == "level=2":
                    engine.forget()
                engine.asleep = url.path == "/sleep" or (
                    engine.asleep and "kv_cache" not in url.query
                )
                self._answer(200)
            else:
                self._answer(404)
        return None

    def _has_key(self) -> bool:
        """Return whether the request may be answered; vLLM asks for its key only below /v1."""
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
        most = engine.options.max_logprobs
        if (body.get("logprobs") or 0) > most:
            return self._answer(
                400,
                {
                    "error": f"Requested sample logprobs of {body['logprobs']}, which is greater "
                    f"than max allowed: {most}"
                },
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
        if content is None:
            text = b""
        elif isinstance(content, str):
            text = content.encode()
        else:
            text = json.dumps(content).encode()
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
                self.close_connection = True
                text = text[:12]
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


def within(logits, top_p: float):
    """Return logits of which only the likeliest tokens of this probability together are finite."""
    ordered, places = logits.sort(descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return logits.index_fill(-1, places[before >= top_p], -float("inf"))


def mark(options: argparse.Namespace, line: str) -> None:
    if options.marks:
        with open(options.marks, "a") as file:
            file.write(f"{line}\n")


def num_started(options: argparse.Namespace) -> int:
    lines = Path(options.marks).read_text().splitlines()
    return sum(line.startswith("start ") for line in lines)


def main(handler: type[Handler] = Handler) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault")
    parser.add_argument("--after", type=int, default=0)
    parser.add_argument("--marks")
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("folder")
    parser.add_argument("--port", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-logprobs", type=int, default=20)
    for name in OPTIONS:
        parser.add_argument(f"--{name}")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    options.marks = options.marks and options.marks.replace("PORT", str(options.port))
    variables = {name: os.environ.get(name) for name in NOTED_VARIABLES}
    mark(options, f"start {json.dumps([variables, sys.argv[1:], os.environ.get('PYTHONPATH')])}")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    print(f"engine {child.pid} of server {os.getpid()} with {options.folder}", flush=True)
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
    # Imported here, since they take seconds where they are not loaded, and most faults of a start
    # need none of them.
    global torch, load_file, Tokenizer, model_of, positions_of
    import torch
    from safetensors.torch import load_file
    from served_models import model_of, positions_of  # in the same folder
    from tokenizers import Tokenizer

    engine = Engine(options)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler)
    server.engine = engine
    while options.together > 1 and num_started(options) % options.together:
        time.sleep(0.02)
    mark(options, "up")
    server.serve_forever()


if __name__ == "__main__":
    main()
