"""Asks the Hugging Face hub once whether it answers. Without a network its client would ask again
for half a minute, for each file."""

from __future__ import annotations

import functools


@functools.cache  # the files of one run are then all from the hub, or all from the cache
def answers(name: str, kind: str = "model") -> bool:
    """Return whether the hub answers when it is asked once for a repository, be it with an error.

    name: of the repository. kind: "model" or "dataset".
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    file = hf_hub_url(name, "README.md", repo_type=kind)
    try:
        get_hf_file_metadata(file)
    except HfHubHTTPError:  # it answers that it has no such file, or keeps it from this user
        return True
    except Exception:  # each version of the client is built on another package with its own errors
        return False
    return True


def silence() -> str:
    """Return a sentence on why the hub does not answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE keeps the hub from being asked."
    return f"The hub, {constants.ENDPOINT}, does not answer."
