"""The source of Python's standard library as tokens, some of its files held out."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.utils.data import Dataset

HELD_OUT_EVERY = 10  # files


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive stretches of a text: `window` tokens, and the token that follows each."""

    def __init__(self, tokens: Tensor, window: int) -> None:
        self.tokens = tokens
        self.window = window

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.window

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """int64 [window], int64 [window]."""
        start = index * self.window
        piece = self.tokens[start : start + self.window + 1]
        return piece[:-1], piece[1:]


@dataclass(frozen=True, kw_only=True)
class SourceText:
    """The library's top-level modules.

    Attributes:
        tokenizer: byte-pair encoding, learned from the files that are trained on.
        trained: int64 [tokens], the files that are trained on.
        held_out: int64 [tokens], every tenth file.
        lengths: int64 [vocabulary], bytes of each token.
    """

    tokenizer: ByteLevelBPETokenizer
    trained: Tensor
    held_out: Tensor
    lengths: Tensor

    @classmethod
    def read(cls, *, vocabulary: int) -> "SourceText":
        """Reads the running Python's library and learns `vocabulary` tokens from it."""
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
        held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        trained = [t for i, t in enumerate(texts, start=1) if i % HELD_OUT_EVERY]
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(trained, vocab_size=vocabulary, show_progress=False)
        # The tokenizer writes each byte of a token as one character.
        lengths = [len(tokenizer.id_to_token(i) or "") for i in range(vocabulary)]
        return cls(
            tokenizer=tokenizer,
            trained=_encode(tokenizer, trained),
            held_out=_encode(tokenizer, held_out),
            lengths=torch.tensor(lengths),
        )

    def bytes_in(self, tokens: Tensor) -> int:
        """How many bytes these tokens stand for."""
        return int(self.lengths[tokens].sum())


def _encode(tokenizer: ByteLevelBPETokenizer, texts: list[str]) -> Tensor:
    return torch.tensor([i for text in tokenizer.encode_batch(texts) for i in text.ids])
