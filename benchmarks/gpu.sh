#!/usr/bin/env bash
# Everything that needs a GPU, in pieces of under ten minutes: ADOPT's step beside fused Adam's, a
# client's steps of a 135M model beside the compiled plain loop, and four clients on one GPU that train
# it for 300 steps by DES-LOC, Local ADOPT and FAVG+OPT. About half an hour on an H200.
#
#   benchmarks/gpu.sh [--rehearse] [--data FOLDER] [--results FOLDER] [PIECE ...]
#
# A piece that has a result is not repeated, and an interrupted training resumes, so run it again until
# it says "complete". FOLDER holds a text file or folder for each domain; without it the text is that of the
# quickstart. --rehearse runs the pieces on the CPU, with small models, into FOLDER/rehearsal. It leaves
# out bf16, and compiles the model only in client_step.
# Then: python benchmarks/gpu_tables.py draws docs/images/gpu.png and prints the tables.
set -uo pipefail
cd "$(dirname "$0")/.."

device=cuda
results=benchmarks/results
data=builtin
pieces=()
while [ $# -gt 0 ]; do
  case "$1" in
    --rehearse) device=cpu ;;
    --data) data=$(realpath "$2"); shift ;;
    --results) results=$2; shift ;;
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
    optimizer_step | client_step | des_loc | local_adopt | favg_opt) pieces+=("$1") ;;
    *) echo "$0: $1: no such option or piece; see --help" >&2; exit 2 ;;
  esac
  shift
done
[ ${#pieces[@]} -gt 0 ] || pieces=(optimizer_step client_step des_loc local_adopt favg_opt)
python=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
minutes=9
runs=${TMPDIR:-/tmp}/desloc-gpu-$device
[ "$device" = cuda ] || results=$results/rehearsal  # no result that a real run would skip on
mkdir -p "$results" "$runs"

if [ "$device" = cuda ]; then
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    { echo "$0: PyTorch finds no GPU here; --rehearse runs on the CPU" >&2; exit 2; }
  optimizer=(--compile --rounds 50) client=(--compile)
  # The vocabulary is the preset's, so that the work is; the text is read as bytes.
  model=(smollm2_135m data.streaming=false data.tokenizer=bytes data.weights=[]
    data.max_bytes=20000000 data.seq_len=2048 data.batch_size=8 data.micro_batch_size=null
    model.precision=bf16 model.compile=true)
  steps=300 every=32
else
  optimizer=(--compile --small --rounds 3) client=(--compile --windows 3 --steps 2)
  model=(desloc_adopt data.max_bytes=200000 model.hidden_size=32 model.intermediate_size=64
    model.num_attention_heads=2 data.seq_len=64 data.batch_size=2 evaluation.sequences=4)
  steps=24 every=4
fi

# train PIECE K_x K_u K_v: four clients in one process, which share one model on the device.
train() {
  "$python" -m flower_desloc.app.cli run "${model[@]}" "data.source=$data" "data.domains=[]" \
    data.partition=iid "run.name=$1" "run.steps=$steps" "run.eval_every=$((2 * every))" \
    run.checkpoint_every=2 run.resume=auto run.preflight=warn \
    "sync.params=$2" "sync.exp_avg=$3" "sync.exp_avg_sq=$4" lr_schedule.warmup_steps=$((steps / 8)) \
    --engine inprocess --output-dir "$runs" &&
    cp "$runs/$1/summary.json" "$results/gpu_$1.json"
}

run_piece() {
  case "$1" in
    optimizer_step) "$python" benchmarks/optimizer_step.py --device "$device" "${optimizer[@]}" \
      --json "$results/gpu_$1.json" ;;
    client_step) "$python" benchmarks/client_step.py --device "$device" "${client[@]}" \
      --json "$results/gpu_$1.json" ;;
    des_loc) train "$1" $every $((3 * every)) $((6 * every)) ;;
    local_adopt) train "$1" $every $every $every ;;
    favg_opt) train "$1" $every never never ;;
  esac
}

export -f run_piece train
export python device results data runs steps every
failed=0
for piece in "${pieces[@]}"; do
  if [ -f "$results/gpu_$piece.json" ]; then
    echo "== $piece: has a result in $results"
    continue
  fi
  echo "== $piece, $(date +%T)"
  declare -p optimizer client model > "$runs/arrays"  # arrays cannot be exported
  timeout --signal=INT --kill-after=30 "${minutes}m" \
    bash -c "source '$runs/arrays'; run_piece $piece" || failed=$?
  [ -f "$results/gpu_$piece.json" ] || echo "== $piece: not complete ($failed); run this again"
done
for piece in "${pieces[@]}"; do
  [ -f "$results/gpu_$piece.json" ] || exit 1
done
echo "complete: $results/gpu_*.json"
