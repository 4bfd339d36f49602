#!/usr/bin/env bash
# Sets up what a make target needs, once: the virtual environment and the pieces from Debian.
#   scripts/setup.sh run     to run Forewarn
#   scripts/setup.sh test    to test it as well
# Nothing is started and no service is enabled: Prometheus and Alertmanager are unpacked below build/ only.
# What cannot be installed is said and left out; the tests that need it then skip and say so.
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:-run}
venv=.venv
stamps=build/stamps
mkdir -p "$stamps"

say() { printf 'setup: %s\n' "$*" >&2; }

# --- Debian ------------------------------------------------------------------------------------------------
as_root=()
can_install=yes
if ! command -v apt-get >/dev/null 2>&1; then
  can_install=no
elif [ "$(id -u)" -ne 0 ]; then
  if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  else
    can_install=no
  fi
fi

lists_are_fresh=no
refresh_lists() {
  [ "$lists_are_fresh" = yes ] && return 0
  "${as_root[@]}" apt-get update -qq >>build/setup.log 2>&1 || { say "apt-get update failed (see build/setup.log)"; return 1; }
  lists_are_fresh=yes
}

missing_packages() { # prints those of the named packages that are not installed
  local package
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || printf '%s\n' "$package"
  done
}

# install NEED PACKAGE...: NEED is `required` or `optional`.
install() {
  local need=$1 missing package
  shift
  command -v dpkg-query >/dev/null 2>&1 || { say "this is not Debian: install the equivalents of: $*"; return 0; }
  mapfile -t missing < <(missing_packages "$@")
  [ ${#missing[@]} -eq 0 ] && return 0
  if [ "$can_install" = no ]; then
    say "not root and no sudo: cannot install ${missing[*]}; as root: apt-get install ${missing[*]}"
    [ "$need" = optional ] || return 1
    return 0
  fi
  say "installing from Debian: ${missing[*]}"
  refresh_lists || { [ "$need" = optional ]; return; }
  if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${missing[@]}" >>build/setup.log 2>&1; then
    if [ "$need" = required ]; then
      say "could not install ${missing[*]} (see build/setup.log)"
      return 1
    fi
    for package in "${missing[@]}"; do
      "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        "$package" >>build/setup.log 2>&1 || say "left out $package: not to be had here (see build/setup.log)"
    done
  fi
}

# unpack PACKAGE PROGRAM: puts a Debian package's files below build/debian without installing it, so that no
# service of that name starts on this machine.
unpack() {
  local package=$1 program=$2 folder
  [ -x "build/debian/usr/bin/$program" ] && return 0
  if ! command -v dpkg >/dev/null 2>&1 || ! command -v apt-get >/dev/null 2>&1; then
    say "left out $package: this is not Debian"
    return 0
  fi
  if ! apt-cache policy "$package" 2>/dev/null | grep -q 'Candidate: [0-9]'; then
    if [ "$can_install" = no ] || ! refresh_lists; then
      say "left out $package: package lists are missing and cannot be fetched without root"
      return 0
    fi
  fi
  folder=$(mktemp -d)
  if (cd "$folder" && apt-get download -qq "$package") >>build/setup.log 2>&1; then
    mkdir -p build/debian
    dpkg -x "$folder"/*.deb build/debian
    say "unpacked $package below build/debian"
  else
    say "left out $package: it could not be downloaded (see build/setup.log)"
  fi
  rm -rf "$folder"
}

# libgomp1 is what LightGBM needs; smartmontools reads the disks.
install required ca-certificates libgomp1
install optional smartmontools
if [ "$purpose" = test ]; then
  install optional gcc libc6-dev chromium chromium-driver
  unpack prometheus prometheus
  unpack prometheus-alertmanager prometheus-alertmanager
fi

# --- Python ------------------------------------------------------------------------------------------------
python=
for candidate in python3.11 python3.12 python3.13 python3; do
  if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  install required python3 && python=python3
fi
if [ ! -x "$venv/bin/python" ]; then
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    install required python3-venv
  fi
  say "creating the virtual environment in $venv"
  "$python" -m venv "$venv"
  rm -f "$stamps"/*
fi

extra=all
[ "$purpose" = test ] && extra=dev
# The folder is in it because an editable install and the commands' first lines name it: a moved clone installs again.
digest=$({ pwd; "$venv/bin/python" -V; cat pyproject.toml constraints.txt; } | sha256sum | cut -c1-16)
if [ ! -e "$stamps/$extra-$digest" ] && [ ! -e "$stamps/dev-$digest" ]; then
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # an interrupted run left it half made
    "$venv/bin/python" -m ensurepip >>build/setup.log 2>&1 || { say "pip is missing in $venv: remove $venv and run this again"; exit 1; }
  fi
  say "installing forewarn[$extra] and what it needs from PyPI (a minute or two the first time)"
  if ! "$venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$extra]" >>build/setup.log 2>&1; then
    tail -n 20 build/setup.log >&2
    say "pip could not install the packages: is PyPI reachable? (whole log: build/setup.log)"
    exit 1
  fi
  touch "$stamps/$extra-$digest"
fi
