"""TRL SFT: evaluate() is called on the main process only, from a callback.

class: common-path
kind: hang
ranks: 2
needs: trl, transformers, datasets
expect: @diverged
rank: 0
line: required
"""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "the", "cat", "sat", "on", "a", "mat"])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def final_report(trainer: SFTTrainer) -> None:
    print(trainer.evaluate(), flush=True)  # FAULT


def main() -> None:
    rows = Dataset.from_list([{"text": "the cat sat on a mat"}] * 64)
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=12,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=4,
        save_strategy="no",
        max_length=16,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    trainer = SFTTrainer(model, args=config, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer())
    trainer.train()
    if trainer.is_world_process_zero():
        final_report(trainer)  # NEAR
    trainer.accelerator.wait_for_everyone()


main()
