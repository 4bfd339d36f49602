#!/bin/sh
# Trains the shipped disk model anew. Give the folder that holds the two Backblaze histories (README of the disk card);
# default: the sibling folder ../shared/data. The same data give the same digest.
set -eu
cd "$(dirname "$0")/.."
data="${1:-../shared/data}"
forewarn="${FOREWARN:-.venv/bin/forewarn}"
for name in backblaze-2013 backblaze-2013-2016; do
    if [ ! -d "$data/$name" ]; then
        echo "$data/$name: not found; give the folder that holds it: scripts/train_bundled.sh DIR" >&2
        exit 1
    fi
done
"$forewarn" train --kind disk --rows 500000 \
    --history "$data/backblaze-2013" --history "$data/backblaze-2013-2016" \
    --credit "Backblaze drive stats, 2013 to 2015 (backblaze.com), free to use with credit" \
    --card models/bundled/disk/card.md --out models/bundled/disk
