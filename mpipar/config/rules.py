"""Rules between fields, and what follows from the number of ranks."""

from math import gcd, prod

# Rooms with rules of their own
from mpipar.config import (  # noqa: F401
    context_rules,
    expert_rules,
    gpu_rules,
    pipeline_rules,
)
from mpipar.config.nearest import advice, around, divisors, either, neighbours
from mpipar.config.recipe import Recipe
from mpipar.config.register import rule as _rule
from mpipar.config.register import violated
from mpipar.config.values import MODEL_AXES, Values, fill
from mpipar.errors import ConfigError


def resolve(recipe: Recipe, ranks: int) -> Recipe:
    """Fill every 0 that means "derived", and check all rules for a number of ranks.

    The size of a vocabulary that only a tokenizer.json knows stays 0. A resolved recipe
    resolves to itself.

    Raises ConfigError that lists every violated rule with the nearest legal values.
    """
    values = fill(Values.of(recipe), ranks)
    violations = violated(values)
    if violations:
        raise ConfigError(violations)
    return values.resolved(recipe)


# The model on its own.


@_rule("model.width", "model.heads")
def _width_in_heads(v: Values, width: int, heads: int) -> str | None:
    if width % heads == 0:
        return None
    # RoPE turns pairs, so that llama needs an even width per head too.
    step = heads * (2 if v.get("model.family") == "llama" else 1)
    rule = f"{v.say('model.width')} must be a multiple of {v.say('model.heads')}"
    return rule + advice({"model.width": around(width, step)})


@_rule("model.family", "model.width", "model.heads")
def _even_head(v: Values, family: str, width: int, heads: int) -> str | None:
    if family != "llama" or width % heads or width // heads % 2 == 0:
        return None
    return (
        f"the width of a head, model.width / model.heads = {width} / {heads} = "
        f"{width // heads}, must be even for the RoPE of model.family = "
        f'"llama"; try model.width = {either(around(width, 2 * heads))}'
    )


@_rule("model.kv_heads", "model.heads")
def _heads_in_groups(v: Values, kv_heads: int, heads: int) -> str | None:
    if heads % kv_heads == 0:
        return None
    rule = f"{v.say('model.kv_heads')} must divide {v.say('model.heads')}"
    return rule + advice({"model.kv_heads": neighbours(kv_heads, divisors(heads))})


@_rule("model.family", "model.activation")
def _activation_of_gpt(v: Values, family: str, activation: str) -> str | None:
    if family == "gpt" or activation == "gelu_tanh":
        return None
    return (
        f'{v.say("model.activation")} is for model.family = "gpt"; '
        f"{v.say('model.family')} always uses SwiGLU; remove it"
    )


@_rule("model.family", "model.rope_theta")
def _theta_of_llama(v: Values, family: str, theta: float) -> str | None:
    if family == "llama" or theta == 10000:
        return None
    return (
        f'{v.say("model.rope_theta")} is for model.family = "llama"; '
        f"{v.say('model.family')} learns its positions; remove it"
    )


@_rule("model.vocab", "data.tokenizer", "data.source")
def _vocab_holds_bytes(
    v: Values, vocab: int, tokenizer: str, source: str
) -> str | None:
    # A file of tokens was made elsewhere; its largest token is checked on reading.
    if tokenizer != "bytes" or source.endswith(".npy") or vocab >= 256:
        return None
    return (
        f"{v.say('model.vocab')} must be at least 256, the tokens of "
        f"{v.say('data.tokenizer')}; try 256, or 0 for the tokenizer's size"
    )


# Training over time.


@_rule("optimizer.warmup", "train.steps")
def _warmup_ends(v: Values, warmup: int, steps: int) -> str | None:
    if warmup <= steps:
        return None
    rule = f"{v.say('optimizer.warmup')} must be at most {v.say('train.steps')}"
    return rule + advice({"optimizer.warmup": [steps], "train.steps": [warmup]})


@_rule("optimizer.rounding", "train.precision")
def _rounding_to_16_bits(v: Values, rounding: str, precision: str) -> str | None:
    if rounding == "nearest" or precision in ("bf16", "fp16"):
        return None
    rule = (
        f"{v.say('optimizer.rounding')} is for weights of 16 bits, not "
        f"{v.say('train.precision')}"
    )
    options = {"optimizer.rounding": ["nearest"], "train.precision": ["bf16", "fp16"]}
    return rule + advice(options)


