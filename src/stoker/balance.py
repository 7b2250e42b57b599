"""Unlike cards in anybody's DDP loop, in two lines: `stoker docs balance`. Needs torch and nothing else of Stoker's; works
under any launcher.

loader = DataLoader(dataset, batch_sampler=balance.Sampler(dataset, batch=64))    # 64 samples a step, of all ranks
together model = balance.attach(DistributedDataParallel(net), loader)
"""

from stoker.training.balance.dropin import Sampler, attach

__all__ = ["Sampler", "attach"]
