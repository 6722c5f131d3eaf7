"""Rules of experts, and of the ranks that share them."""

from mpipar.config.nearest import advice, divisors, neighbours
from mpipar.config.recipe import Experts
from mpipar.config.register import rule
from mpipar.config.values import Values
from mpipar.config.write import shown

_OTHERS = [f"experts.{name}" for name in Experts.model_fields if name != "count"]
_DEFAULTS = {f"experts.{name}": f.default for name, f in Experts.model_fields.items()}


@rule("experts.count")
def _others_need_experts(v: Values, count: int) -> str | None:
    if count:
        return None
    given = [key for key in _OTHERS if key in v and v[key] != _DEFAULTS[key]]
    if not given:
        return None
    keys = ", ".join(f"{key} = {shown(v[key])}" for key in given)
    return f"{keys}: there are no experts; give experts.count"


@rule("experts.count", "experts.groups")
def _groups_cut_experts(v: Values, count: int, groups: int) -> str | None:
    if not count or count % groups == 0:
        return None
    text = f"{v.say('experts.groups')} must divide {v.say('experts.count')}"
    return text + advice({"experts.groups": neighbours(groups, divisors(count))})


@rule("experts.groups", "experts.active_groups")
def _some_groups(v: Values, groups: int, active: int) -> str | None:
    if active <= groups:
        return None
    text = f"{v.say('experts.active_groups')} must be at most {v.say('experts.groups')}"
    return text + advice({"experts.active_groups": [groups]})


@rule("experts.count", "experts.active", "experts.groups", "experts.active_groups")
def _enough_experts(
    v: Values, count: int, active: int, groups: int, active_groups: int
) -> str | None:
    open_to_choice = count // groups * (active_groups or groups)
    if not count or active <= open_to_choice:
        return None
    whose = "experts.count" if not active_groups else "those of the active groups"
    text = f"{v.say('experts.active')} must be at most {open_to_choice}, {whose}"
    return text + advice({"experts.active": [open_to_choice]})


@rule("experts.count", "experts.active", "experts.router")
def _router_learns(v: Values, count: int, active: int, router: str) -> str | None:
    if not count or active > 1 or router != "top_softmax":
        return None
    return (
        "the softmax over one expert is always 1, so that the router would not learn: "
        f"{v.say('experts.active')} needs another one than {v.say('experts.router')}; "
        'try experts.router = "softmax"'
    )


@rule("experts.count", "experts.dense_blocks", "model.layers")
def _some_blocks_have_experts(
    v: Values, count: int, dense: int, layers: int
) -> str | None:
    if not count or dense < layers:
        return None
    text = f"{v.say('experts.dense_blocks')} must be less than {v.say('model.layers')}"
    return text + advice({"experts.dense_blocks": [layers - 1]})


@rule("experts.count", "parallel.expert")
def _ranks_cut_experts(v: Values, count: int, ranks: int) -> str | None:
    if not count:
        if ranks == 1:
            return None
        return f"{v.say('parallel.expert')} needs experts; give experts.count"
    if count % ranks == 0:
        return None
    text = f"{v.say('parallel.expert')} must divide {v.say('experts.count')}"
    return text + advice({"parallel.expert": neighbours(ranks, divisors(count))})


@rule(
    "experts.count", "parallel.expert", "parallel.expert_tensor", "parallel.tensor",
    "parallel.context", "parallel.data",
)  # fmt: skip
def _expert_ranks_fit(
    v: Values, count: int, ranks: int, shared: int, tensor: int, context: int, data: int
) -> str | None:
    keys = ["parallel.context", "parallel.data"]
    size = context * data
    if shared < tensor:
        keys.insert(0, "parallel.tensor")
        size *= tensor
    if not count or size % ranks == 0:
        return None
    text = f"{v.say('parallel.expert')} must divide {' * '.join(keys)} = {size}"
    fitting = [n for n in divisors(size) if count % n == 0]
    return text + advice({"parallel.expert": neighbours(ranks, fitting)})


@rule("experts.count", "parallel.expert_tensor", "parallel.tensor")
def _all_or_none_share(v: Values, count: int, shared: int, tensor: int) -> str | None:
    if not count:
        if shared == 0:
            return None
        return f"{v.say('parallel.expert_tensor')} needs experts; give experts.count"
    if shared in (1, tensor):
        return None
    text = f"{v.say('parallel.expert_tensor')} must be 1 or {v.say('parallel.tensor')}"
    return text + advice({"parallel.expert_tensor": sorted({1, tensor})})


@rule("experts.ffn", "parallel.expert_tensor")
def _tensor_cuts_experts(v: Values, ffn: int, shared: int) -> str | None:
    if ffn == 0 or shared < 2 or ffn % shared == 0:
        return None
    text = f"{v.say('parallel.expert_tensor')} must divide {v.say('experts.ffn')}"
    return text + advice({"parallel.expert_tensor": [1]})


@rule("experts.shared", "experts.ffn", "parallel.tensor")
def _tensor_cuts_shared(v: Values, shared: int, ffn: int, tensor: int) -> str | None:
    if shared * ffn % tensor == 0:
        return None
    return (
        f"{v.say('parallel.tensor')} must divide experts.shared * experts.ffn = "
        f"{shared} * {ffn} = {shared * ffn}"
    )


@rule(
    "experts.count", "parallel.expert_tensor", "parallel.tensor", "parallel.context",
    "parallel.sequence", "model.context",
)  # fmt: skip
def _tokens_cut_over_tensor(
    v: Values, count: int, shared: int, tensor: int, context: int, sequence: bool,
    length: int,
) -> str | None:  # fmt: skip
    # A sequence that is cut over ranks is padded
    if not count or shared >= tensor or sequence or context > 1:
        return None
    if length % tensor == 0:
        return None
    return (
        f"{v.say('parallel.expert_tensor')} gives each tensor rank its own tokens: "
        f"{v.say('parallel.tensor')} must divide {v.say('model.context')}"
    )
