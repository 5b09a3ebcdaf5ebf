"""Train a byte-level BPE tokenizer on JSONL files.

python examples/train_tokenizer.py my.jsonl --vocab-size 2048 --out tokenizer.json
"""

import argparse
import json
from collections.abc import Iterator

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

parser = argparse.ArgumentParser(description="Train a byte-level BPE tokenizer.")
parser.add_argument("files", nargs="+", help="JSONL, one document per line")
parser.add_argument("--text-key", default="text")
parser.add_argument("--vocab-size", type=int, default=2048)
parser.add_argument("--out", default="tokenizer.json")
given = parser.parse_args()


def documents() -> Iterator[str]:
    for name in given.files:
        with open(name, encoding="utf-8") as lines:
            yield from (json.loads(line)[given.text_key] for line in lines)


tokenizer = Tokenizer(BPE())
tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
tokenizer.decoder = Decoder()
alphabet = ByteLevel.alphabet()  # all 256 bytes: any text can be encoded
trainer = BpeTrainer(
    vocab_size=given.vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
)
tokenizer.train_from_iterator(documents(), trainer)
tokenizer.save(given.out)
print(f"{given.out}: {tokenizer.get_vocab_size()} tokens")
