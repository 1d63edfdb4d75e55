#!/usr/bin/env bash
# docker/build.sh [TAG]         builds the image (default: pgtk) of the code that lies here
# docker/build.sh --venv DIR    runs the same installation in a new virtual environment instead, without docker
#
#   docker run --gpus all --ipc host --user "$(id -u):$(id -g)" -e HOME=/work -v "$PWD":/work pgtk loss=gspo aggregation=constant
#
# vLLM runs in an environment of its own (docs/rollouts.md), which is no part of the image.
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
"$PYTHON" -m build --wheel --outdir "$context" ..
cp Dockerfile install.sh ../constraints.txt "$context"
if [ "${1:-}" = --venv ]; then
    "$PYTHON" -m venv "$2"
    sh install.sh "$(cd "$2" && pwd)/bin/python" "$context"
else
    docker build --tag "${1:-pgtk}" "$context"
fi
