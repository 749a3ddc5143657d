#!/bin/sh
# The benchmarks and tests/gpu on this machine's GPU: `make gpu`. Their limits add up to 40 minutes. Nobody has run all of them.
#
#     PYTHON=python PARTS="machine graph_bits step_xl2 profile" sh extras/benchmarks/gpu.sh
#
# PYTHON is the interpreter; PARTS names the parts to run, all by default. The results are appended to
# extras/benchmarks/results/gpu_<device>_<year>-<month>.md. The folder of the same name holds the time of every step, the timelines
# of the profile, and clock, power and load of the GPU during the parts. A part that fails or exceeds its time is noted, and the
# next one runs.
cd "$(dirname "$0")/../.." || exit 1
PYTHON=${PYTHON:-python}
tests="test_evaluation test_numerics test_runs test_steps"
# The parts of the first line tell whether CUDA graphs work and what they gain. The first three lines take at most 560 s each.
# step_xl2, profile and xl2_256_dense need more than 80 GB of GPU memory.
all="machine graph_bits step_xl2 profile"
all="$all cpp_wrapper trees one_core small"
all="$all xl2_256_tread xl2_256_dense s2_256 update attention resume denoiser"
all="$all step_b2 step_parallel long_xl2 $tests"
PARTS=${PARTS:-$all}

fail() {
    echo "$1" >&2
    exit 1
}

for part in $PARTS; do
    case " $all " in *" $part "*) ;; *) fail "PARTS=$part is not a part; use $all" ;; esac
done
"$PYTHON" -m extras.benchmarks.versions || fail "gpu: install what is missing; docs/speed_and_clusters.md names the wheels"
count='import sys, torch; n = torch.cuda.device_count(); print(n, torch.cuda.get_device_name()) if n else sys.exit(1)'
device=$("$PYTHON" -c "$count") || fail "gpu: torch finds no CUDA GPU on this machine"
num_gpus=${device%% *}
name=$(echo "${device#* }" | sed 's/^NVIDIA //' | tr '[:upper:]' '[:lower:]' | sed 's/[^a-z0-9]\{1,\}/-/g')
folder=extras/benchmarks/results/gpu_${name}_$(date -u +%Y-%m)
results=$folder.md
output=$(mktemp -d)
mkdir -p "$folder"
columns=timestamp,clocks.sm,power.draw,utilization.gpu,temperature.gpu
TZ=UTC nvidia-smi -i 0 --query-gpu=$columns --format=csv -lms 500 >>"$folder/clock.csv" 2>/dev/null &
sampler=$!
trap 'kill $sampler 2>/dev/null; rm -r "$output"' EXIT
trap 'exit 143' HUP INT TERM # not every shell runs the trap of EXIT after a signal
failed=

# run_part <name> <seconds> <arguments of Python>. `with` is a command that starts Python, such as env or taskset.
run_part() {
    part=$1 limit_sec=$2
    shift 2
    case " $PARTS " in *" $part "*) ;; *) return ;; esac
    # `timeout` also stops the launchers and compilers that the part started.
    timeout --kill-after=5 "$limit_sec" $with "$PYTHON" "$@" >"$output/stdout" 2>"$output/stderr"
    code=$?
    case $code in 0) state=done ;; 124) state="stopped after $limit_sec s" ;; *) state="exit code $code" ;; esac
    {
        printf '## %s: %s, %s\n\n    %spython %s\n\n' "$part" "$state" "$(date -u +%Y-%m-%dT%H:%MZ)" "${with:+$with }" "$*"
        if [ $code = 0 ]; then cat "$output/stdout"; else
            printf '```text\n'
            tail -c 4000 "$output/stdout"
            tail -c 4000 "$output/stderr"
            printf '\n```\n'
        fi
        echo
    } >>"$results"
    echo "$part: $state"
    [ $code = 0 ] || failed="$failed $part"
}

