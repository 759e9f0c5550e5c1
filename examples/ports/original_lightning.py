"""python original_lightning.py"""

import sys

import lightning
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from net import Digits, Net


class LitDigits(lightning.LightningModule):
    def __init__(self, lr=0.01):
        super().__init__()
        self.lr = lr
        self.net = Net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), batch_size=len(y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [schedule]


def main(target):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, gradient_clip_val=0.5, **quiet)
    module = LitDigits()
    trainer.fit(module, DataLoader(Digits(), batch_size=64), DataLoader(Digits(train=False), batch_size=64))
    torch.save(module.net.state_dict(), target)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["lightning.pt"]))
