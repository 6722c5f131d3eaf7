"""The sections and fields of a recipe, with defaults, units and legal ranges.

A field whose description says "0 = ..." is filled in by `resolve`, which knows the
number of ranks. Rules between fields are in rules.py.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, create_model

from mpipar.config.kinds import (
    AXES,
    LARGEST,
    METHODS,
    AboveZero,
    BelowOne,
    Natural,
    NotNegative,
    Order,
    Positive,
    Section,
    Text,
    counts_as_text,
)
from mpipar.config.schedules import NEEDS


class Model(Section):
    """What is trained: family and sizes."""

    family: Literal["gpt", "llama"] = Field(
        "gpt",
        description="gpt: LayerNorm, learned positions, GELU; "
        "llama: RMSNorm, RoPE, SwiGLU",
    )
    layers: Positive = Field(description="transformer blocks")
    width: Positive = Field(description="width of the residual stream")
    heads: Positive = Field(description="query heads")
    kv_heads: Natural = Field(0, description="key and value heads; 0 = heads")
    ffn: Natural = Field(
        0,
        description="inner width of the MLP; 0 = 4*width (gpt), "
        "8/3*width rounded up to a multiple of 32 (llama)",
    )
    context: Positive = Field(description="tokens in a sequence")
    vocab: Natural = Field(
        0, description="rows of the token embedding; 0 = the tokenizer's size"
    )
    tied: bool = Field(True, description="the head shares the embedding's weights")
    dropout: BelowOne = Field(0.0, description="probability that a value is dropped")
    activation: Literal["gelu_tanh", "gelu"] = Field(
        "gelu_tanh", description="gpt only: GELU by its tanh formula, or exact (erf)"
    )
    rope_theta: AboveZero = Field(
        10000.0, description="llama only: base of the RoPE wave lengths"
    )
    window: Natural = Field(
        0, description="tokens that attention sees, the own one included; 0 = all"
    )
    norm_eps: AboveZero = Field(1e-5, description="added to the variance in norms")


class Experts(Section):
    """Feed-forward parts of which each token takes a few; none where count is 0."""

    count: Natural = Field(0, description="experts of a block; 0 = one MLP for all")
    active: Positive = Field(2, description="experts that a token takes (top-k)")
    ffn: Natural = Field(0, description="inner width of an expert; 0 = model.ffn")
    shared: Natural = Field(
        0, description="experts that all tokens take besides, as one MLP"
    )
    dense_blocks: Natural = Field(
        0, description="first blocks that have one MLP for all"
    )
    router: Literal["top_softmax", "softmax", "sigmoid"] = Field(
        "top_softmax",
        description="gates: top_softmax = a softmax over those taken; softmax = over "
        "all experts; sigmoid = of each alone, divided by the sum of those taken",
    )
    groups: Positive = Field(1, description="equal groups of neighbouring experts")
    active_groups: Natural = Field(
        0, description="groups that a token may take experts of; 0 = all"
    )
    scale: AboveZero = Field(1.0, description="what the gates are multiplied by")
    capacity: NotNegative = Field(
        0.0,
        description="tokens of a sequence that an expert takes, as a multiple of its "
        "even share; later ones go without it; 0 = all that come",
    )
    balance: NotNegative = Field(
        0.0, description="weight of the loss for uneven loads, of each sequence"
    )
    z_loss: NotNegative = Field(
        0.0, description="weight of the loss for large router logits"
    )
    bias_rate: NotNegative = Field(
        0.0,
        description="step by which an update moves the bias that experts are chosen "
        "with, against their load; 0 = no bias",
    )


class Data(Section):
    """What it is trained on."""

    source: Text = Field(
        "stdlib",
        description='"stdlib" (source files of the running Python\'s standard '
        "library), a text file, a folder, or a .npy file of tokens",
    )
    tokenizer: Text = Field(
        "bytes", description='"bytes" (256 tokens) or the path of a tokenizer.json'
    )
    validation: Annotated[float, Field(ge=0, le=0.5)] = Field(
        0.05, description="fraction of the tokens held out for evaluation"
    )
    documents: Literal["joined", "separate"] = Field(
        "joined",
        description="separate = attention and positions begin anew where a document "
        "begins inside of a sequence",
    )
    end_token: Annotated[int, Field(ge=-1, le=LARGEST)] = Field(
        -1, description="id that ends a document; -1 = the tokenizer's"
    )
    workers: Natural = Field(
        0, description="loader processes per rank; 0 = load in the training process"
    )


class Parallel(Section):
    """How the model and the batch are cut over the ranks."""

    tensor: Positive = Field(1, description="ranks that share each dense layer")
    pipeline: Positive = Field(1, description="stages that the blocks are cut into")
    schedule: Text = Field(
        "1f1b",
        description=f"order of work on the stages: {', '.join(NEEDS)}, or the path of "
        "a text file with the actions of each stage",
    )
    chunks: Natural = Field(
        0,
        description="pieces of the model on each stage; 0 = the fewest that the "
        "schedule takes",
    )
    partition: Annotated[Text, BeforeValidator(counts_as_text)] = Field(
        "even",
        description='blocks of each stage: "even", "measured" (by the time they take), '
        'or numbers such as "3,4,4,3", of each chunk in the order of the model',
    )
    context: Positive = Field(1, description="ranks that share each sequence")
    context_method: Literal[METHODS] = Field(
        "zigzag",
        description="how they attend: ring, zigzag, striped = keys and values travel, "
        "the sequence lies in one part, two or token by token; allgather = all are "
        "gathered; ulysses = heads are exchanged; usp = that among a few, zigzag among "
        "those",
    )
    ulysses: Natural = Field(
        0, description="ranks that exchange heads in usp; 0 = as many as can"
    )
    expert: Positive = Field(
        1, description="of the ranks of context and data: those that share the experts"
    )
    expert_tensor: Natural = Field(
        0,
        description="tensor ranks that share each expert; 0 = all; 1 = none, they "
        "share the experts like those of context and data",
    )
    expert_overlap: bool = Field(
        False, description="half of the tokens travel while experts work on the others"
    )
    sequence: bool = Field(
        False, description="the tensor ranks also cut the residual stream by tokens"
    )
    data: Natural = Field(
        0, description="replicas of the model; 0 = what is left of the world"
    )
    zero: Annotated[int, Field(ge=0, le=3)] = Field(
        0,
        description="what data ranks share instead of each holding it whole: "
        "1 = optimizer state, 2 = also gradients, 3 = also weights",
    )
    zero_shard: Natural = Field(
        0, description="data ranks that share one copy; 0 = all of them"
    )
    prefetch: Natural = Field(
        1, description="with zero = 3: blocks that are fetched before they are needed"
    )
    unit: Positive = Field(
        1, description="blocks whose state is moved together, in one message"
    )
    order: Order = Field(AXES, description="axes of the rank grid, fastest first")
    bucket_mb: AboveZero = Field(
        25.0, description="MiB of gradients that are reduced in one message"
    )
    hierarchical: bool = Field(
        True,
        description="large arrays are scattered and gathered inside of nodes and "
        "between them in turn, where all have equally many ranks of an axis",
    )

    transport: Literal["auto", "nccl", "cuda_aware", "staged"] = Field(
        "auto",
        description="how arrays of GPUs travel: nccl = collectives by NCCL, for ranks "
        "with a GPU each; cuda_aware = MPI takes them as they are; staged = through "
        "pinned host memory; auto = the first of these that all ranks can use",
    )

    @property
    def axes(self) -> dict[str, int]:
        """Ranks along each axis; dp is 0 until the recipe is resolved."""
        return {
            "tp": self.tensor,
            "cp": self.context,
            "dp": self.data,
            "pp": self.pipeline,
        }


class Train(Section):
    """How long, how much at a time, and in which arithmetic."""

    steps: Positive = Field(200, description="optimizer steps")
    global_batch: Positive = Field(8, description="sequences per step, over all ranks")
    micro_batch: Natural = Field(
        0,
        description="sequences per data rank in one forward pass; 0 = global_batch / "
        "data, with a pipeline in up to 4 equal parts for each stage",
    )
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="type of all floats; bf16, fp16 = weights, their gradients and "
        "what products read in 16 bits, with fp32 sums, moments and master weights",
    )
    loss_scale: Annotated[float, Field(ge=1)] = Field(
        65536.0,
        description="fp16 only: what the loss is multiplied by at first; halved when "
        "a gradient overflows",
    )
    loss_scale_window: Positive = Field(
        2000, description="fp16 only: good steps in a row after which it is doubled"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="what backward computes again instead of keeping it: selective = "
        "norms and activations, full = whole blocks",
    )
    recover: bool = Field(
        False,
        description="when a rank is lost the others go on, with fewer data ranks; "
        "needs Open MPI's mpiexec --with-ft ulfm",
    )
    max_hours: NotNegative = Field(
        0.0, description="hours after which a run saves and stops; 0 = no limit"
    )
    seed: Natural = Field(0, description="of weights, dropout and data order")
    clip: NotNegative = Field(
        1.0, description="largest global norm of the gradient; 0 = off"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where arrays live; auto = cuda where there is a GPU"
    )
    graph: bool = Field(
        False,
        description="GPU only: the passes of a micro-batch are recorded once, and "
        "launched as one from then on",
    )
    attention: Literal["auto", "cudnn", "flash"] = Field(
        "auto",
        description="bf16 and fp16 on a GPU: whose kernels work on whole sequences "
        "without dropout; flash = mpipar's own, which do all else, auto = cuDNN where "
        "it is installed",
    )
    check_every: Natural = Field(
        0,
        description="steps between checks that ranks with the same weights have the "
        "same bits; 0 = never",
    )
    eval_every: Natural = Field(
        0, description="steps between evaluations; 0 = only at the end"
    )
    eval_samples: Natural = Field(
        0, description="sequences per evaluation; 0 = all that are held out"
    )


class Optimizer(Section):
    """AdamW and its learning rate over time."""

    lr: AboveZero = Field(3e-4, description="highest learning rate")
    beta1: BelowOne = Field(0.9, description="decay of the gradient's mean, per step")
    beta2: BelowOne = Field(0.95, description="decay of its mean square, per step")
    eps: AboveZero = Field(1e-8, description="added to the root of the mean square")
    weight_decay: NotNegative = Field(
        0.1, description="of matrices only, as a multiple of the learning rate"
    )
    warmup: Natural = Field(0, description="steps of linear rise to lr")
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="after the warm-up"
    )
    min_lr: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="where the cosine ends, as a fraction of lr"
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        "nearest",
        description="of master weights to bf16 or fp16: stochastic = up or down by "
        "draws, so that weights are right in the mean",
    )


class _Checkpoint(Section):
    every: Natural = Field(0, description="steps between saves; 0 = only at the end")
    keep: Natural = Field(0, description="newest checkpoints that stay; 0 = all")
    copy_every: Natural = Field(
        0,
        description="steps between copies of the state in the memory of a neighbour, "
        "for train.recover; 0 = none",
    )
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="what a run does when it cannot save"
    )
    failure_hours: AboveZero = Field(
        24.0,
        description="hours between failures of the whole job, for the advice on every",
    )


# The key is a word of Python.
Checkpoint = create_model(
    "Checkpoint",
    __base__=_Checkpoint,
    __doc__="When the state of a run is saved, and how.",
    **{
        "async": (
            bool,
            Field(True, description="save while the run goes on; false = it waits"),
        )
    },
)


class Log(Section):
    """What is shown, and how long a rank is waited for."""

    every: Positive = Field(10, description="steps between printed lines")
    timeout_s: AboveZero = Field(
        300.0,
        description="seconds that one message, or one step of work on a file, may take "
        "before the run is ended",
    )
    check_calls: bool = Field(
        False, description="ranks compare each collective and message before it is made"
    )
    straggler: NotNegative = Field(
        2.0,
        description="a rank is named that works so many times as long as others with "
        "the same work; 0 to 1 = never",
    )
    progress: Literal["auto", "bar", "lines", "none"] = Field(
        "auto", description="auto = a bar on a terminal, lines elsewhere"
    )


class Recipe(Section):
    """A whole run. Only four sizes of the model have no default."""

    model: Model
    experts: Experts = Experts()
    data: Data = Data()
    parallel: Parallel = Parallel()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()

    @property
    def accumulation(self) -> int:
        """Micro-batches per step on each data rank.

        Raises ValueError while the recipe is not resolved.
        """
        per_pass = self.parallel.data * self.train.micro_batch
        if not per_pass:
            raise ValueError("accumulation is known only after resolve(recipe, ranks)")
        return self.train.global_batch // per_pass


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation for name, field in Recipe.model_fields.items()
}
