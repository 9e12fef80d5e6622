#!/usr/bin/env bash
# Lists the Debian packages that building (and, with "tests", testing) needs, and installs those
# that are missing. Touches neither apt nor the network when nothing is missing.
#   bash apps/packages.sh [--dry-run] [tests]
# --dry-run prints the missing packages, one a line, and installs nothing.
set -euo pipefail

packages=(g++ cmake ninja-build pkg-config libtbb-dev libhwy-dev liburing-dev nlohmann-json3-dev
  libcli11-dev libfmt-dev libpcre2-dev libxxhash-dev)
dry_run=no
for argument in "$@"; do
  case "$argument" in
    --dry-run) dry_run=yes ;;
    tests)
      packages+=(doctest-dev clang-14 libclang-rt-14-dev clang-format-14 python3-venv jq parallel) ;;
    *) echo "packages.sh: unknown argument \"$argument\"" >&2; exit 2 ;;
  esac
done

if ! command -v dpkg-query > /dev/null; then
  echo "packages.sh: this is no Debian system; the build needs what Debian 12 calls:" \
    "${packages[*]}" >&2
  exit 0
fi

# dpkg-query fails when it does not know one of the names; what it prints is right all the same.
installed=" $(dpkg-query -W -f='${db:Status-Status}:${Package} ' "${packages[@]}" 2> /dev/null ||
  true)"
missing=()
for package in "${packages[@]}"; do
  [[ "$installed" == *" installed:$package "* ]] || missing+=("$package")
done
(( ${#missing[@]} > 0 )) || exit 0
if [[ "$dry_run" == yes ]]; then
  printf '%s\n' "${missing[@]}"
  exit 0
fi

as_root=()
if [[ "$(id -u)" != 0 ]]; then
  if ! command -v sudo > /dev/null; then
    echo "packages.sh: not root and no sudo here; as root, run:" \
      "apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
apt() {
  # Another apt may be at work on a machine that has just started; it is waited for.
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120 \
    -o Dpkg::Use-Pty=0 "$@"
}
echo "Installing: ${missing[*]}"
apt update || echo "packages.sh: apt-get update failed; trying the package lists at hand" >&2
if ! apt install --no-install-recommends "${missing[@]}"; then
  echo "packages.sh: could not install: ${missing[*]}" >&2
  exit 1
fi
