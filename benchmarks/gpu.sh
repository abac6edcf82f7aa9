#!/usr/bin/env bash
# The GPU campaign: correctness, then speed, then memory.
#
#   PARTS="correctness ops" benchmarks/gpu.sh                  rows are appended to benchmarks/results/*.csv
#   PARTS=step SPECS="hyper mhc" LIMIT=120 benchmarks/gpu.sh   some connections, seconds for each of them
#   PARTS=ops OPTIONS="--dims 2048" benchmarks/gpu.sh          options of `python -m benchmarks`, after the script's own
#   SMALL=1 OUT=out benchmarks/gpu.sh                          toy sizes on a CPU, kernels in triton's interpreter
#
# Missing packages are installed from .carry/*.whl, for this run alone; the campaign does not begin without them. If the
# kernels are wrong, it stops: no speed is reported for them. It goes on if the tests that had time passed. `compiled` tests
# connected models with kernels, compiled and under CUDA graphs. `step` and `decode` are a command for each connection, as
# whole models are compiled. What fails or exceeds its time limit is recorded in $OUT/parts.txt; the rows that it has measured
# are kept, and the next command runs.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results} PYTHON=${PYTHON:-python3} SMALL=${SMALL:-}
PARTS=${PARTS:-correctness compiled ops step decode memory}
# seconds of a command; those of `ops` are shared by its three, and warm_up takes 50 more
declare -A LIMITS=([correctness]=300 [compiled]=240 [ops]=480 [step]=280 [decode]=280 [memory]=150)
mkdir -p "$OUT"
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
compgen -G '.carry/*.whl' >/dev/null &&
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$temporary" .carry/*.whl
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}:$temporary" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export COMMIT=${COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}

missing=$("$PYTHON" -c '
from importlib.util import find_spec
needed = "torch triton transformers lightning jsonargparse rich pytest xdist hypothesis".split()
print(*[name for name in needed if find_spec(name) is None])
') || exit 1
if [ -z "$SMALL" ] && ! command -v "${CC:-gcc}" clang >/dev/null; then
  echo "gpu.sh: no C compiler, which triton needs for its launches; set CC" >&2
  exit 1
fi
if [ -n "$missing" ]; then
  echo "gpu.sh: not installed: $missing; put their wheels into .carry/, as benchmarks/README.md says" >&2
  exit 1
fi

if [ -n "$SMALL" ]; then
  interpreted=(TRITON_INTERPRET=1) tests=(-n 0 -k "${SMALL_TESTS:-test_empty_batch and norm-rms}") kernels=
  compiled=(-n 0 -k "llama and generate")
  toy=(--device cpu --rounds 3 --seconds 1 --batch 1 --context 8 --dims 16)
  model=(--layers 1 --vocab 32) specs=(prenorm hyper)
  all_ops=("${toy[@]}" --streams 2 --ops add_norm) against_references=("${all_ops[@]}") against_peers=("${all_ops[@]}")
  step=("${toy[@]}" "${model[@]}") decode=("${toy[@]}" "${model[@]}") memory=("${toy[@]}" "${model[@]}" --specs "${specs[@]}")
else
  interpreted=(TRITON_INTERPRET=0) tests=(-n "${WORKERS:-14}" --dist worksteal -m "") kernels=1
  compiled=(-n "${WORKERS:-14}" --dist worksteal -m "" -k "generate or autocast")
  specs=(prenorm hyper mhc "attnres(block_size=4)" "denseformer(dilation=4, period=5)" mudd mgr)
  all_ops=(--variants kernel)
  # apart, as an illegal access in a package of others ends the use of the GPU in its process
  against_references=(--dims 2048 --variants kernel eager compiled --seconds 2)
  against_peers=(--dims 2048 --variants kernel peers --seconds 2)
  step=(--rounds 10) decode=(--seconds 3) memory=()
fi
[ -z "${SPECS:-}" ] || mapfile -t specs < <("$PYTHON" -c '
import sys
from crosslayer.spec import split_specs
print(*split_specs(sys.argv[1]), sep="\n")
' "$SPECS")
for name in $PARTS; do
  [ -n "${LIMITS[$name]:-}" ] || { echo "gpu.sh: unknown part $name; known: ${!LIMITS[*]}" >&2 && exit 1; }
done
read -ra options_given <<<"${OPTIONS:-}"

part() { # name, seconds, command: its output goes to $OUT/NAME.txt as it comes, its status to $OUT/parts.txt
  local begin=$SECONDS status=0 words=ok
  # Not through a pipe, which processes that outlive the command would keep open.
  touch "$OUT/$1.txt"
  local lines_before
  lines_before=$(wc -l <"$OUT/$1.txt")
  timeout --kill-after=5 "$2" env "${interpreted[@]}" CROSSLAYER_KERNELS=$kernels "${@:3}" >>"$OUT/$1.txt" 2>&1 ||
    status=$?
  tail -n "+$((lines_before + 1))" "$OUT/$1.txt" >"$temporary/log"
  case $status in
    0) ;;
    124 | 137) words="out of time" ;;
    *) words="failed ($status)" ;;
  esac
  echo "$1: $words, $((SECONDS - begin)) s" | tee -a "$OUT/parts.txt"
  tail -n 60 "$temporary/log"
  return $status
}