"$PYTHON" -m extras.benchmarks.versions >>"$results"
with=
benchmark="-m extras.benchmarks"
step="$benchmark step train.precision=bf16 steps=10"
xl2=model.backbone=DiT-XL/2
pytest="-m pytest -v -rs --no-header --tb=short -p no:cacheprovider --durations=5"
graph=train.cuda_graphs=step plain=train.cuda_graphs=none
both='variants=["model=dit","model=tread"]'
four="variants=[\"model=dit $graph\",\"model=tread $graph\",\"model=dit $plain\",\"model=tread $plain\"]"

# Unquoted variables are several arguments.
run_part machine 40 $benchmark machine
run_part graph_bits 190 $pytest tests/gpu/test_steps.py -k graph_gives
run_part step_xl2 170 $step rounds=5 $xl2 train.batch_size=32 "turns=$folder/step_xl2.json" "$four"
run_part profile 110 $benchmark profile $xl2 train.precision=bf16 train.batch_size=32 "traces=$folder/profile" "$four"

# Two alternatives of torch's compiler to CUDA graphs of our own, a single core, and small networks.
with="env TORCHINDUCTOR_CPP_WRAPPER=1"
run_part cpp_wrapper 170 $step rounds=3 $xl2 train.batch_size=32 $plain "turns=$folder/cpp_wrapper.json" "$both"
with="env TORCHINDUCTOR_CUDAGRAPHS=1"
run_part trees 110 $step rounds=3 $xl2 train.batch_size=32 $plain "turns=$folder/trees.json" "$both"
with="taskset -c 0"
run_part one_core 60 $step rounds=3 $xl2 train.batch_size=32 $plain "turns=$folder/one_core.json" model=tread
with=
s2=model.backbone=DiT-S/2 xs4=model.backbone=DiT-XS/4
small="\"model=dit $s2 $graph\",\"model=tread $s2 $graph\",\"model=dit $s2 $plain\",\"model=tread $s2 $plain\""
small="$small,\"model=dit $xs4 $graph\",\"model=tread $xs4 $graph\",\"model=dit $xs4 $plain\",\"model=tread $xs4 $plain\""
run_part small 100 $step rounds=3 train.batch_size=32 "turns=$folder/small.json" "variants=[$small]"

# Full batches, in two processes because of their memory. Then single parts of a step.
run_part xl2_256_tread 80 $step rounds=3 $xl2 train.batch_size=256 $graph "turns=$folder/xl2_256_tread.json" model=tread
run_part xl2_256_dense 90 $step rounds=3 $xl2 train.batch_size=256 $graph "turns=$folder/xl2_256_dense.json" model=dit
run_part s2_256 60 $step rounds=3 $s2 train.batch_size=256 "turns=$folder/s2_256.json" "$four"
run_part update 100 $benchmark update
run_part attention 15 $benchmark attention
run_part resume 60 $pytest tests/gpu/test_runs.py -k "resumed_run or save_that_takes"
run_part denoiser 40 $benchmark denoiser

run_part step_b2 75 $step rounds=3 model.backbone=DiT-B/2 train.batch_size=256 \
    'variants=["model=dit","model=tread","model=tread machine.compile=none","model=tread train.activation_checkpointing=blocks"]'
[ "$num_gpus" = 1 ] || run_part step_parallel 100 -m accelerate.commands.launch --multi_gpu --num_processes "$num_gpus" \
    --mixed_precision no --dynamo_backend no $step rounds=3 $xl2 "$both"
run_part long_xl2 60 $benchmark step train.precision=bf16 rounds=1 steps=400 $xl2 train.batch_size=32 $graph \
    "turns=$folder/long_xl2.json" model=tread
# These limits suit a machine with slow CPU cores, which compile and launch slowly.
for file in $tests; do
    case $file in test_steps) limit_sec=300 ;; test_runs) limit_sec=240 ;; test_numerics) limit_sec=120 ;; *) limit_sec=50 ;; esac
    run_part "$file" $limit_sec $pytest "tests/gpu/$file.py"
done

echo "results: $results"
[ -z "$failed" ] || fail "failed:$failed; $results says why"
