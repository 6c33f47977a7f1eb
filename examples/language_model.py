"""Train a small GPT on the bytes of a text, on one process or many, and compare the curves:

    python examples/language_model.py --output one
    torchrun --standalone --nproc-per-node 2 examples/language_model.py --output two --batch-size 3 --compare one

The documents are of unequal length, so each process and each micro-batch holds another number of bytes. Still both take
the same optimizer steps, each on 16 documents, and follow the same curve to the same perplexity; what is left between
them is rounding, as `--float64` shows. The text is what Python's `help()` tells of the language; `--text` takes another.
"""

import argparse
import json
import math
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from callbacks import Checkpoint, JSONLines, ProgressBar
from trainer import DDPTrainer, Mean, TrainerConfig, World

END = 256  # the token before and after each document; those below are bytes
PADDING = -100  # among the targets: nothing to predict


class LanguageModel(DDPTrainer):
    def training_step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Mean]:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
        return {"loss": Mean(loss, (targets != PADDING).sum())}  # every token weighs the same, in whichever batch it is

    def summarize(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics | {"perplexity": math.exp(min(metrics["loss"], 700))}  # from the mean over all tokens of all processes


class Block(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.output1 = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.hidden, self.output2 = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output1(attended.transpose(1, 2).flatten(2))
        x = x + self.output2(nn.functional.gelu(self.hidden(self.norm2(x))))
        return x


class GPT(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, block: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(END + 1, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(heads, width) for _ in range(layers)), nn.LayerNorm(width, bias=False))
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # each layer adds its two outputs to what passes through all of them
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if "output" in name else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return nn.functional.linear(self.blocks(x), self.tokens.weight)


class Documents(Dataset[Tensor]):
    def __init__(self, documents: list[bytes]) -> None:
        self.tokens = [torch.tensor([END, *document, END]) for document in documents]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def collate(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Inputs and, one token on, targets: as long as the longest document, the others padded."""
    tokens = nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=PADDING)
    return tokens[:, :-1].clamp(min=0), tokens[:, 1:]  # no token sees what comes after it, so padded inputs may be anything


def schedule(optimizer: Optimizer, total_steps: int) -> LambdaLR:
    """Up to the full rate over the first twentieth of the steps, then down along a half cosine to a tenth of it."""
    warmup = max(1, total_steps // 20)
    return LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / total_steps)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--output", type=Path, help="folder for logs and checkpoints (default: a new one below runs/)")
    where.add_argument("--resume", type=Path, help="go on with the run in this folder; without one there, start it")
    parser.add_argument("--compare", type=Path, help="folder of a run whose curve this one's is compared with")
    parser.add_argument("--text", type=Path, help="file with the text; empty lines separate the documents")
    for name, default in {"layers": 2, "heads": 4, "width": 96, "block": 64, "epochs": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch-size", type=int, default=16, help="documents a process holds at once, at the most")
    parser.add_argument("--global-batch", type=int, default=16, help="documents per optimizer step, over all processes")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between evaluations, each with a checkpoint")
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate of AdamW at its highest")
    parser.add_argument("--float64", action="store_true", help="in float64, where splits agree to the printed digits")
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    torch.set_default_dtype(torch.float64 if options.float64 else torch.float32)
    text = options.text.read_bytes() if options.text else "\n\n".join(topics.values()).encode()
    size = options.block - 1  # bytes of a document at the most: one END goes in before them
    parts = [part[at : at + size] for part in map(bytes.strip, text.split(b"\n\n")) for at in range(0, len(part), size)]
    test, train = Documents(parts[::10]), Documents([part for number, part in enumerate(parts) if number % 10])
    world = World.from_env()
    folder = options.resume or options.output or world.broadcast(Path("runs", time.strftime("gpt-%Y-%m-%d-%H%M%S")))
    torch.manual_seed(42)
    model = GPT(options.layers, options.heads, options.width, options.block)
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.1)
    config = TrainerConfig(
        epochs=options.epochs,
        batch_size=options.batch_size,
        global_batch_size=options.global_batch,
        eval_every=options.eval_every,
        max_grad_norm=1.0,
    )
    callbacks = [ProgressBar(), JSONLines(folder / "log.jsonl"), Checkpoint(folder, options.eval_every, monitor="perplexity")]
    loading = {"collate_fn": collate}
    trainer = LanguageModel(
        model, optimizer, train, test, scheduler=schedule, loader_options=loading, config=config, callbacks=callbacks, world=world
    )
    with trainer:
        steps, perplexity = trainer.fit(resume_from=options.resume).step, trainer.evaluate()["perplexity"]
    world.close()
    if world.is_main:
        print(f"files in {folder}")
        if options.compare:
            logs = (map(json.loads, (run / "log.jsonl").read_text().splitlines()) for run in (options.compare, folder))
            one, two = ({line["step"]: line["loss"] for line in log if line["kind"] == "step"} for log in logs)
            print(f"largest distance from that curve: {max(abs(one[step] - two[step]) for step in one.keys() & two.keys()):.1e}")
        seen, asked = (torch.cat([tokens[1:] for tokens in documents.tokens]) for documents in (train, test))
        unigram = ((len(seen) + END + 1) / (seen.bincount(minlength=END + 1) + 1)).log()[asked].mean()
        print(f"test perplexity {perplexity:.3f} (of byte frequencies alone: {unigram.exp():.1f}), {steps} steps")


if __name__ == "__main__":
    main(parse())