bench() { # name, share of the part's seconds in %, options
  part "$1" $((${LIMIT:-${LIMITS[$1]}} * $2 / 100)) "$PYTHON" -m benchmarks "$1" --out "$OUT" "${@:3}" "${options_given[@]}"
}

run_tests() { # name, files and options of pytest
  # Without the first variable, cuBLAS of some versions is an error where algorithms are to be deterministic. With the second,
  # each of the many workers compiles in its own process.
  part "$1" "${LIMIT:-${LIMITS[$1]}}" env CUBLAS_WORKSPACE_CONFIG=:4096:8 TORCHINDUCTOR_COMPILE_THREADS=1 "$PYTHON" -m pytest -v -p no:cacheprovider \
    -p no:benchmark -o addopts=--import-mode=importlib -W default "${@:2}"
}

warm_up() { # fill triton's cache in parallel: each op alone takes one core
  local op ops
  mapfile -t ops < <("$PYTHON" -c '
import sys
from benchmarks.__main__ import make_parser
from benchmarks.cases import OPS
print(*getattr(make_parser().parse_args(["ops", *sys.argv[1:]]), "ops", OPS), sep="\n")
' "${options_given[@]}")
  for op in "${ops[@]}"; do
    timeout 50 "$PYTHON" -m benchmarks ops --out "$temporary/$op" "${all_ops[@]}" "${options_given[@]}" \
      --batch 5 --rounds 1 --ops "$op" >/dev/null 2>&1 &
  done
  wait
}

failed=0
for name in $PARTS; do
  case $name in
    correctness)
      run_tests correctness "${tests[@]}" tests/kernels/suite.py
      status=$?
      if { [ $status != 0 ] && [ $status != 124 ] && [ $status != 137 ]; } ||
        grep -qE '(^| )(FAILED|ERROR) ' "$temporary/log"; then # of the tests that had time
        echo "stopped: kernels failed" | tee -a "$OUT/parts.txt"
        exit 1
      fi ;;
    compiled) run_tests compiled "${compiled[@]}" tests/hf/test_gpu.py || failed=1 ;;
    ops)
      [ -n "$SMALL" ] || warm_up
      bench ops 50 "${all_ops[@]}" || failed=1
      bench ops 30 "${against_references[@]}" || failed=1
      bench ops 20 "${against_peers[@]}" || failed=1 ;;
    step | decode)
      for spec in "${specs[@]}"; do
        declare -n options=$name
        bench "$name" 100 --specs "$spec" "${options[@]}" || failed=1
      done ;;
    memory) bench memory 100 "${memory[@]}" || failed=1 ;;
  esac
done
exit $failed
