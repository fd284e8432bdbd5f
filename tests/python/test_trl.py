"""Offload in TRL's SFTTrainer. TRL and datasets are no requirement of the project; CONTRIBUTING.md has the way."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from training import llama, tokens
from transformers import PreTrainedTokenizerFast

from neaptide.integrations.transformers import OffloadCallback

datasets = pytest.importorskip("datasets", reason="datasets is not installed (CONTRIBUTING.md)")
trl = pytest.importorskip("trl", reason="trl is not installed (CONTRIBUTING.md)")


def tokenizer():
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w2")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_sft_trainer_gets_the_same_numbers_with_the_callback(device, checkpointing, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
    rows = datasets.Dataset.from_dict({"input_ids": [tokens("cpu", i, batch=1)[0].tolist() for i in range(12)]})

    def fit(callbacks):
        arguments = trl.SFTConfig(
            output_dir=tmp_path,
            max_steps=3,
            per_device_train_batch_size=2,
            logging_steps=1,
            gradient_checkpointing=checkpointing,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = trl.SFTTrainer(
            llama(), args=arguments, train_dataset=rows, processing_class=tokenizer(), callbacks=callbacks
        )
        trainer.train()
        return trainer

    plain, ours = fit([]), fit([OffloadCallback(min_bytes=0, keep_last=0)])
    assert next(ours.model.parameters()).device.type == device
    logs = [
        [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        for trainer in (plain, ours)
    ]
    assert len(logs[0]) == 3 and logs[0] == logs[1]
    pairs = zip(plain.model.parameters(), ours.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(entry["offload_mib"] > 0 for entry in ours.state.log_history if "loss" in entry)
