"""A small BPE tokenizer, and lists of token files."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from titanlite.data.foreign import list_tokens, token_files

SPECIAL = ("<|end_of_text|>",)


def make_assets(
    folder: Path, texts: list[str], vocab_size: int = 400, special: Sequence[str] = SPECIAL
) -> Path:
    """The first special token ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special],
        show_progress=False,
        initial_alphabet=alphabet,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]}))
    return folder


def listed(path: Path, kind: str, end: int = -1) -> Path:
    """List token files next to their folder, or next to the only one, and return the list's folder,
    which keeps its packing plans.
    """
    out = path.parent / f"{path.name}-listed"
    (out / "manifest.json").unlink(missing_ok=True)
    list_tokens({str(path): token_files("SRC", str(path), kind)}, kind, end, out)
    return out
