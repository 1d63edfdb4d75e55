"""Several tries at a problem of reasoning-gym.

    pgtk task=conversation task.environment=tries.Tries "task.options={dataset: chain_sum}"

Tried with reasoning-gym 0.1.25.
"""

import reasoning_gym


class Tries:
    def __init__(self, dataset, **options):
        self.dataset, self.options = dataset, options

    def start(self, prompt):
        self.data = reasoning_gym.create_dataset(
            self.dataset, seed=prompt.seed, size=1, **self.options
        )
        return [{"role": "user", "content": self.data[0]["question"]}]

    def reply(self, messages):
        if self._score(messages) == 1:
            return None
        return {"role": "user", "content": "That is not right. Try again."}

    def score(self, messages):
        return float(self._score(messages)), {}

    def _score(self, messages):
        return self.data.score_answer(messages[-1]["content"].strip(), self.data[0])
