"""A client that saves a model in mid run leaves what its engine has compiled."""

import json
import textwrap
from importlib.util import find_spec

import pytest

from tests.support.processes import run_python

pytestmark = [
    pytest.mark.backends("any"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="no transformers here"),
]

SAVES = textwrap.dedent("""
    import json, logging, sys, tempfile
    import spmdzero.integrations
    spmdzero.integrations.install()
    import deepspeed, torch
    from transformers import LlamaConfig, LlamaForCausalLM

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("spmdzero").addHandler(handler)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, vocab_size=32))
    other = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, vocab_size=32))
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine = deepspeed.initialize(model=model, config=settings)[0]
    ids = torch.randint(0, 32, (2, 6))

    def train():
        for _ in range(3):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()

    train()
    with tempfile.TemporaryDirectory() as folder:
        engine.module.save_pretrained(folder)
        written = json.load(open(folder + "/config.json"))
        # A model without an engine is transformers' own affair.
        other.save_pretrained(folder)
    train()
    print(json.dumps({
        "written": [written["dtype"], written["architectures"]],
        "again": [line for line in said if "again" in line],
        "other": other.config.architectures,
    }))
""")


def test_a_save_in_mid_run_compiles_nothing_again_and_writes_the_whole_config() -> None:
    # A process of its own, in which transformers is imported after spmdzero.
    said = run_python("-c", SAVES, devices=2, fresh=True)
    found = json.loads(said.splitlines()[-1])
    assert found["written"] == ["float32", ["LlamaForCausalLM"]]
    assert found["other"] == ["LlamaForCausalLM"]
    assert found["again"] == []
