#!/usr/bin/env bash
# The GPU campaign, in under nine minutes: correctness first, then speed, then memory.
#
#   benchmarks/gpu.sh                        rows are added to benchmarks/results/*.csv
#   OUT=out PARTS="step decode" LIMIT=260 benchmarks/gpu.sh    some of it, into another folder, so many seconds a part
#   SMALL=1 OUT=out benchmarks/gpu.sh        all of it at toy sizes on a CPU, kernels under triton's interpreter
#
# Packages that are missing are installed from .carry/*.whl, beside nothing and for this run alone. A part that fails or
# takes too long is recorded in $OUT/parts.txt, and the next one goes on.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results} PYTHON=${PYTHON:-python3} SMALL=${SMALL:-}
PARTS=${PARTS:-correctness ops step decode memory}
declare -A LIMITS=([correctness]=140 [ops]=80 [step]=150 [decode]=60 [memory]=40) # seconds; `warm` has 50
mkdir -p "$OUT"
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
compgen -G '.carry/*.whl' >/dev/null &&
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" .carry/*.whl
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}:$site" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export COMMIT=${COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}

if [ -n "$SMALL" ]; then
  interpreted=(TRITON_INTERPRET=1) tests=(-n 0 -k "test_empty and (merge or norm-rms)") kernels=
  toy=(--device cpu --rounds 3 --seconds 1 --batch 1 --context 8 --dims 16)
  body=(--layers 1 --vocab 32 --arms prenorm hyper)
  every=("${toy[@]}" --streams 2 --ops add_norm) beside=("${every[@]}") step=("${toy[@]}" "${body[@]}")
  decode=("${step[@]}") memory=("${step[@]}")
else
  interpreted=(TRITON_INTERPRET=0) tests=(-n "${WORKERS:-14}" --dist worksteal -m "") kernels=1
  arms=(prenorm hyper mhc "attnres(block_size=4)" "denseformer(dilation=4, period=5)" mudd mgr)
  every=(--variants kernel) beside=(--dims 2048 --streams 4 --variants kernel eager compiled peers --seconds 2)
  step=(--arms "${arms[@]}" --rounds 10) decode=(--arms "${arms[@]}" --seconds 3) memory=()
fi

part() { # name, seconds, command: its output to a file, what became of it to parts.txt
  local begun=$SECONDS status=ok
  timeout --kill-after=5 "$2" env "${interpreted[@]}" CROSSLAYER_KERNELS=$kernels "${@:3}" >"$site/said" 2>&1 ||
    status="failed or out of time ($?)"
  echo "$1: $status, $((SECONDS - begun)) s" | tee -a "$OUT/parts.txt"
  cat "$site/said" >>"$OUT/$1.txt"
  tail -n 60 "$site/said"
  [ "$status" = ok ]
}

bench() { # name, share of the part's seconds in %, options
  local seconds=$((${LIMIT:-${LIMITS[$1]}} * $2 / 100))
  part "$1" "$seconds" "$PYTHON" -m crosslayer bench "$1" --out "$OUT" --note "$note" \
    --limit "$((seconds * 3 / 4))" "${@:3}"
}

warm() { # the kernels are compiled side by side into triton's cache, as each op alone takes a core
  local op ops
  mapfile -t ops < <("$PYTHON" -c 'from crosslayer.bench.cases import OPS; print(*OPS, sep="\n")')
  for op in "${ops[@]}"; do
    timeout 50 "$PYTHON" -m crosslayer bench ops --out "$site/$op" --ops "$op" "${every[@]}" --rounds 1 >/dev/null 2>&1 &
  done
  wait
}

failed=0 note="kernels not tested in this run"
for name in $PARTS; do
  case $name in
    correctness)
      if part correctness "${LIMITS[correctness]}" "$PYTHON" -m pytest -q -p no:cacheprovider -p no:benchmark -o addopts= \
        "${tests[@]}" tests/kernels/suite.py; then note=; else note="kernels failed" failed=1; fi ;;
    ops)
      [ -n "$SMALL" ] || warm
      bench ops 50 "${every[@]}" || failed=1
      bench ops 50 "${beside[@]}" || failed=1 ;;
    step) bench step 100 "${step[@]}" || failed=1 ;;
    decode) bench decode 100 "${decode[@]}" || failed=1 ;;
    memory) bench memory 100 "${memory[@]}" || failed=1 ;;
    *) echo "unknown part $name; known: ${!LIMITS[*]}" >&2 && exit 1 ;;
  esac
done
exit $failed
