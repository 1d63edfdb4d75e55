"""An environment of the package verifiers (0.1.14 was tried), whose answers add one text message.

    pgtk task=conversation task.environment=of_verifiers.Verifiers "task.options={name: mine}"

The module `mine` has `load_environment`.
"""

import asyncio
import functools

import verifiers as vf

environment_of = functools.cache(vf.load_environment)


class Verifiers:
    def __init__(self, name):
        self.env = environment_of(name)

    def start(self, prompt):
        async def begin(row):
            state = await self.env.init_state(row, vf.ClientConfig(), "policy")
            await self.env.setup_state(state)
            return state

        rows = self.env.get_dataset()
        self.state = asyncio.run(begin(rows[prompt.seed % len(rows)]))
        return [
            {"role": message.role, "content": message.content} for message in self.state["prompt"]
        ]

    def reply(self, messages):
        async def answer():
            self.state["trajectory"].append({"prompt": messages[:-1], "completion": messages[-1:]})
            if not await self.env.is_completed(self.state):
                all_messages = await self.env.get_prompt_messages(self.state)
                if not await self.env.is_completed(self.state):
                    (message,) = all_messages[len(messages) :]
                    return {"role": message.role, "content": message.content}

        return asyncio.run(answer())

    def score(self, messages):
        self.state["completion"] = messages[len(self.state["prompt"]) :]
        asyncio.run(self.env.rubric.score_rollout(self.state))
        metrics = {name: float(value) for name, value in self.state["metrics"].items()}
        return float(self.state["reward"]), metrics
