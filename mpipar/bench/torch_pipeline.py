"""Training steps of a recipe in PyTorch's own pipeline: a stage for each process.

Beside its neighbours it takes of mpipar the partition, which is plain Python.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from mpipar.bench.torch_model import Block, Embedding, Head, load, mean_loss
from mpipar.bench.torch_optimizer import by_kind, clip_to, make_adam, total_norm
from mpipar.bench.work import Work
from mpipar.pipeline.partition import even


class Stage(nn.Module):
    """A run of blocks, with the embedding before the first and the head after the last.

    Parameters have the names that they have in the whole model. Where the embedding is
    tied, the last stage has a copy of it.
    """

    def __init__(self, m: Mapping[str, Any], index: int, stages: int) -> None:
        super().__init__()
        counts = even(m["layers"], stages)
        begin = sum(counts[:index])
        own = range(begin, begin + counts[index])
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.tied = m["tied"]
        if self.is_first:
            self.embedding = Embedding(m)
        elif self.is_last and self.tied:
            tokens = nn.Embedding(m["vocab"], m["width"])
            self.embedding = nn.ModuleDict({"token": tokens})
        self.blocks = nn.ModuleDict({str(i): Block(m, 1) for i in own})
        if self.is_last:
            self.head = Head(m)

    @property
    def shared(self) -> Tensor | None:
        """What the first and the last stage both have; None where that is nothing."""
        if self.tied and (self.is_first or self.is_last):
            return self.embedding.token.weight
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or what the stage before has made, to hidden values or logits."""
        if self.is_first:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head.logits(x, self.shared) if self.is_last else x


def pipeline_step(work: Work, schedule: str, micro_batches: int) -> Callable[[], float]:
    """One training step of this process's stage, as a function.

    schedule   name of a class of torch.distributed.pipelining
    """
    clip, stages = work.recipe["train"]["clip"], dist.get_world_size()
    stage = Stage(work.recipe["model"], dist.get_rank(), stages)
    load(stage, work.weights)
    groups = by_kind(stage.parameters())
    adam = make_adam(groups, work.recipe["optimizer"])
    ids, labels = torch.from_numpy(work.ids), torch.from_numpy(work.labels)
    pipe = _pipe(stage, work, schedule, micro_batches)
    shared, ends = stage.shared, dist.new_group([0, stages - 1])
    # The norm counts the first stage's copy.
    copy = shared if stage.is_last else None
    counted = by_kind(p for p in stage.parameters() if p is not copy)

    def step() -> float:
        losses: list[Tensor] = []
        inputs = [ids] if stage.is_first else []
        pipe.step(*inputs, target=labels, losses=losses, return_outputs=False)
        if shared is not None:
            dist.all_reduce(shared.grad, group=ends)
        square = total_norm(counted) ** 2
        sums = torch.stack([square, sum(losses, torch.zeros(())).detach()])
        dist.all_reduce(sums)
        if clip:
            clip_to(clip, groups, sums[0].sqrt())
        adam.step()
        adam.zero_grad(set_to_none=True)
        return sums[1].item()

    return step


def _pipe(stage: Stage, work: Work, schedule: str, micro_batches: int) -> Any:
    """The schedule of this process, for parts of the batch of equal size."""
    m, (batch, length) = work.recipe["model"], work.ids.shape
    if batch % micro_batches:
        raise ValueError(f"{micro_batches} parts do not divide {batch} sequences")
    shape = (batch // micro_batches, length)
    ids = torch.empty(shape, dtype=torch.int64)
    hidden = torch.empty(*shape, m["width"], requires_grad=True)
    logits = torch.empty(*shape, m["vocab"], requires_grad=True)
    runner = pipelining.PipelineStage(
        stage,
        dist.get_rank(),
        dist.get_world_size(),
        torch.device("cpu"),
        input_args=ids if stage.is_first else hidden,
        output_args=logits if stage.is_last else hidden,
    )

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(logits, labels) / micro_batches

    kind = getattr(pipelining, schedule)
    one = issubclass(kind, PipelineScheduleSingle)
    stages = runner if one else [runner]
    return kind(stages, micro_batches, loss_fn=loss, scale_grads=False)
