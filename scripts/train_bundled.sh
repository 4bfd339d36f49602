#!/bin/sh
# Trains the shipped models anew. The same data and code give the same digests.
#   scripts/train_bundled.sh gpu          from simulated fleets, made on the spot below build/
#   scripts/train_bundled.sh disk [DIR]   from the two Backblaze histories in DIR (default: ../shared/data)
set -eu
cd "$(dirname "$0")/.."
export OMP_WAIT_POLICY=PASSIVE
forewarn="${FOREWARN:-.venv/bin/forewarn}"

gpu() {
    fleets=build/simulated
    rm -rf "$fleets"
    mkdir -p "$fleets"
    set --
    for fleet in random-101 random-102 random-103 random-104 h100-301 mixed-302; do
        "$forewarn" simulate "$fleets/$fleet" --profile "${fleet%-*}" --seed "${fleet#*-}" \
            --nodes 24 --days 12 --interval-s 60 --failures-scale 80
        set -- "$@" --history "$fleets/$fleet"
    done
    "$forewarn" train --kind gpu --rows 60000 "$@" \
        --credit "forewarn simulate: synthetic fleets, no real failure among them" \
        --card models/bundled/gpu/card.md --out models/bundled/gpu
}

disk() {
    data="${1:-../shared/data}"
    for name in backblaze-2013 backblaze-2013-2016; do
        if [ ! -d "$data/$name" ]; then
            echo "$data/$name: not found; give the folder that holds it: scripts/train_bundled.sh disk DIR" >&2
            exit 1
        fi
    done
    "$forewarn" train --kind disk --rows 500000 \
        --history "$data/backblaze-2013" --history "$data/backblaze-2013-2016" \
        --credit "Backblaze drive stats, 2013 to 2015 (backblaze.com), free to use with credit" \
        --card models/bundled/disk/card.md --out models/bundled/disk
}

case "${1:-}" in
    gpu) gpu ;;
    disk) shift; disk "$@" ;;
    *) sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
