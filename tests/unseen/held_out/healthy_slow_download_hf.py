"""HF Trainer: the first rank downloads the data set slowly, with progress, inside main_process_first(); the others wait.

class: healthy
kind: healthy
ranks: 2
needs: transformers
"""

import http.server
import os
import tempfile
import threading
import time
import urllib.request

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

SIZE, CHUNK = 240_000, 4_000


class SlowServer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(SIZE))
        self.end_headers()
        for _ in range(SIZE // CHUNK):
            time.sleep(0.25)
            self.wfile.write(bytes(range(100)) * (CHUNK // 100))

    def log_message(self, format: str, *args: object) -> None:
        pass


def download(path: str) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), SlowServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/corpus") as source, open(path, "wb") as file:
        received = 0
        while chunk := source.read(CHUNK):
            received += file.write(chunk)
            print(f"\rcorpus.bin: {received / SIZE:4.0%} {received // 1000} kB", end="", flush=True)
    print(flush=True)
    server.shutdown()


class Bytes(torch.utils.data.Dataset):
    def __init__(self, content: bytes) -> None:
        self.ids = torch.tensor(list(content[:16_000]))

    def __len__(self) -> int:
        return len(self.ids) // 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index * 16 : index * 16 + 16]
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    args = TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=80,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        use_cpu=True,
        logging_steps=10,
        report_to=[],
        save_strategy="no",
    )
    path = os.path.join(tempfile.gettempdir(), f"corpus-{os.environ['MASTER_PORT']}.bin")
    with args.main_process_first(desc="download"):
        if not os.path.exists(path):
            download(path)
        with open(path, "rb") as file:
            dataset = Bytes(file.read())
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    Trainer(model, args, train_dataset=dataset).train()


main()
