"""Rules of a sequence that several ranks share."""

from mpipar.config.nearest import advice, divisors, neighbours
from mpipar.config.register import rule
from mpipar.config.values import Values


def head_ranks(method: str, ranks: int, asked: int, heads: int, kv_heads: int) -> int:
    """How many neighbours exchange heads.

    ranks   of the context axis;  asked  parallel.ulysses
    heads, kv_heads   on one tensor rank
    """
    if method == "ulysses":
        return ranks
    if method != "usp":
        return 1
    if asked:
        return asked
    fitting = [n for n in divisors(ranks) if heads_fit(n, heads, kv_heads)]
    return max(fitting, default=1)


def heads_fit(ranks: int, heads: int, kv_heads: int) -> bool:
    """True where each of the ranks gets whole query heads, and key/value heads too, or
    one that several share."""
    whole = kv_heads % ranks == 0 or ranks % kv_heads == 0
    return heads % ranks == 0 and whole


@rule("parallel.context", "parallel.context_method", "parallel.ulysses")
def _ulysses_cuts_context(v: Values, ranks: int, method: str, asked: int) -> str | None:
    if not asked:
        return None
    if method != "usp":
        text = f'{v.say("parallel.ulysses")} is for parallel.context_method = "usp"'
        return text + advice({"parallel.ulysses": [0]})
    if ranks % asked == 0:
        return None
    text = f"{v.say('parallel.ulysses')} must divide {v.say('parallel.context')}"
    return text + advice({"parallel.ulysses": neighbours(asked, divisors(ranks))})


@rule(
    "parallel.context", "parallel.context_method", "parallel.ulysses",
    "parallel.tensor", "model.heads", "model.kv_heads",
)  # fmt: skip
def _ulysses_cuts_heads(
    v: Values, ranks: int, method: str, asked: int, tensor: int, heads: int, kv: int
) -> str | None:
    if heads % tensor:
        return None
    own, own_kv = heads // tensor, max(1, kv // tensor)
    count = head_ranks(method, ranks, asked, own, own_kv)
    if heads_fit(count, own, own_kv):
        return None
    key = "parallel.ulysses" if method == "usp" else "parallel.context"
    fitting = [n for n in divisors(own) if heads_fit(n, own, own_kv)]
    text = (
        f"{v.say(key)} must divide the {own} query heads of a tensor rank, and divide "
        f"its {own_kv} key/value heads or be a multiple of them"
    )
    return text + advice({key: neighbours(count, fitting)})
