"""Recipes of all kinds that keep the rules between fields."""

from typing import Literal, get_args, get_origin

from hypothesis import strategies as st

from mpipar.config import AXES, Recipe
from mpipar.config.context_rules import heads_fit
from mpipar.config.kinds import METHODS
from mpipar.config.recipe import SECTIONS, Experts
from mpipar.config.schedules import NEEDS


def values_of(field) -> st.SearchStrategy:
    """Legal values of a field, by its type and limits."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.text(min_size=1)
    if get_origin(kind) is tuple:
        return st.permutations(AXES).map(tuple)
    low = max(getattr(m, "ge", getattr(m, "gt", 0)) for m in field.metadata)
    high = min(getattr(m, "le", getattr(m, "lt", 1e30)) for m in field.metadata)
    if kind is int:
        return st.integers(low, high)
    above = any(hasattr(m, "gt") for m in field.metadata)
    below = any(hasattr(m, "lt") for m in field.metadata)
    return st.floats(low, high, exclude_min=above, exclude_max=below)


@st.composite
def contexts(draw, heads: int, kv_heads: int) -> dict:
    """Any way to share sequences that so many heads of a tensor rank allow."""
    ranks, method = draw(st.integers(1, 6)), draw(st.sampled_from(METHODS))
    fitting = [
        n
        for n in range(1, ranks + 1)
        if ranks % n == 0 and heads_fit(n, heads, kv_heads)
    ]
    asked = draw(st.sampled_from([0, *fitting])) if method == "usp" else 0
    if method == "ulysses":
        ranks = draw(st.sampled_from(fitting))
    return {"context": ranks, "context_method": method, "ulysses": asked}


@st.composite
def mixtures(draw, tensor: int, spread: int) -> tuple[dict, dict]:
    """Experts with any rules, or none, and how they are shared.

    spread   ranks of context and data
    """
    if draw(st.booleans()):
        cut = {"expert": 1, "expert_tensor": 0}
        return {name: f.default for name, f in Experts.model_fields.items()}, cut
    groups, own = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    shared = draw(st.sampled_from([1, tensor]))
    size = spread * (tensor if shared < tensor else 1)
    count = groups * own
    ranks = draw(st.sampled_from([n for n in range(1, count + 1)
                                  if count % n == 0 and size % n == 0]))  # fmt: skip
    experts = {key: draw(values_of(f)) for key, f in Experts.model_fields.items()}
    experts |= {"count": count, "groups": groups, "dense_blocks": 0, "active": 2}
    experts |= {"active_groups": draw(st.integers(0, groups))}
    experts |= {"ffn": tensor * draw(st.integers(1, 9))}
    return experts, {"expert": ranks, "expert_tensor": shared}


@st.composite
def recipes(draw) -> Recipe:
    """Any recipe that keeps the rules between fields."""
    tables = {
        name: {key: draw(values_of(f)) for key, f in cls.model_fields.items()}
        for name, cls in SECTIONS.items()
    }
    groups, shared, half = (draw(st.integers(1, 40)) for _ in range(3))
    tensor = draw(st.sampled_from([k for k in (1, 2, 4) if groups % k == 0]))
    heads, data = groups * shared, draw(st.integers(1, 8))
    model, train = tables["model"], tables["train"]
    tables["checkpoint"]["copy_every"] *= train["recover"]
    model |= {"heads": heads, "kv_heads": groups, "width": heads * half * 2}
    model |= {"ffn": tensor * half, "context": tensor * draw(st.integers(1, 99))}
    model |= {"vocab": draw(st.integers(256, 10**6))}
    model |= {"activation": "gelu_tanh"} if model["family"] == "llama" else {}
    model |= {"rope_theta": 10000.0} if model["family"] == "gpt" else {}
    shard = draw(st.sampled_from([n for n in range(1, data + 1) if data % n == 0]))
    sharded = tables["parallel"]["zero"] > 0
    tables["parallel"] |= {"tensor": tensor, "data": data}
    tables["parallel"] |= {"zero_shard": shard if sharded else 0}
    tables["parallel"] |= draw(contexts(heads // tensor, groups // tensor))
    spread = data * tables["parallel"]["context"]
    tables["experts"], cut = draw(mixtures(tensor, spread))
    tables["parallel"] |= cut
    tables["parallel"] |= {"transport": "auto"} if train["device"] == "cpu" else {}
    stages, schedule = draw(st.integers(1, 4)), draw(st.sampled_from(list(NEEDS)))
    least, most = NEEDS[schedule].chunks
    chunks = draw(st.integers(least, most or 5))
    counts = draw(st.lists(st.integers(0, 9), min_size=stages * chunks).filter(any))
    counts = counts[: stages * chunks - 1] + [1]
    counts += [0] * (stages * chunks - len(counts))
    words = ["even", "measured", ",".join(map(str, counts))]
    model["layers"] = sum(counts)
    tables["parallel"] |= {"pipeline": stages, "schedule": schedule, "chunks": chunks}
    tables["parallel"] |= {"partition": draw(st.sampled_from(words))}
    # It goes with hardly anything of the above.
    train |= {"graph": False, "attention": "auto"}
    if train["precision"] in ("fp64", "fp32") or schedule == "2bw":
        tables["optimizer"]["rounding"] = "nearest"
    train["micro_batch"] = draw(st.integers(1, 5))
    most = max(1, NEEDS[schedule].per_stage * stages) + draw(st.integers(0, 5))
    train["global_batch"] = data * train["micro_batch"] * most
    train["eval_every"] = 0 if not tables["data"]["validation"] else 7
    tables["optimizer"]["warmup"] = draw(st.integers(0, train["steps"]))
    return Recipe.model_validate(tables)
