"""The small server with the paths and forms of SGLang in place of vLLM's, started as vllm_server.py
is."""

from __future__ import annotations

import json

from vllm_server import Handler, main  # beside this file, which is a program


class OtherHandler(Handler):
    """server.engine: what answers."""

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

    def _generated(self, engine, prompt: list[int], settings: dict) -> list[dict]:
        scores = zip(prompt, engine.score({"prompt": prompt}), strict=True)
        given = [[entry and entry[str(token)]["logprob"], token, None] for token, entry in scores]
        asked = {
            "prompt": prompt,
            "max_tokens": settings["max_new_tokens"],
            "seed": settings["sampling_seed"],
        }
        choices = engine.complete(settings | asked | {"logprobs": 0, "return_token_ids": True})
        return [
            {
                "meta_info": {
                    "input_token_logprobs": given,
                    "output_token_logprobs": [
                        [value, token, None]
                        for value, token in zip(
                            choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True
                        )
                    ],
                    "finish_reason": {"type": choice["finish_reason"]},
                }
            }
            for choice in choices
        ]


if __name__ == "__main__":
    main(OtherHandler)
