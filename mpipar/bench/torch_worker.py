"""Training steps of a recipe in PyTorch, served to the comparison. Imports no mpipar
but its own neighbours, since this Python may have nothing else of it."""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from mpipar.bench.torch_model import Transformer, load
from mpipar.bench.torch_optimizer import by_kind, clip_to, make_adam, total_norm
from mpipar.bench.turns import Turns
from mpipar.bench.work import read_work, worker_arguments


def main() -> None:
    """Serve steps until the orders end."""
    parser = worker_arguments()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    modes = ("eager", *MODES, *PIPELINES)
    parser.add_argument("--mode", choices=modes, default="eager")
    parser.add_argument("--micro-batches", type=int, default=1)
    args = parser.parse_args()
    with Turns(args.folder, args.rank, args.processes, args.cores) as turns:
        torch.set_num_threads(args.threads)
        if args.processes > 1:
            meet = f"file://{args.folder}/meet"
            dist.init_process_group(
                "gloo", meet, rank=args.rank, world_size=args.processes
            )
        if args.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        facts = {"torch": torch.__version__, "numpy": np.__version__}
        turns.serve(_make_step(args), facts | {"threads": torch.get_num_threads()})
    if args.processes > 1:
        dist.destroy_process_group()


def _make_step(args: argparse.Namespace) -> Callable[[], float]:
    """One training step on this process's sequences, as a function."""
    if args.mode in PIPELINES:
        from mpipar.bench.torch_pipeline import pipeline_step

        work, schedule = read_work(args.folder), PIPELINES[args.mode]
        return pipeline_step(work, schedule, args.micro_batches)
    shards = args.processes if args.mode == "tp" else 1
    work = read_work(args.folder, shards)
    with torch.device(args.device):
        model = Transformer(work.recipe["model"], shards)
    load(model, work.weights)
    run = MODES[args.mode](model) if args.mode in MODES else model
    # Wrapping may have replaced the parameters.
    groups = by_kind(model.parameters())
    adam = make_adam(groups, work.recipe["optimizer"])
    ids, labels = (
        torch.from_numpy(_own_rows(batch, args)).to(args.device)
        for batch in (work.ids, work.labels)
    )
    clip, bf16 = work.recipe["train"]["clip"], args.precision == "bf16"

    def step() -> float:
        with torch.autocast(args.device, torch.bfloat16, enabled=bf16):
            loss = run(ids, labels)
        loss.backward()
        if clip:
            clip_to(clip, groups, total_norm(groups))
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


def _blocks(model: nn.Module) -> nn.Module:
    """All blocks run the code that is compiled once for the first of them."""
    for block in model.blocks:
        block.compile()
    model.head.compile()
    return model


MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": torch.compile,
    "blocks": _blocks,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "tp": _tp,
}
# Classes of torch.distributed.pipelining.
PIPELINES = {"pp-1f1b": "Schedule1F1B", "pp-zb": "ScheduleInterleavedZeroBubble"}


def _mesh() -> Any:
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


if __name__ == "__main__":
    main()
