"""python original_trainer.py"""

import sys
import tempfile

from reviews import bert, sentences
from transformers import Trainer, TrainingArguments


def main(target):
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=2,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(bert(), arguments, train_dataset=sentences(), eval_dataset=sentences(train=False))
    trainer.train()
    trainer.save_model(target)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["trained"]))
