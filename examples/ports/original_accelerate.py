"""accelerate launch --cpu --num_processes 1 original_accelerate.py"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from net import Digits, Net


def main(target):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(Digits(), batch_size=35)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss_function = nn.CrossEntropyLoss()
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_function(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), target)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["accelerate.pt"]))
