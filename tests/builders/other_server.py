"""The small server with the paths and messages of SGLang in place of vLLM's, started like
vllm_server.py."""

from __future__ import annotations

import json

from vllm_server import Engine, Handler, main  # in the same folder: this file is a program


class OtherHandler(Handler):
    """Answers requests with the model of `server.engine`."""

    def do_POST(self) -> None:
        engine = self.server.engine
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        with engine.lock:
            if self.path == "/generate":
                self._answer(
                    200, self._generated(engine, body["input_ids"], body["sampling_params"])
                )
            elif self.path == "/update_weights_from_disk":
                engine.worker.reload_weights(weights_path=body["model_path"])
                self._answer(200, {"success": True})
            elif self.path == "/flush_cache":
                engine.cached.clear()
                self._answer(200)
            else:
                self._answer(404)

    def _generated(self, engine: Engine, prompt: list[int], settings: dict) -> list[dict]:
        scores = zip(prompt, engine.score({"prompt": prompt}), strict=True)
        input_log_probs = [
            [entry and entry[str(token)]["logprob"], token, None] for token, entry in scores
        ]
        body = settings | {
            "prompt": prompt,
            "max_tokens": settings["max_new_tokens"],
            "seed": settings["sampling_seed"],
            "logprobs": 0,
            "return_token_ids": True,
        }
        answers = []
        for choice in engine.complete(body):
            output = zip(choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True)
            information = {
                "input_token_logprobs": input_log_probs,
                "output_token_logprobs": [[log_prob, token, None] for log_prob, token in output],
                "finish_reason": {"type": choice["finish_reason"]},
            }
            answers.append({"meta_info": information})
        return answers


if __name__ == "__main__":
    main(OtherHandler)