@_rule("optimizer.rounding", "parallel.schedule")
def _rounding_of_one_state(v: Values, rounding: str, schedule: str) -> str | None:
    if rounding == "nearest" or schedule != "2bw":
        return None
    rule = (
        f"{v.say('parallel.schedule')} has weights of two updates, whose draws a "
        f"checkpoint does not tell, so that {v.say('optimizer.rounding')} cannot go on"
    )
    options = {"optimizer.rounding": ["nearest"], "parallel.schedule": ["1f1b"]}
    return rule + advice(options)


@_rule("train.eval_every", "data.validation")
def _evaluation_has_tokens(v: Values, every: int, validation: float) -> str | None:
    if not every or validation:
        return None
    return (
        f"{v.say('train.eval_every')} needs held-out tokens, but "
        f"{v.say('data.validation')}; try data.validation = 0.05, "
        "or train.eval_every = 0"
    )


@_rule("checkpoint.copy_every", "train.recover")
def _copies_are_used(v: Values, every: int, recover: bool) -> str | None:
    if not every or recover:
        return None
    return (
        f"{v.say('checkpoint.copy_every')} is for train.recover = true; "
        "try checkpoint.copy_every = 0"
    )


# The tensor axis.


@_rule("parallel.tensor", "model.heads")
def _tensor_cuts_heads(v: Values, tensor: int, heads: int) -> str | None:
    if heads % tensor == 0:
        return None
    rule = f"{v.say('parallel.tensor')} must divide {v.say('model.heads')}"
    return rule + advice({"parallel.tensor": _tensor_near(v, tensor)})


@_rule("parallel.tensor", "model.kv_heads")
def _tensor_cuts_kv_heads(v: Values, tensor: int, kv_heads: int) -> str | None:
    # Where they equal the heads, the rule on the heads says it all.
    if kv_heads == v.get("model.heads") or _fit_kv(tensor, kv_heads):
        return None
    tensor_text, kv_text = v.say("parallel.tensor"), v.say("model.kv_heads")
    rule = f"{tensor_text} must divide {kv_text} or be a multiple of it"
    return rule + advice({"parallel.tensor": _tensor_near(v, tensor)})


@_rule("parallel.tensor", "model.ffn")
def _tensor_cuts_ffn(v: Values, tensor: int, ffn: int) -> str | None:
    if ffn % tensor == 0:
        return None
    rule = f"{v.say('parallel.tensor')} must divide {v.say('model.ffn')}"
    options = {
        "parallel.tensor": _tensor_near(v, tensor),
        "model.ffn": around(ffn, tensor),
    }
    return rule + advice(options)


@_rule("parallel.tensor", "model.vocab")
def _tensor_cuts_vocab(v: Values, tensor: int, vocab: int) -> str | None:
    if vocab >= tensor:
        return None
    rule = f"{v.say('parallel.tensor')} must be at most {v.say('model.vocab')}"
    return rule + advice({"parallel.tensor": _tensor_near(v, tensor)})


@_rule("parallel.tensor", "parallel.sequence", "model.context")
def _tensor_cuts_context(
    v: Values, tensor: int, sequence: bool, context: int
) -> str | None:
    if not sequence or context % tensor == 0:
        return None
    rule = (
        f"{v.say('parallel.tensor')} must divide {v.say('model.context')} "
        "when parallel.sequence = true"
    )
    options = {
        "parallel.tensor": _tensor_near(v, tensor),
        "model.context": around(context, tensor),
        "parallel.sequence": [False],
    }
    return rule + advice(options)


# The number of ranks.


@_rule("ranks", *MODEL_AXES)
def _model_cuts_ranks(v: Values, ranks: int, *sizes: int) -> str | None:
    # A given parallel.data has its own rule, which says more.
    product = prod(sizes)
    if "parallel.data" in v or ranks % product == 0:
        return None
    used = [axis for axis in MODEL_AXES if v[axis] > 1]
    parts = " * ".join(str(v[axis]) for axis in used)
    keys = " times ".join(v.say(axis) for axis in used)
    rule = (
        f"the product {keys} times parallel.data must equal the number of ranks, "
        f"{ranks}, but {parts} does not divide {ranks}"
    )
    options = {axis: _size_near(v, axis, ranks, product) for axis in used}
    return rule + advice(options | {"ranks": around(ranks, product)})


