"""The trainer once more, by TRL: its GRPOTrainer on the same batches. Goes on from its newest checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from directory import WORDS
from policy import new_policy
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig

import streamadv as sa
from streamadv.integrations.trl import QueueGRPOTrainer, newest_checkpoint, queue_for


def new_tokenizer() -> PreTrainedTokenizerFast:
    """TRL wants one, if only to know how rows are padded."""
    words = models.WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token=WORDS[0])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token=WORDS[0], eos_token=WORDS[0])


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    policy = new_policy()
    sa.weights.load(options.start, policy)
    args = GRPOConfig(
        output_dir=str(options.output), max_steps=options.updates, save_steps=options.checkpoint_every,
        learning_rate=options.lr, lr_scheduler_type="constant_with_warmup", warmup_steps=10, max_grad_norm=1.0,
        adam_beta2=0.99, loss_type="dapo", epsilon=0.2, beta=0.0,  # PPO's clip, mean over tokens, no KL
        logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
    )  # fmt: skip
    queue = queue_for(
        args, sa.redis_url(), chain="grpo", batch_groups=8,
        max_staleness=options.max_staleness, drop_after=options.max_staleness, max_filtered_batches=None,
    )  # fmt: skip
    published = {"weights": options.weights, "keep_every": options.keep_every}
    trainer = QueueGRPOTrainer(policy, args, queue, processing_class=new_tokenizer(), **published)
    trainer.train(resume_from_checkpoint=newest_checkpoint(options.output))
    queue.finish()  # rollouts begin no more groups
    queue.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, default=Path("start.safetensors"), help="made by policy.py")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder to publish versions to")
    parser.add_argument("--keep-every", type=int, default=10, metavar="VERSIONS", help="kept for evaluate.py")
    parser.add_argument("--output", type=Path, default=Path("out"), help="TRL's checkpoints")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="UPDATES")
    parser.add_argument("--max-staleness", type=int, default=2, help="0: synchronous")
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--updates", type=int, default=100, help="after which it ends")
    sa.run_program(main, parser.parse_args())
