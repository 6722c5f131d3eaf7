"""What fields for GPUs need."""

from mpipar.config.nearest import advice
from mpipar.config.register import rule
from mpipar.config.values import Values


def _only_on_gpus(key: str) -> None:
    @rule("train.device", key)
    def of_devices(v: Values, device: str, value: str) -> str | None:
        if device != "cpu" or value == "auto":
            return None
        text = f"{v.say(key)} is for GPUs, not {v.say('train.device')}"
        return text + advice({key: ["auto"]})


_only_on_gpus("parallel.transport")
_only_on_gpus("train.attention")


@rule("train.attention", "train.precision")
def _cudnn_in_16_bits(v: Values, attention: str, precision: str) -> str | None:
    if attention != "cudnn" or precision in ("bf16", "fp16"):
        return None
    text = (
        f"{v.say('train.attention')} works in 16 bits, not {v.say('train.precision')}"
    )
    legal = {"train.precision": ["bf16", "fp16"], "train.attention": ["auto", "flash"]}
    return text + advice(legal)


@rule("train.attention", "model.dropout")
def _cudnn_drops_nothing(v: Values, attention: str, dropout: float) -> str | None:
    if attention != "cudnn" or dropout == 0:
        return None
    text = f"{v.say('train.attention')} drops nothing: {v.say('model.dropout')}"
    legal = {"model.dropout": [0.0], "train.attention": ["auto", "flash"]}
    return text + advice(legal)


# train.graph: passes in which the host has no part.
# The only value that is legal beside it, and what another one would need
_ALONE = {
    "parallel.pipeline": (1, "messages between stages"),
    "parallel.chunks": (1, "passes of a part of the model"),
    "parallel.tensor": (1, "messages inside of layers"),
    "parallel.context": (1, "messages inside of attention"),
    "experts.count": (0, "sizes that the router finds"),
    "model.dropout": (0.0, "another draw in each step"),
    "data.documents": ("joined", "other spans in each sequence"),
}


def _register(key: str, legal: object, what: str) -> None:
    @rule("train.graph", key)
    def only_that(v: Values, graph: bool, value: object) -> str | None:
        if not graph or value == legal:
            return None
        text = f"{v.say(key)} means {what}, which train.graph = true cannot record"
        return text + advice({key: [legal], "train.graph": [False]})


for _key, _facts in _ALONE.items():
    _register(_key, *_facts)


@rule("train.graph", "parallel.schedule")
def _graph_of_one_state(v: Values, graph: bool, schedule: str) -> str | None:
    if not graph or schedule != "2bw":
        return None
    text = (
        f"{v.say('parallel.schedule')} has other weights in each step, which "
        "train.graph = true cannot record"
    )
    return text + advice({"parallel.schedule": ["1f1b"], "train.graph": [False]})


@rule("train.graph", "train.device")
def _graph_of_device(v: Values, graph: bool, device: str) -> str | None:
    if not graph or device != "cpu":
        return None
    text = f"train.graph = true needs a GPU, not {v.say('train.device')}"
    return text + advice({"train.device": ["cuda"], "train.graph": [False]})


@rule("train.graph", "parallel.zero", "parallel.data")
def _graph_of_whole_gradients(
    v: Values, graph: bool, zero: int, data: int
) -> str | None:
    if not graph or data == 1 or zero < 2:
        return None
    text = (
        f"{v.say('parallel.zero')} sends gradients in each pass, which train.graph = "
        "true cannot record"
    )
    return text + advice({"parallel.zero": [0, 1], "train.graph": [False]})
