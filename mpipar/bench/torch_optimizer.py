"""AdamW and clipping as a recipe says, in PyTorch, for whole and cut parameters."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

# Parameters by (decays, is cut): no call takes cut and whole ones together.
Groups = Mapping[tuple[bool, bool], list[Tensor]]


def by_kind(parameters: Iterable[Tensor]) -> Groups:
    """These parameters in their groups."""
    kinds: dict[tuple[bool, bool], list[Tensor]] = {}
    for p in parameters:
        kinds.setdefault((p.dim() > 1, isinstance(p, DTensor)), []).append(p)
    return kinds


def make_adam(groups: Groups, o: Mapping[str, float]) -> torch.optim.Optimizer:
    """AdamW as the recipe says; matrices alone decay."""
    settings = [
        {"params": params, "weight_decay": o["weight_decay"] if decays else 0.0}
        for (decays, _), params in groups.items()
    ]
    betas = (o["beta1"], o["beta2"])
    return torch.optim.AdamW(
        settings, lr=o["lr"], betas=betas, eps=o["eps"], fused=True
    )


def total_norm(groups: Groups) -> Tensor:
    """Norm of all gradients, over all groups."""
    norms = []
    for params in groups.values():
        norm = get_total_norm([p.grad for p in params])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_to(limit: float, groups: Groups, norm: Tensor) -> None:
    """clip_grad_norm_ by a norm that is known."""
    for params in groups.values():
        clip_grads_with_norm_(params, limit, norm)
