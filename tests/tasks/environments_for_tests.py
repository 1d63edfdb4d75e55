"""Environments for the tests: well-behaved ones and ones with faults.

Their processes import this file: it imports nothing large.
"""

import ctypes
import os
import time


class Counting:
    """Answers `rounds` turns with "+" and their number; the reward is the length of the last one.

    fail: a fault and the method that has it, such as "raise reply".
    at: the last digit of the seeds whose conversations have the fault.
    """

    def __init__(self, rounds=2, fail="", at=0):
        self.rounds = rounds
        self.fail = fail
        self.at = at

    def start(self, prompt):
        self.prompt = prompt
        self.seen = []
        self._fail_if_asked("start")
        return [{"role": "user", "content": f"{prompt.text}{prompt.seed % 10}="}]

    def reply(self, messages):
        self.seen.append(messages[-1])
        self._fail_if_asked("reply")
        messages.clear()  # It is a copy, which an environment may change.
        if len(self.seen) > self.rounds:
            return None
        return {"role": "user", "content": f"+{len(self.seen)}"}

    def score(self, messages):
        self._fail_if_asked("score")
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        return float(len(answers[-1])), {"answers": len(answers), "seen": len(self.seen)}

    def _fail_if_asked(self, method):
        verb, _, failing_method = self.fail.partition(" ")
        if failing_method != method or self.prompt.seed % 10 != self.at:
            return
        if verb == "raise":
            raise ValueError("broken")
        elif verb == "sleep":
            time.sleep(60)
        elif verb == "crash":
            ctypes.string_at(0)
        elif verb == "exit":
            os._exit(3)


class ExitsLater(Counting):
    """Ends its process in `start` while the file `flag` exists."""

    def __init__(self, flag):
        super().__init__()
        self.flag = flag

    def start(self, prompt):
        if os.path.exists(self.flag):
            os._exit(3)
        return super().start(prompt)


class Endless(Counting):
    """Answers every turn; the conversation ends by its turns or its length."""

    def __init__(self, message="+"):
        super().__init__()
        self.message = message

    def reply(self, messages):
        return {"role": "user", "content": self.message}

    def score(self, messages):
        return True, {}


class Odd(Counting):
    """Returns the entry of `values` for each method; if `moody`, no two starts are the same."""

    num_starts = 0

    def __init__(self, values=None, moody=False):
        super().__init__()
        self.values = values or {}
        self.moody = moody

    def start(self, prompt):
        self.prompt = prompt
        Odd.num_starts += 1
        content = str(Odd.num_starts) if self.moody else "?"
        return self.values.get("start", [{"role": "user", "content": content}])

    def reply(self, messages):
        return self.values.get("reply")

    def score(self, messages):
        value = self.values.get("score", (1, {}))
        return tuple(value) if isinstance(value, list) else value  # YAML has no tuples


class Unpicklable(Counting):
    def start(self, prompt):
        self.unpicklable = lambda: None
        return super().start(prompt)


class Mute:
    def start(self, prompt):
        return []


INSTANCE = Mute()
