"""Hugging Face's Trainer on a Llama of two layers, three steps on random tokens: torchrun --nproc-per-node 2 hf_trainer.py"""

import hashlib
import json
import math
import sys
import time

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class RandomTokens(Dataset):
    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        made = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(vocabulary, (rows, length), generator=made)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.parameters())).hexdigest()


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
        )
    )
    before = digest(model)
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=3,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        ddp_backend="gloo",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=RandomTokens(32, 16, 64))
    result = trainer.train()
    found = {
        "steps": result.global_step,
        "finite": math.isfinite(result.training_loss),
        "rank": arguments.process_index,
        "world": arguments.world_size,
        "wrapped": type(trainer.model_wrapped).__name__,
        "before": before,
        "after": digest(model),
    }
    print("RESULT " + json.dumps(found))
    time.sleep(0.3)  # gloo's own thread lets go of its last tensors: torch 2.13 can deadlock with it at exit
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
