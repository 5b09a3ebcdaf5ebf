#!/usr/bin/env bash
# Fine-tune a Hugging Face folder, export it and let transformers write with it.
#
#     bash examples/fine_tune.sh FOLDER my.jsonl [key=value ...]
#
# Needs `pip install 'dtron[hf]'` for the last command. FOLDER is any model that docs/hugging-face.md
# lists; its tokenizer and its shape are taken.
set -eu
folder=$1 data=$2
shift 2
out=${OUT:-runs/fine-tune}

torchrun --standalone --nproc-per-node "${RANKS:-2}" train.py --config examples/fine_tune.toml \
    run.dir="$out/run" checkpoint.initial="$folder" data.paths="[\"$data\"]" "$@"
dtron convert to-hf "$out/run" "$out/exported" --dtype bfloat16
python - "$out/exported" <<'PY'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
prompt = tokenizer("In the beginning", return_tensors="pt", add_special_tokens=False)
tokens = model.generate(input_ids=prompt.input_ids, max_new_tokens=40, do_sample=False)
print(tokenizer.decode(tokens[0]))
PY
