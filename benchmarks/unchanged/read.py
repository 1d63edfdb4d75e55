"""Reads what is compared, with the packages of a tree's environment.

It knows file formats, and no module of pgtoolkit.

usage: python read.py yaml    (JSON {name: YAML text} on stdin -> JSON {name: {dotted key: value}})
       python read.py public           (imports pgtoolkit: its public names and signatures)
"""

import inspect
import json
import sys
from collections.abc import Iterator


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) of everything in nested dictionaries."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from leaves(below, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def of_yaml() -> dict:
    import yaml  # here, since `public` needs none

    return {name: dict(leaves(yaml.safe_load(text))) for name, text in json.load(sys.stdin).items()}


def public() -> dict:
    import pgtoolkit
    from pgtoolkit import errors

    names = {}
    for name in sorted(set(dir(pgtoolkit)) | set(pgtoolkit.__all__)):
        if name.startswith("__"):
            continue
        value = getattr(pgtoolkit, name)
        signature = str(inspect.signature(value)) if callable(value) else type(value).__name__
        if inspect.ismodule(value) and name in pgtoolkit.__all__:
            below = [
                word for word in getattr(value, "__all__", dir(value)) if not word.startswith("_")
            ]
            signature = "module: " + ", ".join(sorted(below))
        names[name] = signature
    statuses = {
        name: value.exit_status
        for name, value in vars(errors).items()
        if isinstance(value, type) and hasattr(value, "exit_status")
    }
    return {"names": names, "in __all__": sorted(pgtoolkit.__all__), "exit statuses": statuses}


kind = sys.argv[1]
print(json.dumps({"yaml": of_yaml, "public": public}[kind]()))
