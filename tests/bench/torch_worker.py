"""The model of models/small.toml in PyTorch: eager, fp32, fused AdamW, clipping."""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from turns import serve


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """GPT with learned positions and a tied head; returns the mean loss."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocab: int):
        super().__init__()
        self.token, self.position = (
            nn.Embedding(vocab, width),
            nn.Embedding(context, width),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                ends = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, 0, 0.02 / (math.sqrt(2 * layers) if ends else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.token.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    """Serves training steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = Gpt(layers=6, width=384, heads=6, context=256, vocab=256)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    batch = np.random.default_rng(0).integers(0, 256, (2, 16, 256))
    ids, labels = torch.from_numpy(batch)

    def step() -> float:
        loss = model(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.item()

    serve(args.folder, 0, step)


if __name__ == "__main__":
    main()
