#!/bin/sh
# The benchmarks of a step and tests/gpu on this machine's GPUs, in about 10 minutes on one H200: `make gpu`.
#
#     PYTHON=python PARTS="test_steps step_b2" sh extras/benchmarks/gpu.sh
#
# PYTHON is the interpreter; PARTS names the parts to run, all by default. The results are appended to
# extras/benchmarks/results/gpu_<device>_<year>-<month>.md. A part that fails or exceeds its time is noted there, and the next one runs.
cd "$(dirname "$0")/../.." || exit 1
PYTHON=${PYTHON:-python}
tests="test_evaluation test_numerics test_runs test_steps"
all="step_xl2 profile step_b2 step_parallel $tests"
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
results=extras/benchmarks/results/gpu_${name}_$(date -u +%Y-%m).md
output=$(mktemp -d)
trap 'rm -r "$output"' EXIT
failed=

# run_part <name> <seconds> <arguments of Python>
run_part() {
    part=$1 limit_sec=$2
    shift 2
    case " $PARTS " in *" $part "*) ;; *) return ;; esac
    # `timeout` also stops the launchers and compilers that the part started.
    timeout --kill-after=5 "$limit_sec" "$PYTHON" "$@" >"$output/stdout" 2>"$output/stderr"
    code=$?
    case $code in 0) state=done ;; 124) state="stopped after $limit_sec s" ;; *) state="exit code $code" ;; esac
    {
        printf '## %s: %s, %s\n\n    python %s\n\n' "$part" "$state" "$(date -u +%Y-%m-%dT%H:%MZ)" "$*"
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
step="-m extras.benchmarks step rounds=3 steps=10 train.precision=bf16"
xl2=model.backbone=DiT-XL/2
# Unquoted variables are several arguments.
run_part step_xl2 90 $step $xl2 train.batch_size=32 \
    'variants=["model=dit","model=tread","model=tread train.activation_checkpointing=blocks"]'
run_part profile 45 -m extras.benchmarks profile $xl2 train.batch_size=32 'variants=["model=dit","model=tread"]'
run_part step_b2 75 $step model.backbone=DiT-B/2 train.batch_size=256 \
    'variants=["model=dit","model=tread","model=tread train.compile=none"]'
[ "$num_gpus" = 1 ] || run_part step_parallel 100 -m accelerate.commands.launch --multi_gpu --num_processes "$num_gpus" \
    --mixed_precision no --dynamo_backend no $step $xl2 'variants=["model=dit","model=tread"]'
# These limits suit a machine with slow CPU cores, which compile and launch slowly.
for file in $tests; do
    case $file in test_steps) limit_sec=240 ;; test_runs) limit_sec=240 ;; test_numerics) limit_sec=120 ;; *) limit_sec=50 ;; esac
    run_part "$file" $limit_sec -m pytest -v -rs --no-header --tb=short -p no:cacheprovider --durations=5 "tests/gpu/$file.py"
done

echo "results: $results"
[ -z "$failed" ] || fail "failed:$failed; $results says why"
