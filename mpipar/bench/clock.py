"""Where the time of a step goes: a clock on every public call of the ops."""

import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from typing import Any

from mpipar.ops import Ops

OTHER = "other array work"
# The first prefix that fits an op's name says its category.
PREFIXES = (
    ("linear_db", OTHER),  # a sum, not a product
    ("linear_", "matrix products"),
    ("attention_", "attention"),
    ("layernorm_", "norms"),
    ("rmsnorm_", "norms"),
    ("gelu_", "activation"),
    ("swiglu_", "activation"),
    ("xent_", "loss"),
    ("row_max", "loss"),
    ("loss_sum", "loss"),
    ("embedding_", "embedding"),
    ("gather_rows", "rows to experts"),
    ("combine_rows", "rows to experts"),
    ("adamw", "optimizer"),
    ("square_sum", "optimizer"),
)
CATEGORIES = (*dict.fromkeys(kind for _, kind in PREFIXES if kind != OTHER), OTHER)


def category(name: str) -> str:
    """What kind of work an op does."""
    return next((kind for start, kind in PREFIXES if name.startswith(start)), OTHER)


class OpsClock:
    """Seconds inside the public methods of an ops object, by category.

    A call made inside another one is taken off the outer one's time; helpers that have
    no category of their own count to that of their caller.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.seconds: Counter[str] = Counter()
        # Category and seconds of inner calls, of every call that is open.
        self._open: list[list[Any]] = []
        for name in dir(type(ops)):
            if not name.startswith("_") and isfunction(getattr(type(ops), name)):
                setattr(ops, name, self._timed(name, getattr(ops, name)))

    def take(self) -> dict[str, float]:
        """Seconds by category since the last taking."""
        taken = {kind: self.seconds[kind] for kind in CATEGORIES}
        self.seconds.clear()
        return taken

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        kind = category(name)
        wait = type(self.ops).synchronize

        @wraps(method)
        def timed(*args: Any, **options: Any) -> Any:
            own = kind
            if own == OTHER and self._open:
                own = self._open[-1][0]
            self._open.append([own, 0.0])
            begin = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                # A device works on after the call has returned.
                wait(self.ops)
                spent = time.perf_counter() - begin
                _, inner = self._open.pop()
                self.seconds[own] += spent - inner
                if self._open:
                    self._open[-1][1] += spent

        return timed
