#!/usr/bin/env bash
# From a fresh Debian machine to answers of the model that ships with the repository: installs what
# is missing, builds the two programs in build/demo, answers apps/demo/prompts.jsonl. Run again, it
# installs and builds nothing. Arguments are handed to colibri-run.
#   bash apps/demo.sh [colibri-run options]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source apps/jobs.sh

bash apps/packages.sh

build=build/demo
# A build folder that came along from elsewhere is of no use to CMake.
if ! grep -qsxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" $build/CMakeCache.txt; then
  rm -rf $build
fi
if [[ ! -f $build/build.ninja ]]; then
  options=(-DBUILD_TESTING=OFF)
  if command -v ccache > /dev/null; then options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
  cmake --preset release -B $build "${options[@]}"
fi
cmake --build $build --target colibri-run colibri-bench -j "$(build_jobs)"

# A quarter of the experts in memory and reads past the page cache: the small model then has to
# fetch its experts while it answers, as the large one does.
command=($build/colibri-run -m apps/demo/model -i apps/demo/prompts.jsonl --thinking off
  --slots 25% --direct --temperature 0.8 --output-format text "$@")
echo "\$ ${command[*]}"
"${command[@]}"

cat <<NEXT

Next, where the time goes, node by node:
  $build/colibri-bench pipeline -m apps/demo/model --slots 25% --direct
A prompt of your own:
  $build/colibri-run -m apps/demo/model --thinking off -p "Tell me a passage from Treasure Island."
GLM-5.2 itself: the same command with -m and its directory (README.md).
NEXT
