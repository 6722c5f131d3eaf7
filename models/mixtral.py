"""Mixtral and its kin: experts in place of a block's MLP, in any family
(Fedus et al. 2021; Jiang et al. 2024; DeepSeek-V3, arXiv:2412.19437)."""

from collections.abc import Callable
from typing import Any

from mpipar.layers.base import Branch
from mpipar.layers.expert import ExpertCut, Mixture, Router
from mpipar.layers.stream import Stream
from mpipar.models.parts import STD, Family


def mixtures(experts: Any, cut: ExpertCut) -> Callable[[Family, str], Mixture]:
    """What makes the mixture of that name in a family.

    experts   the [experts] section of a resolved recipe, with a count
    """

    def make(family: Family, name: str) -> Mixture:
        tp = family.stream.tp
        router = Router(
            f"{name}.router",
            family.model.width,
            experts,
            ops=family.ops,
            std=STD,
            partial="tp" if tp.size > 1 else "",
            owner=tp.rank == 0,
            speaks=tp.rank == 0 or not cut.shared,
            sequence=cut.sequence,
        )

        def mlp(name: str, stream: Stream, scale: int) -> Branch:
            return family.mlp(name, scale * experts.ffn, stream, bias=False)

        shared = {"ops": family.ops, "stream": family.stream, "cut": cut}
        return Mixture(name, router, mlp, **shared)

    return make
