"""argparse does not know an argument that the command line has.

class: environment
kind: crash
ranks: 2
args: --lr 0.1 --bathc-size 8
expect: rank.exit, launch.*, @raised, env.*
rank: any
line: none
must-mention: --bathc-size
"""

import argparse

import torch.distributed as dist


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch-size", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    dist.init_process_group("gloo")
    dist.barrier()
