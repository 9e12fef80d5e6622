#!/usr/bin/env bash
# All tests: format check, g++ release with warnings as errors, clang with ASan and UBSan. Goes on
# after a failed step, prints a summary, exits 1 if any step failed.
#   bash tests/run.sh [--full]
# --full adds: every header compiled alone, TSan, 60 s of fuzzing, long loops
# (COLIBRI_FULL_TESTS=1), and the tests of figures under ASan.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source apps/jobs.sh

full=no
case "${1:-}" in
  "") ;;
  --full) full=yes ;;
  *) echo "usage: bash tests/run.sh [--full]" >&2; exit 2 ;;
esac

# Flags of the programs may be set in the environment; tests start without.
for name in ${!COLIBRI_@}; do unset "$name"; done

summary=()
failed=0
# step NAME COMMAND...: runs the command; its result and time go into the summary.
step() {
  local name=$1 start=$SECONDS result=ok
  shift
  echo "=== $name"
  "$@" || result=FAILED
  [[ $result == ok ]] || failed=1
  summary+=("$(printf '%-34s %-6s %5d s' "$name" $result $(( SECONDS - start )))")
  [[ $result == ok ]]
}

sources() {
  find apps bench graph io kernels runtime tests -name '*.cc' -o -name '*.h'
}

check_format() {
  sources | xargs clang-format-14 --dry-run -Werror
}

build() {
  local preset=$1
  local options=()
  if command -v ccache > /dev/null; then options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
  if ! grep -qsxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "build/$preset/CMakeCache.txt"; then
    rm -rf "build/$preset"
  fi
  cmake --preset "$preset" "${options[@]}" &&
    cmake --build --preset "$preset" -j "$(build_jobs)"
}

# The log is what .ci/run quotes at its end.
run_ctest() {
  local preset=$1
  shift
  ctest --preset "$preset" -j 2 "$@" 2>&1 | tee "build/$preset/ctest.log"
}

# build_and_test PRESET [CTEST OPTIONS...]
build_and_test() {
  rm -f "build/$1/ctest.log"
  if step "build $1" build "$1"; then
    step "tests $1" run_ctest "$@" || true
  fi
}

# Not those that are compiled once for each SIMD target: they need what comes before them.
compile_headers_alone() {
  sources | grep '\.h$' | grep -v -e '-inl\.h$' -e '^kernels/targets\.h$' |
    xargs -P "$(build_jobs)" -I{} g++ -std=c++20 -fsyntax-only -Wall -Wextra -Werror -I. \
      -DCOLIBRI_SOURCE_DIR='"."' -include {} -x c++ /dev/null
}

fuzz() {
  local targets=()
  for source in tests/fuzz_*.cc; do
    [[ -e "$source" ]] && targets+=("$(basename "$source" .cc)")
  done
  if (( ${#targets[@]} == 0 )); then
    echo "no fuzz targets"
    return 0
  fi
  local result=0
  for target in "${targets[@]}"; do
    mkdir -p "build/fuzz/corpus/$target"
    "build/fuzz/$target" -max_total_time=$(( 60 / ${#targets[@]} )) -rss_limit_mb=2048 \
      -artifact_prefix="build/fuzz/$target-" "build/fuzz/corpus/$target" || result=1
  done
  return $result
}

bash apps/packages.sh tests

step "format" check_format || true
build_and_test ci
# These compute much and go through nothing that other tests do not: under ASan 150 s of processor
# time in all, with --full alone.
figures='^(graph_quality|graph_greedy|bench_drafts|governor|prediction)_test:'
if [[ $full == yes ]]; then build_and_test asan; else build_and_test asan -E "$figures"; fi
if [[ $full == yes ]]; then
  step "headers alone" compile_headers_alone || true
  build_and_test tsan
  if step "build fuzz" build fuzz; then step "fuzz" fuzz || true; fi
  if [[ -f build/ci/ctest.log ]]; then
    step "long loops" env COLIBRI_FULL_TESTS=1 ctest --preset ci -j 2 || true
  fi
fi

echo "=== summary"
printf '%s\n' "${summary[@]}"
exit $failed
