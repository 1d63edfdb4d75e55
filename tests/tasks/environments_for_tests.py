"""Environments that behave in the ways that environments do; imported by their processes, so
nothing large."""

import ctypes
import os
import time


class Counting:
    """Says "+" and the number of the policy's turns so far, `rounds` times; the reward is that of
    the last message."""

    def __init__(self, rounds=2, fail="", at=0):
        self.rounds, self.fail, self.at = rounds, fail, at

    def start(self, prompt):
        self.prompt, self.seen = prompt, []
        self._maybe("start")
        return [{"role": "user", "content": f"{prompt.text}{prompt.seed % 10}="}]

    def reply(self, messages):
        self.seen.append(messages[-1])
        self._maybe("reply")
        messages.clear()  # its own copy
        return (
            {"role": "user", "content": f"+{len(self.seen)}"}
            if len(self.seen) <= self.rounds
            else None
        )

    def score(self, messages):
        self._maybe("score")
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        return float(len(answers[-1])), {"answers": len(answers), "seen": len(self.seen)}

    def _maybe(self, method):
        """Fails as `fail` says, in conversations whose seed ends with the digit `at`."""
        verb, _, where = self.fail.partition(" ")
        if where != method or self.prompt.seed % 10 != self.at:
            return
        if verb == "raise":
            raise ValueError("broken")
        elif verb == "sleep":
            time.sleep(60)
        elif verb == "crash":
            ctypes.string_at(0)
        elif verb == "exit":
            os._exit(3)


class Endless(Counting):
    """Until the turns, or the room, are spent."""

    def __init__(self, says="+"):
        super().__init__()
        self.says = says

    def reply(self, messages):
        return {"role": "user", "content": self.says}

    def score(self, messages):
        return True, {}


class Odd(Counting):
    """Returns what `values` says, by method; starts otherwise each time with `moody`."""

    made = 0

    def __init__(self, values=None, moody=False):
        super().__init__()
        self.values, self.moody = values or {}, moody

    def start(self, prompt):
        self.prompt, Odd.made = prompt, Odd.made + 1
        usual = [{"role": "user", "content": str(Odd.made) if self.moody else "?"}]
        return self.values.get("start", usual)

    def reply(self, messages):
        return self.values.get("reply")

    def score(self, messages):
        value = self.values.get("score", (1, {}))
        return tuple(value) if isinstance(value, list) else value  # YAML has no tuples


class Unpicklable(Counting):
    def start(self, prompt):
        self.held = lambda: None
        return super().start(prompt)


class Mute:
    def start(self, prompt):
        return []


INSTANCE = Mute()
