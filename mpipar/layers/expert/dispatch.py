"""Rows of tokens travel to the experts that they have chosen, and back."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpipar.ops import Ops

Array = Any


@dataclass(slots=True)
class Plan:
    """Where each row goes. Rows are ordered by the expert, then by the token.

    tokens    (n,) the token of each row that leaves this rank
    rows      (t, k) the row of each choice; n where it is not taken
    routes    rows that go to each rank, and rows that come from each
    order     (m,) places of the rows that come, ordered by the own expert; None where
              they come like that
    bounds    (own experts + 1,) where each one's rows begin
    """

    tokens: np.ndarray
    rows: np.ndarray
    routes: tuple[list[int], list[int]]
    order: np.ndarray | None
    bounds: np.ndarray


def make_plan(
    chosen: np.ndarray, kept: np.ndarray | None, experts: int, ep: Any
) -> Plan:
    """Plans the moves of all ranks of `ep`. Collective: an all-to-all of 8·e bytes.

    chosen (t, k);  kept (t, k) or None = all are
    """
    flat = chosen.reshape(-1)
    taken = np.arange(flat.size) if kept is None else np.flatnonzero(kept)
    ordered = taken[np.argsort(flat[taken], kind="stable")]
    rows = np.full(flat.size, len(ordered))
    rows[ordered] = np.arange(len(ordered))
    leaving = np.bincount(flat[taken], minlength=experts)
    arriving = ep.all_to_all(leaving).reshape(ep.size, -1)
    bounds = np.concatenate([[0], arriving.sum(axis=0).cumsum()])
    order = None
    if ep.size > 1:
        # Expert of each row, as they come: by rank, then by expert
        own = np.tile(np.arange(arriving.shape[1]), ep.size)
        order = np.argsort(np.repeat(own, arriving.reshape(-1)), kind="stable")
    routes = (
        leaving.reshape(ep.size, -1).sum(axis=1).tolist(),
        arriving.sum(axis=1).tolist(),
    )
    k = chosen.shape[1]
    return Plan(ordered // k, rows.reshape(chosen.shape), routes, order, bounds)


class Dispatch:
    """Moves rows by a plan, over `ep`; each move is the adjoint of its return.

    Moves     send, give_back: all-to-all of the rows that other ranks have or get, d
              items each. Under even loads (ep−1)/ep · t·k·d items
    Source    Lepikhin et al. 2020 (GShard); Gale et al. 2022 (no token is dropped)
    """

    def __init__(self, ops: Ops, ep: Any) -> None:
        self.ops, self.ep = ops, ep

    def send_start(self, rows: Array, plan: Plan) -> Any:
        """Begins to bring rows (n, d) to their experts."""
        return self.ep.all_to_all_start(rows, plan.routes)

    def arrived(self, handle: Any, plan: Plan) -> Array:
        """What has come, ordered by expert.  →  (m, d)"""
        rows = handle.wait()
        if plan.order is None:
            return rows
        return self.ops.gather_rows(rows, self.ops.asarray(plan.order))

    def give_back_start(self, rows: Array, plan: Plan) -> Any:
        """Begins to bring rows (m, d), ordered by expert, to where they came from."""
        if plan.order is not None:
            places = np.empty_like(plan.order)
            places[plan.order] = np.arange(len(places))
            rows = self.ops.gather_rows(rows, self.ops.asarray(places))
        leaving, arriving = plan.routes
        return self.ep.all_to_all_start(rows, (arriving, leaving))

    def collect(self, rows: Array, plan: Plan, gates: Array | None, out: Array) -> None:
        """out[t] += Σ_k gate·row of the choices that are taken.

        rows (n, d);  gates (t, k) or None = 1;  out (t, d)
        """
        places = self.ops.asarray(plan.rows)
        self.ops.combine_rows(rows, places, gates, out=out)
