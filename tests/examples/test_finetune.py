"""The examples of Hugging Face's Trainer, run as a user runs them."""

from pathlib import Path

import pytest
from transformers import BertForSequenceClassification, GPT2LMHeadModel

from tests.examples.test_examples import found, run_example

pytestmark = [pytest.mark.backends("torch_xla", test_all="jax"), pytest.mark.slow]


def test_a_gpt2_learns_and_its_checkpoint_and_model_are_there(tmp_path: Path) -> None:
    said = run_example("finetune_gpt2.py", "--steps=20", f"--out={tmp_path}")
    loss, uniform = map(
        float, found(r"wasn't trained on: ([\d.]+) nats a token, of ([\d.]+)", said)
    )
    assert uniform == 6.93
    assert loss < uniform - 0.3
    assert (tmp_path / "checkpoint-20" / "trainer_state.json").is_file()
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    assert sum(p.numel() for p in model.parameters()) > 500_000
    assert found(r"'import os\\n\\ndef (.+)'", said)


def test_a_bert_tells_packages_apart(tmp_path: Path) -> None:
    said = run_example("finetune_bert.py", "--epochs=1", f"--out={tmp_path}")
    # A quarter is what guessing gets.
    assert float(found(r"wasn't trained on: (\d+)%", said)[0]) > 50
    assert BertForSequenceClassification.from_pretrained(tmp_path / "model").num_labels == 4