def _size_near(v: Values, axis: str, ranks: int, product: int) -> list[int]:
    """Sizes of an axis near to what it is, with which the others fit the ranks."""
    size = v[axis]
    others = product // size
    if axis == "parallel.tensor":
        return [n for n in _tensor_near(v, size) if n * others <= ranks]
    return neighbours(size, divisors(ranks // others)) if ranks % others == 0 else []


@_rule("ranks", "parallel.data", *MODEL_AXES)
def _product_is_ranks(v: Values, ranks: int, data: int, *sizes: int) -> str | None:
    both = prod(sizes)
    if both * data == ranks:
        return None
    keys = ["parallel.tensor"]
    keys += [axis for axis in MODEL_AXES[1:] if v[axis] > 1]
    numbers = [str(v[key]) for key in [*keys, "parallel.data"]]
    rule = (
        f"the product {' * '.join([*keys, 'parallel.data'])} = "
        f"{' * '.join(numbers)} = {both * data} "
        f"must equal the number of ranks, {ranks}"
    )
    others = both * data // v["parallel.tensor"]
    options = {
        "parallel.tensor": [n for n in _tensor_sizes(v) if n * others == ranks],
        "parallel.data": [] if ranks % both else [ranks // both],
        "ranks": [both * data],
    }
    return rule + advice(options)


# State sharding.


@_rule("parallel.zero_shard", "parallel.zero")
def _shard_of_zero(v: Values, shard: int, zero: int) -> str | None:
    if shard == 0 or zero > 0:
        return None
    rule = f"{v.say('parallel.zero_shard')} needs parallel.zero of at least 1"
    return rule + advice({"parallel.zero": [1, 2, 3], "parallel.zero_shard": [0]})


@_rule("parallel.zero_shard", "parallel.data")
def _shard_cuts_data(v: Values, shard: int, data: int) -> str | None:
    if shard == 0 or data % shard == 0:
        return None
    rule = f"{v.say('parallel.zero_shard')} must divide {v.say('parallel.data')}"
    return rule + advice({"parallel.zero_shard": neighbours(shard, divisors(data))})


# The batch.


@_rule("train.global_batch", "parallel.data")
def _batch_cut_by_data(v: Values, batch: int, data: int) -> str | None:
    if batch % data == 0 or v.get("train.micro_batch"):
        return None
    rule = (
        f"{v.say('train.global_batch')} must be a multiple of {v.say('parallel.data')}"
    )
    return rule + advice({"train.global_batch": around(batch, data)})


@_rule("train.global_batch", "parallel.data", "train.micro_batch")
def _batch_cut_by_micro(v: Values, batch: int, data: int, micro: int) -> str | None:
    if batch % (data * micro) == 0:
        return None
    rule = (
        f"{v.say('train.global_batch')} must be a multiple of parallel.data * "
        f"train.micro_batch = {data} * {micro} = {data * micro}"
    )
    fitting = [] if batch % data else neighbours(micro, divisors(batch // data))
    options = {
        "train.global_batch": around(batch, data * micro),
        "train.micro_batch": fitting,
    }
    return rule + advice(options)


def _fit_kv(tensor: int, kv_heads: int) -> bool:
    """Each tensor rank holds whole key/value heads, or one that several share."""
    return kv_heads % tensor == 0 or tensor % kv_heads == 0


def _tensor_near(v: Values, tensor: int) -> list[int]:
    return neighbours(tensor, _tensor_sizes(v))


def _tensor_sizes(v: Values) -> list[int]:
    """Sizes of the tensor axis that pass all the rules whose values are known."""
    keys = ["model.heads", "model.ffn"]
    if v.get("parallel.sequence"):
        keys.append("model.context")
    # A given parallel.data fixes the size by itself: the rule on the product says so.
    if "parallel.data" not in v or "parallel.data" in v.derived:
        keys.append("ranks")
    common = gcd(*(v[key] for key in keys if key in v))
    if not common:
        return []
    return [
        size
        for size in divisors(common)
        if _fit_kv(size, v.get("model.kv_heads", size))
        and size <= v.get("model.vocab", size)
    ]
