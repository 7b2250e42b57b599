"""The cache is opened with pickle, and is a text file (a Git LFS pointer).

class: corrupt-files
kind: crash
ranks: 2
expect: data.corrupt
rank: any
line: required
must-mention: vocabulary.pkl
"""

import os
import pickle
import tempfile

import torch.distributed as dist

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"


class Vocabulary:
    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "vocabulary.pkl")

    def load(self) -> dict:
        with open(self.path, "rb") as file:
            return pickle.load(file)  # FAULT


def main() -> None:
    dist.init_process_group("gloo")
    vocabulary = Vocabulary(tempfile.mkdtemp())
    with open(vocabulary.path, "w") as file:
        file.write(POINTER)
    print(len(vocabulary.load()))  # NEAR


main()
