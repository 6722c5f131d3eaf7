"""Training steps of a recipe in PyTorch, served to the comparison. Imports no mpipar
but its own neighbours, since this Python may have nothing else of it."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mpipar.bench.torch_model import Transformer, load
from mpipar.bench.turns import Turns
from mpipar.bench.work import read_work, worker_arguments


def main() -> None:
    """Serve steps until the orders end."""
    parser = worker_arguments()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--mode", choices=("eager", *MODES), default="eager")
    args = parser.parse_args()
    with Turns(args.folder, args.rank, args.processes, args.cores) as turns:
        torch.set_num_threads(args.threads)
        if args.processes > 1:
            meet = f"file://{args.folder}/meet"
            dist.init_process_group(
                "gloo", meet, rank=args.rank, world_size=args.processes
            )
        facts = {"torch": torch.__version__, "numpy": np.__version__}
        turns.serve(_make_step(args), facts | {"threads": torch.get_num_threads()})
    if args.processes > 1:
        dist.destroy_process_group()


def _make_step(args: argparse.Namespace) -> Callable[[], float]:
    """One training step on this process's sequences, as a function."""
    shards = args.processes if args.mode == "tp" else 1
    work = read_work(args.folder, shards)
    model = Transformer(work.recipe["model"], shards)
    load(model, work.weights)
    run = MODES[args.mode](model) if args.mode in MODES else model
    # Wrapping may have replaced the parameters.
    groups = _by_kind(model)
    adam = _adam(groups, work.recipe["optimizer"])
    ids, labels = (
        torch.from_numpy(_own_rows(batch, args)) for batch in (work.ids, work.labels)
    )
    clip, bf16 = work.recipe["train"]["clip"], args.precision == "bf16"

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = run(ids, labels)
        loss.backward()
        if clip:
            _clip(groups, clip)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _own_rows(batch: np.ndarray, args: argparse.Namespace) -> np.ndarray:
    """The sequences of this process; those of tensor parallelism share all."""
    if args.mode == "tp":
        return batch
    if len(batch) % args.processes:
        raise ValueError(
            f"{args.processes} processes do not divide {len(batch)} sequences"
        )
    return np.split(batch, args.processes)[args.rank]


def _ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tp(model: nn.Module) -> nn.Module:
    """Megatron's cut of every block; embedding and head stay whole."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    first = "up" if hasattr(model.blocks[0].mlp, "up") else "gate_up"
    mesh = _mesh()
    for block in model.blocks:
        plan = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            f"mlp.{first}": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return model


MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": torch.compile,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "tp": _tp,
}


def _mesh() -> Any:
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def _by_kind(model: nn.Module) -> dict[tuple[bool, bool], list[Tensor]]:
    """Parameters by (decays, is cut): no call takes cut and whole ones together."""
    kinds: dict[tuple[bool, bool], list[Tensor]] = {}
    for p in model.parameters():
        kinds.setdefault((p.dim() > 1, isinstance(p, DTensor)), []).append(p)
    return kinds


def _adam(
    groups: Mapping[tuple[bool, bool], list[Tensor]], o: Mapping[str, float]
) -> torch.optim.Optimizer:
    """AdamW as the recipe says; matrices alone decay."""
    settings = [
        {"params": params, "weight_decay": o["weight_decay"] if decays else 0.0}
        for (decays, _), params in groups.items()
    ]
    betas = (o["beta1"], o["beta2"])
    return torch.optim.AdamW(
        settings, lr=o["lr"], betas=betas, eps=o["eps"], fused=True
    )


def _clip(groups: Mapping[tuple[bool, bool], list[Tensor]], clip: float) -> None:
    """clip_grad_norm_ by the norm over all groups."""
    norms = []
    for params in groups.values():
        norm = get_total_norm([p.grad for p in params])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for params in groups.values():
        clip_grads_with_norm_(params, clip, total)


if __name__ == "__main__":
    main()
