"""Faults that are planted in experts are noticed by the comparison with one rank."""

import numpy as np
import pytest
from parity.build import FP64, compare, make_recipe
from parity.test_experts import CP2, EP2, MODEL

from mpipar.layers.expert import mixture, router
from mpipar.layers.expert.dispatch import Dispatch
from mpipar.zero.gradients import BucketedGradients


def average_over_copies(patch):
    """Gradients of experts are means over the ranks that hold them."""
    finish = BucketedGradients.finish

    def mean(self):
        finish(self)
        if self.axis.name == "edp":
            self.flat.grad /= self.axis.size

    patch.setattr(BucketedGradients, "finish", mean)


def send_a_token_twice(patch):
    """The first token goes to its first expert again, not to the second."""
    whole = mixture.make_plan

    def plan(chosen, *rest):
        chosen = chosen.copy()
        chosen[0, 1] = chosen[0, 0]
        return whole(chosen, *rest)

    patch.setattr(mixture, "make_plan", plan)


def fill_locally(patch):
    """An expert takes its share of the tokens of each rank."""
    whole = router.spread

    def spread(chosen, positions, experts, length, capacity, axes):
        own = len(positions)
        return whole(chosen, np.arange(own), experts, own, capacity, ())

    patch.setattr(router, "spread", spread)


def balance_locally(patch):
    """Each rank balances the tokens that it has of a sequence."""
    whole = router.spread
    patch.setattr(router, "spread", lambda *given: whole(*given[:-1], ()))


def mix_rows(patch):
    """Rows stay as they come, by rank, and go to whichever expert is next."""
    patch.setattr(Dispatch, "arrived", lambda self, handle, plan: handle.wait())


def forget_the_gates(patch):
    """Routers learn of their own losses alone."""
    whole = router.Router.backward

    def backward(self, dgates, *rest):
        return whole(self, 0 * dgates, *rest)

    patch.setattr(router.Router, "backward", backward)


def count_own_loads(patch):
    """Routers of one rank alone see loads, so that biases follow its tokens."""
    whole = router.Router.loads

    def loads(self, *given):
        found = whole(self, *given)
        return found if self.sequence[0].rank == 0 else 0 * found

    patch.setattr(router.Router, "loads", loads)


ROUTER, BIAS = "gradients blocks.1.mlp.router", "weights blocks.1.mlp.router.bias"
PLANTED = [
    (average_over_copies, "", "gradients blocks.0.mlp.experts.0.down.weight"),
    (send_a_token_twice, EP2, "loss"),
    (fill_locally, f"{CP2} experts.capacity=0.75", "loss"),
    (balance_locally, f"{CP2} experts.balance=0.5", f"{ROUTER}.weight"),
    (mix_rows, EP2, "loss"),
    (forget_the_gates, EP2, f"{ROUTER}.weight"),
    (count_own_loads, f"{CP2} experts.bias_rate=0.1 train.global_batch=2", BIAS),
]


@pytest.mark.parametrize(("fault", "words", "what"), PLANTED)
@pytest.mark.mpi(2)
def test_a_planted_fault_is_found(comm, monkeypatch, fault, words, what):
    recipe = make_recipe(2, *MODEL.split(), *words.split())
    assert compare(recipe, comm, steps=1).above(FP64) == {}
    fault(monkeypatch)
    found = compare(recipe, comm, steps=1).above(1e-4)
    assert what in found
    # The forward pass of most is right
    assert ("loss" in found) == (what == "loss")
