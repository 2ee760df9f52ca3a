#!/usr/bin/env bash
# Everything worth running on a machine with a GPU, offline: install, GPU tests, example, sanitizer, benchmark.
#
#   benchmarks/check_gpu.sh LOGS [install] [tests] [example] [sanitizer] [benchmark]
#
# Runs the named steps, by default all but the sanitizer; each writes LOGS/<step>.log, under a time limit. A failing step
# does not keep the others from running; the exit status is the number of steps that failed.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$(mkdir -p "${1:?where to write the logs}" && cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- install tests example benchmark
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1

declare -A limits=([install]=180 [tests]=480 [example]=120 [sanitizer]=420 [benchmark]=560)
declare -A commands=(
  [install]="$python -m pip install -q --no-build-isolation --no-deps -e ."
  [tests]="$python -m pytest tests -m gpu --durations=10"
  [example]="$python examples/generate.py"
  [sanitizer]="compute-sanitizer --tool memcheck --error-exitcode 9 $python examples/generate.py --max-new-tokens 6"
  [benchmark]="$python benchmarks/decode.py --out $logs ${BENCHMARK_ARGS:-}"
)

failed=0
for step in "$@"; do
  echo "== $step: ${commands[$step]:?no such step}"
  begin=$SECONDS
  timeout --kill-after=10 "${limits[$step]}" bash -c "${commands[$step]}" >"$logs/$step.log" 2>&1
  status=$?
  [ $status -eq 0 ] || failed=$((failed + 1))
  tail -n 25 "$logs/$step.log"
  echo "== $step: exit status $status, $((SECONDS - begin)) s"
done
exit $failed
