"""Trains a sentence-transformers model, as the training scripts of its documentation do.

    python embeddings_script.py LOSS MODEL DATA OUT [--OPTION VALUE ...]

The options are those of SentenceTransformerTrainingArguments, such as `--deepspeed`.
"""

import json
import sys
from pathlib import Path

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    TripletEvaluator,
)
from transformers import HfArgumentParser

# How a loss is made, and the columns that it takes.
LOSSES = {
    "mnrl": (losses.MultipleNegativesRankingLoss, {}, "pairs"),
    "mnrl-triplets": (losses.MultipleNegativesRankingLoss, {}, "triplets"),
    "mnrl-gathered": (
        losses.MultipleNegativesRankingLoss, {"gather_across_devices": True}, "triplets",
    ),
    "cached-mnrl": (losses.CachedMultipleNegativesRankingLoss, {"mini_batch_size": 4}, "pairs"),
    "cached-mnrl-gathered": (
        losses.CachedMultipleNegativesRankingLoss,
        {"mini_batch_size": 4, "gather_across_devices": True}, "pairs",
    ),
    "cosent": (losses.CoSENTLoss, {}, "scored"),
    "triplet": (losses.TripletLoss, {}, "triplets"),
    "matryoshka": (None, {}, "pairs"),
    "softmax": (None, {}, "classes"),
}  # fmt: skip


def main() -> None:
    name, folder, data, out, *options = sys.argv[1:]
    (arguments,) = HfArgumentParser(
        SentenceTransformerTrainingArguments
    ).parse_args_into_dataclasses(["--output_dir", out, *options])
    model = SentenceTransformer(folder)
    kind, settings, columns = LOSSES[name]
    if name == "matryoshka":
        loss = losses.MatryoshkaLoss(
            model, losses.MultipleNegativesRankingLoss(model), matryoshka_dims=[64, 32, 16]
        )
    elif name == "softmax":
        loss = losses.SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=3)
    else:
        loss = kind(model, **settings)

    def rows(part: str, of: str):
        return load_dataset(
            "json", data_files=str(Path(data) / of / f"{part}.jsonl"), split="train"
        )

    scored, triplets = rows("test", "scored"), rows("test", "triplets")
    evaluators = [
        EmbeddingSimilarityEvaluator(
            scored["sentence1"], scored["sentence2"], scored["score"], name="sts"
        ),
        TripletEvaluator(
            triplets["anchor"], triplets["positive"], triplets["negative"], name="triplets"
        ),
    ]
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=rows("train", columns),
        eval_dataset=rows("test", columns),
        loss=loss,
        evaluator=evaluators,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    (Path(out) / "log.json").write_text(json.dumps(trainer.state.log_history))
    model.save_pretrained(str(Path(out) / "final"))


if __name__ == "__main__":
    main()
