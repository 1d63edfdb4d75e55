#!/bin/sh
# install.sh PYTHON FOLDER: installs the wheel of pgtk that lies in FOLDER for this Python, with the versions of
# constraints.txt, and sees that it answers. The Dockerfile runs it, and so does build.sh --venv.
set -eu
python=$1
folder=$2
wheel=$(ls "$folder"/pgtk-*.whl)
"$python" -m pip install --no-cache-dir --disable-pip-version-check -c "$folder/constraints.txt" \
    "pgtk[lora,math-verify,datasets,wandb,tensorboard] @ file://$wheel"
cd /
scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
"$scripts/pgtk" --version
"$scripts/pgtk" check loss=gspo aggregation=constant
