#!/usr/bin/env bash
# Train on your own text with your own tokenizer. Further words go to train.py (train.steps=20).
#
#     bash examples/own_data.sh
#
# The text is this repository's corpus; put your files in its place, one document per line:
# {"text": "..."}.
set -eu
out=${OUT:-runs/own-data}
mkdir -p "$out"

gunzip --stdout assets/kjv.jsonl.gz > "$out/my.jsonl"
python examples/train_tokenizer.py "$out/my.jsonl" --vocab-size 2048 --out "$out/tokenizer.json"

torchrun --standalone --nproc-per-node 2 train.py --config configs/quickstart.toml \
    run.dir="$out/run" data.paths="[\"$out/my.jsonl\"]" data.tokenizer="$out/tokenizer.json" \
    model.override.vocab_size=2048 "$@"
