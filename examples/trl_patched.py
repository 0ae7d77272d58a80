"""A TRL trainer, without and with fused_logp_hub in place of TRL's own log-probabilities.

Needs `trl`; downloads nothing: the model is tiny and random, the tokenizer is made here. Exit code 1 if the losses
differ by more than 1e-4.
"""

import os
import sys
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.cpo import CPOConfig, CPOTrainer

from fused_logp_hub import integrations

WORDS = ["<pad>", "<eos>", "<unk>", "is", "the", "sky", "blue", "green", "yes", "no", "it"]
STEPS = 4
ROW = {"prompt": "is the sky blue", "chosen": "yes it is blue", "rejected": "no it is green"}


def make_trainer(folder):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    options = CPOConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, max_length=16, logging_steps=1,
        bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return CPOTrainer(
        LlamaForCausalLM(config), options, train_dataset=Dataset.from_list([ROW] * 8), processing_class=tokenizer,
    )  # fmt: skip


def losses_of(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main():
    with tempfile.TemporaryDirectory() as folder:
        plain = losses_of(make_trainer(folder))
        trainer = make_trainer(folder)
        with integrations.trl.patch:  # every module of TRL that has bound the functions, until here is left
            patched = losses_of(trainer)
    print("TRL's own   ", plain)
    print("fused_logp  ", patched)
    same = len(plain) == STEPS and max(abs(a - b) for a, b in zip(plain, patched, strict=True)) <= 1e-4
    print("same losses" if same else "DIFFERENT losses")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
