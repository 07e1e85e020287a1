"""The demo's text: which files are held out, and what a token counts for."""

import sysconfig
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.backends("torch_xla", test_all="jax")


def test_every_tenth_file_is_held_out_and_tokens_count_the_bytes_they_stand_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {f"m{i:02}.py": f"def naïve_{i}(self):\n    return '→' * {i}\n" for i in range(1, 25)}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    from source_text import SourceText

    text = SourceText.read(vocabulary=300)
    held_out = [files["m10.py"], files["m20.py"]]
    trained = [content for content in files.values() if content not in held_out]
    for tokens, contents in ((text.held_out, held_out), (text.trained, trained)):
        assert tokens.dtype == torch.int64
        assert text.tokenizer.decode(tokens.tolist()) == "".join(contents)
        assert text.bytes_in(tokens) == len("".join(contents).encode())
        assert len(tokens) < text.bytes_in(tokens)
