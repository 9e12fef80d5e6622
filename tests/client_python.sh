#!/usr/bin/env bash
# Prints the path of a Python that has OpenAI's client library, with which tests read answers. Made
# once for all presets, from PyPI, which takes a few seconds; later runs touch no network.
#   bash tests/client_python.sh [FOLDER]      (default: in build/, named by the version)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(openai==3.57.0 pydantic==2.14.4)  # pydantic does the checking
folder=$(realpath -m "${1:-build/python-${packages[0]/==/-}}")

mkdir -p "$(dirname "$folder")"
exec 9> "$folder.lock"
flock 9  # tests run side by side
# The last step names what is inside: a folder left half-way, or moved, is made again.
if [[ "$(cat "$folder/made" 2> /dev/null)" != "$folder ${packages[*]}" ]]; then
  rm -rf "$folder"
  make() {
    python3 -m venv "$folder" && "$folder/bin/python" -m pip install --quiet --no-input \
      --disable-pip-version-check "${packages[@]}"
  }
  if ! log=$(make 2>&1); then
    rm -rf "$folder"
    printf '%s\n' "$log" \
      "client_python.sh: no Python with ${packages[*]}: python3-venv (apps/packages.sh tests) and," \
      "once, PyPI are needed" >&2
    exit 1
  fi
  echo "$folder ${packages[*]}" > "$folder/made"
fi
echo "$folder/bin/python"
