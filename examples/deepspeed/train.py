"""A training script written against DeepSpeed's API: its only line that knows better is the import.

    shardwise deepspeed --num_gpus 2 examples/deepspeed/train.py --deepspeed_config examples/deepspeed/ds_config.json

With `import deepspeed` instead it is a plain DeepSpeed script; benchmarks/deepspeed_parity.py runs both and compares.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

import shardwise.deepspeed as deepspeed

VOCABULARY, LENGTH, WIDTH, HEADS, DEPTH = 97, 32, 48, 4, 3


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each beside a residual."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """A small language model that returns its loss."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Progressions(torch.utils.data.Dataset):
    """Sequences that grow by a constant, with some noise: learnable, but not at once."""

    def __init__(self, size=256):
        draw = torch.Generator().manual_seed(0)
        start = torch.randint(VOCABULARY, (size, 1), generator=draw)
        pace = torch.randint(1, 6, (size, 1), generator=draw)
        noise = (torch.rand(size, LENGTH, generator=draw) < 0.05) * torch.randint(9, (size, LENGTH), generator=draw)
        self.rows = (start + pace * torch.arange(LENGTH) + noise) % VOCABULARY

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--client_scheduler", action="store_true", help="a scheduler of torch instead of the config's")
    parser.add_argument("--save", help="folder for a checkpoint half way")
    parser.add_argument("--load", help="folder of a checkpoint to go on from")
    parser.add_argument("--losses", help="file for the mean loss of each update, its rate and its gradient norm")
    return deepspeed.add_config_arguments(parser).parse_args()


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)


def main():
    args = parse_args()
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    with open(args.deepspeed_config) as file:
        settings = json.load(file)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=settings["zero_optimization"]["stage"] == 3):
        model = Model()
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        training_data=Progressions(),
        lr_scheduler=halving if args.client_scheduler else None,
    )
    skip = 0
    if args.load:
        _, client_state = engine.load_checkpoint(args.load)
        skip = client_state["micro_batches"]
    records, total, count = [], torch.zeros((), device=engine.device), 0
    while engine.global_steps < args.updates:
        for batch in loader:
            count += 1
            if count <= skip:
                continue
            loss = engine(batch.to(engine.device))
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            total += loss.detach()
            if not boundary:
                continue
            deepspeed.comm.all_reduce(total)
            mean = total.item() / engine.gradient_accumulation_steps() / deepspeed.comm.get_world_size()
            records.append({"loss": mean, "lr": engine.get_lr()[0], "norm": float(engine.get_global_grad_norm())})
            total.zero_()
            if args.save and engine.global_steps == args.updates // 2:
                engine.save_checkpoint(args.save, client_state={"micro_batches": count})
            if engine.global_steps >= args.updates:
                break
    if args.losses and deepspeed.comm.get_rank() == 0:
        with open(args.losses, "w") as file:
            json.dump(records, file)


if __name__ == "__main__":
    main()
