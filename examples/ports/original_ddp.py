"""torchrun --nproc-per-node 2 original_ddp.py"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from net import Digits, Net


def main(target):
    dist.init_process_group("gloo")
    train = Digits()
    sampler = DistributedSampler(train, shuffle=False)
    loader = DataLoader(train, batch_size=64 // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_function = nn.CrossEntropyLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), target)
    dist.barrier()  # nobody ends before it is saved
    del model  # before the group: else its threads sometimes abort the process at its end (torch 2.13, gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["ddp.pt"]))
