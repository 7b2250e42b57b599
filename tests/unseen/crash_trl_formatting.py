"""TRL SFT: the formatting function misses a column, on all ranks, before the first step.

class: framework-crashes
kind: crash
ranks: 2
needs: trl, transformers, datasets
expect: @raised
rank: any
line: required
must-mention: KeyError
"""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(
        models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2, "question": 3, "answer": 4}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def to_text(row: dict) -> str:
    return f"question {row['question']} answer {row['answer']}"  # FAULT


def main() -> None:
    rows = Dataset.from_list([{"question": "question", "response": "answer"}] * 32)
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=4,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        max_length=16,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=5, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    SFTTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer(), formatting_func=to_text).train()


main()
