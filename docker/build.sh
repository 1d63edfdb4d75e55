#!/usr/bin/env bash
# docker/build.sh [TAG]               builds the image (default: pgtk) of the code that lies here
# docker/build.sh --save FILE [TAG]   writes it into a file as well, for a machine without a network (docker load -i FILE) or
#                                     one without docker (apptainer build pgtk.sif docker-archive:FILE)
# docker/build.sh --venv DIR          runs the same installation in a new virtual environment instead, without docker
#
#   docker run --gpus all --ipc host --user "$(id -u):$(id -g)" -e HOME=/work -v "$PWD":/work pgtk loss=gspo
#   docker run --network host --user "$(id -u):$(id -g)" -e HOME=/work -v "$PWD":/work pgtk ui
#
# pgtk ui listens on 127.0.0.1 alone, which is the host's with --network host. vLLM runs in an environment of its own
# (docs/rollouts.md), which is no part of the image.
set -euo pipefail
mode=image
case "${1:-}" in
    --save | --venv)
        mode=$1
        target=$(realpath -m -- "${2:?docker/build.sh $1 needs a path}")
        shift 2
        ;;
esac
tag=${1:-pgtk}
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
"$PYTHON" -m build --wheel --outdir "$context" ..
cp Dockerfile install.sh ../constraints.txt "$context"
if [ "$mode" = --venv ]; then
    "$PYTHON" -m venv "$target"
    sh install.sh "$target/bin/python" "$context"
    exit
fi
docker build --tag "$tag" "$context"
if [ "$mode" = --save ]; then
    docker save --output "$target" "$tag"
fi
