"""All rules about settings that do not combine, or that combine with a remark.

A rule applies if each of its sides has a feature that is on. The order is that in which conflicts are reported:
conflicts with an axis come before what a ZeRO stage or an offload target requires. In texts, {parallel.zero} is the
run's own value and {axes} the axes in use. Rules that depend on the model's sizes, the ranks or the machine are in
config/axes.py and config/resolve.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.config.combinations import features as f
from shardwise.config.combinations.features import Feature

Side = Feature | tuple[Feature, ...]


@dataclass(frozen=True)
class CombinationRule:
    """Features that do not combine (or do, with a remark): the reason, the remedy, and the field at fault."""

    field: str
    sides: tuple[tuple[Feature, ...], ...]
    why: str
    remedy: str
    verdict: Literal["refused", "remark"] = "refused"
    shown: str = ""  # path of the value that the message shows; default: the field's
    section: bool = False  # told while the section is read, with the line it is on

    def applies(self, settings: object) -> bool:
        """Whether every side of the rule has a feature that is on."""
        return all(any(feature.on(settings) for feature in side) for side in self.sides)

    @property
    def about_objective(self) -> bool:
        """Whether the rule depends on the objective."""
        return any(feature.of == "objective" for side in self.sides for feature in side)


def _rule(
    field: str,
    sides: tuple[Side, ...],
    why: str,
    remedy: str,
    verdict: Literal["refused", "remark"] = "refused",
    shown: str = "",
    section: bool = False,
) -> CombinationRule:
    alternatives = tuple(side if isinstance(side, tuple) else (side,) for side in sides)
    return CombinationRule(field, alternatives, why, remedy, verdict, shown, section)


def values_of(features: tuple[Feature, ...]) -> str:
    """The features' values, comma-separated."""
    return ", ".join(str(feature.value) for feature in features)


def _others(features: tuple[Feature, ...], *excluded: Feature) -> tuple[Feature, ...]:
    return tuple(feature for feature in features if feature not in excluded)


CODED = (f.ADAMW, f.LION, f.SGD)  # optimizers whose states can be stored in another type
JUDGED = (f.DPO, f.ORPO, f.KTO)
ROWS = (f.SEQ2SEQ, f.MASKED, f.CLASSIFY)
NEEDS_SHARDS = "set parallel.zero to 1, 2 or 3, or leave it out"
NEEDS_EVALUATION = "set data.eval (2%, or files of its own), or leave it out"


SECTIONS = (
    _rule("parallel.virtual_stages", (f.CHUNKS, f.ONE_CHUNK),
          "has no meaning with pipeline_schedule: {parallel.pipeline_schedule}",
          "set pipeline_schedule: interleaved", section=True),
    _rule("parallel.pipeline_schedule", (f.OTHER_SCHEDULE, f.NO_PIPELINE), "there is no pipeline",
          "set pipeline to 2 or more, or leave it out", section=True),
    _rule("parallel.context_kind", (f.OTHER_KIND, f.NO_CONTEXT), "no sequence is divided",
          "set context to 2 or more, or leave it out", section=True),
)  # fmt: skip

NO_FP8 = "set fp8: none and precision: bf16"
AS_BF16 = "leave it out: gathers are in bf16"

BESIDE_AXES = (
    _rule("offload.activations", (f.ACTIVATIONS, f.TENSOR),
          "inputs of blocks are DTensors", "set offload.activations: none"),
    _rule("compile", (f.COMPILE, f.ZBV), "a backward in two parts takes no compiled block", "set compile: false"),
    _rule("fp8", (f.FP8, f.TENSOR), "does not go with {axes} yet", NO_FP8, shown="fp8.recipe"),
    _rule("method.multiply", (f.MULTIPLY, f.TENSOR), "does not go with {axes} yet", "leave it out"),
    _rule("tiled_mlp", (f.TILE, f.TENSOR), "does not go with {axes} yet, which divides tokens already", "leave it out"),
    _rule("parallel.pipeline_schedule", (f.ZBV, f.TILE), "a tile's gradients come all at once: not in two parts",
          "leave tiled_mlp out, or use 1f1b or interleaved"),
    _rule("parallel.pipeline_schedule", (f.ZBV, f.FP8),
          "rounds a gradient once for both of its products: not in two parts",
          f"{NO_FP8}, or use 1f1b or interleaved"),
    _rule("parallel.context_kind", (f.CONTEXTS[1], f.SCHEDULES, f.MASKED),
          "masked rows that Ulysses divides do not pass through stages yet", "use context_kind: ring, or no pipeline"),
    _rule("parallel.pipeline_schedule", (f.ZBV, f.ZERO[3]),
          "a backward in two parts needs its weights in both: not at stage 3",
          "set parallel.zero to 2 or less, or use 1f1b or interleaved"),
    _rule("parallel.pipeline_schedule", (f.ZBV, f.RECOMPUTE),
          "a backward in two parts would recompute each block twice",
          "set recompute: none, or use 1f1b or interleaved"),
)  # fmt: skip

STAGES = (
    _rule("parallel.dp_shard_size", (f.SHARD, f.ZERO[0]), "stage 0 shards nothing",
          "set parallel.zero to 1, 2 or 3, or leave dp_shard_size out"),
    _rule("parallel.quantize_weights", (f.QUANTIZE_WEIGHTS, f.ZERO[0]), "stage 0 gathers no weights", NEEDS_SHARDS),
    _rule("fp8.gather", (f.FP8_GATHER, f.ZERO[0]), "stage 0 gathers no weights", NEEDS_SHARDS),
    _rule("fp8.gather", (f.FP8_GATHER, f.QUANTIZE_WEIGHTS), "parallel.quantize_weights gathers them as int8",
          "leave one of the two out"),
    _rule("parallel.quantize_gradients", (f.QUANTIZE_GRADIENTS, f.ZERO[0]),
          "stage 0 all-reduces its gradients; 4 bits are for those that are reduced into shards", NEEDS_SHARDS),
    _rule("parallel.error_feedback", (f.FEEDBACK, f.WHOLE_GRADIENTS),
          "no gradient is quantised, so nothing is lost that could be added",
          "set parallel.quantize_gradients: true, or leave it out"),
    _rule("parallel.prefetch", (f.PREFETCH, f.ZERO[0]), "stage 0 gathers nothing", NEEDS_SHARDS),
    _rule("parallel.reduce_dtype", (f.REDUCE, f.ZERO[:2]),
          "stage {parallel.zero} would add up whole micro-batches in bf16, not ranks alone",
          "set parallel.zero to 2 or 3, or leave it out"),
    _rule("parallel.reduce_dtype", (f.REDUCE, f.QUANTIZE_GRADIENTS), "gradients travel in 4 bits already",
          "leave one of the two out"),
    _rule("parallel.reduce_dtype", (f.REDUCE, (f.SPLIT_MASTERS, *f.STATES)),
          "split weights, and states off the device, take the sums in fp32", "leave it out"),
    _rule("parallel.hpz_size", (f.SECONDARY, f.ZERO[:3]),
          "stage {parallel.zero} gathers its parameters once a step anyway", "set parallel.zero: 3, or leave it out"),
)  # fmt: skip

PLACES = (
    _rule("recompute", (f.LIGHT, f.EAGER), "the compiler knows what is cheap to compute again, and nothing is compiled",
          "add compile: true, or use recompute: full"),
    _rule("recompute", (f.OPEN_RECOMPUTE, (f.SOME_RECOMPUTED, f.GROUPS, f.KEPT_ATTENTION, f.ACTIVATIONS)),
          "answers by itself what is computed again: recompute_blocks, recompute_group, recompute_attention and "
          "offload.activations do not go with it", "use recompute: full, or leave those out"),
    _rule("recompute_blocks", (f.SOME_RECOMPUTED, (f.NO_RECOMPUTE, f.LIGHT)), "no block is computed again",
          "use recompute: full, or leave it out"),
    _rule("recompute_blocks", (f.SOME_RECOMPUTED, _others(f.SCHEDULES, f.ZBV)),
          "counts the blocks of a whole model, not of a stage", "leave it out"),
    _rule("recompute_group", (f.GROUPS, (f.NO_RECOMPUTE, f.LIGHT)), "no block is computed again",
          "use recompute: full, or leave it out"),
    _rule("recompute_group", (f.GROUPS, _others(f.AXES, f.ZBV)), "is for one GPU yet", "leave it out"),
    _rule("recompute_group", (f.GROUPS, f.ZERO[3]), "stage 3 frees a block's weights in between",
          "set parallel.zero: 2"),
    _rule("recompute_attention", (f.KEPT_ATTENTION, (f.NO_RECOMPUTE, f.LIGHT)), "no block is computed again",
          "use recompute: full, or leave it out"),
    _rule("recompute_attention", (f.KEPT_ATTENTION, f.PLAIN_ATTENTION),
          "keeps what our own attention made, but attention is plain",
          "set advanced.kernels.attention: auto, or leave it out"),
    _rule("recompute_attention", (f.KEPT_ATTENTION, f.UNPACKED),
          "keeps what our own attention made, which is that of packed rows", "set data.packing: true, or leave it out"),
    _rule("recompute_attention", (f.KEPT_ATTENTION, (f.SEQ2SEQ, f.MASKED, f.CLASSIFY)),
          "is for causal models", "leave it out"),
    _rule("recompute_attention", (f.KEPT_ATTENTION, (f.TENSOR, *f.CONTEXTS, *_others(f.SCHEDULES, f.ZBV))),
          "does not go with {axes} yet", "leave it out"),
    _rule("offload.activation_blocks", (f.SOME_BLOCKS, f.SOME_RECOMPUTED), "inputs leave of all that is recomputed",
          "leave one of the two out"),
    _rule("offload.activation_blocks", (f.SOME_BLOCKS, f.NO_ACTIVATIONS), "no block's input leaves the device",
          "add offload.activations: cpu, or leave it out"),
    _rule("offload.activations", (f.ACTIVATIONS, (f.NO_RECOMPUTE, f.LIGHT)),
          "moves what recomputation keeps, but recompute is {recompute}", "use recompute: full"),
    _rule("offload.optimizer", (f.STATES, _others(f.OPTIMIZERS, *f.ELEMENTWISE)),
          "{train.optimizer} looks at whole matrices; states leave the device in pieces",
          f"use optimizer: {values_of(f.ELEMENTWISE)}, or offload none"),
    _rule("offload.parameters", (f.PARAMETERS, f.ZERO[:3]), "stage {parallel.zero} holds all parameters on the device",
          "set parallel.zero: 3"),
    _rule("fp8.gather", (f.FP8_GATHER, f.PARAMETERS), "weights that are not on the device cannot be asked for scales",
          AS_BF16),
    _rule("offload.parameters", (f.PARAMETERS, f.STATES_STAY),
          "the optimizer's states would be larger than what leaves the device",
          "set offload.optimizer: cpu or disk too"),
    _rule("offload.parameters", (f.PARAMETERS, f.FP16),
          "gradients off the device cannot be checked for fp16's overflow",
          "use precision: bf16 or fp32"),
    _rule("parallel.prefetch", (f.PREFETCH, f.PARAMETERS),
          "what is off the device has an order of its own to be read in", "leave it out"),
    _rule("offload.disk", (f.NO_DISK,), "nothing is offloaded to disk", "set offload.optimizer: disk, or leave it out"),
    _rule("offload.ratio", (f.RATIO, f.STATES_STAY), "no optimizer state leaves the device",
          "set offload.optimizer: cpu, or leave it out"),
)  # fmt: skip

UPDATES = (
    _rule("train.master_weights", (f.SPLIT_MASTERS, (f.PRECISIONS[0], f.FP16)),
          "the upper half of fp32 is bf16, but {precision} is computed in", "set precision: bf16, or leave it out"),
    _rule("train.master_weights", (f.SPLIT_MASTERS, _others(f.OPTIMIZERS, *f.ELEMENTWISE)),
          "{train.optimizer} looks at whole matrices; split weights are updated in pieces",
          f"use optimizer: {values_of(f.ELEMENTWISE)}, or advanced.master_weights: fp32"),
    _rule("train.optimizer_in_backward", (f.IN_BACKWARD, f.CLIP),
          "clipping needs the norm of all gradients, which are gone one by one",
          "set train.max_grad_norm: null"),
    _rule("train.optimizer_in_backward", (f.IN_BACKWARD, f.FP16),
          "fp16's loss scale must see all gradients before the first is used",
          "use precision: bf16 or fp32"),
    _rule("train.optimizer_in_backward", (f.IN_BACKWARD, _others(f.OPTIMIZERS, *f.ELEMENTWISE, f.ADAM_MINI)),
          "{train.optimizer} works over all ranks at once", f"use optimizer: {values_of(f.ELEMENTWISE)}"),
    _rule("train.optimizer_in_backward", (f.IN_BACKWARD, (f.SKIPS, f.SKIPS_LEAPS)),
          "an update that may be left out waits for all gradients", "leave it out, or use guard: back or stop"),
    _rule("train.optimizer_state", (f.BF16_STATES, _others(f.OPTIMIZERS, *CODED)),
          "{train.optimizer} has its own way to store its states", f"leave it out, or use one of {values_of(CODED)}"),
    _rule("train.optimizer_state", (f.BF16_STATES, f.SGD, f.NO_MOMENTUM),
          "sgd without momentum (betas[0] = 0) has no state", "leave it out"),
    _rule("train.betas", (f.ADAFACTOR, f.OTHER_BETAS),
          "adafactor has no first moment, and a decay of its own for the second",
          "leave it out, or use another optimizer"),
)  # fmt: skip

METHODS = (
    _rule("fp8", (f.FP8, f.ADAPTERS), "is for layers that are trained whole; an adapter's base is frozen",
          f"{NO_FP8}, or use method: full, or qlora with bits: fp8", shown="fp8.recipe"),
    _rule("method", (f.ADAPTERS, f.SCRATCH),
          "an adapter of a model that starts from scratch would be of no use without it",
          "use method: full, or give a model.name", shown="method.type"),
    _rule("router.bias_update", (f.BIAS_UPDATE, f.ADAPTERS),
          "an adapter leaves the base as it is, and the bias is part of it", "leave it out, or use method: full"),
    _rule("export.merged", (f.FULL, f.MERGED), "there is no adapter to merge", "leave it out, or set method: lora"),
)  # fmt: skip

WORKERS = (
    _rule("diloco", (f.DILOCO, f.AXES), "works with ZeRO alone, not with {axes}", "leave the axes out, or diloco",
          shown="diloco.server"),
    _rule("router.bias_update", (f.DILOCO, f.BIAS_UPDATE), "DiLoCo workers average parameters alone",
          "leave it out"),
    _rule("train.early_stopping", (f.DILOCO, f.STOP_EARLY),
          "a worker that ends by itself would leave with its own weights, not those of all", "leave it out",
          shown="train.early_stopping.metric"),
    _rule("export.checkpoint", (f.DILOCO, f.EXPORT_BEST),
          "the best checkpoint may lie between two synchronisations and hold one worker's weights", "use last"),
)  # fmt: skip

EVALUATIONS = (
    _rule("train.early_stopping", (f.STOP_EARLY, f.NO_EVALUATION), "nothing is evaluated", NEEDS_EVALUATION,
          shown="train.early_stopping.metric"),
    _rule("train.early_stopping", (f.STOP_EARLY, f.EVALUATION, f.AT_THE_END), "the run evaluates at its end only",
          "set train.eval_every, e.g. 50", shown="train.early_stopping.metric"),
    _rule("checkpoint.best", (f.OTHER_BEST, f.NO_EVALUATION), "nothing is evaluated", NEEDS_EVALUATION,
          shown="checkpoint.best.metric"),
    _rule("export.checkpoint", (f.EXPORT_BEST, f.NO_EVALUATION), "nothing is evaluated, so none is the best",
          NEEDS_EVALUATION),
)  # fmt: skip

AIMS = (
    _rule("data.over_length", (f.SEQ2SEQ, f.SPLIT), "a target belongs to its whole source, so rows cannot be split",
          "use truncate or drop"),
    _rule("data.over_length", (f.CLASSIFY, f.SPLIT), "a class belongs to a whole text, so rows cannot be split",
          "use truncate or drop"),
    _rule("data.over_length", (JUDGED, f.SPLIT), "an answer that is judged as a whole cannot be split",
          "use error, drop or truncate"),
    _rule("data.loss_on", (JUDGED, f.OTHER_LOSS),
          "what is learned are the answers that are judged, no more and no less", "leave it out"),
    _rule("method.adapter", ((f.DPO, f.KTO), f.ADAPTERS, f.GOES_ON),
          "the reference would be the base without this adapter, not the model that training starts from",
          "merge the adapter into the base first and train a new one, or use objective: orpo"),
    _rule("method.modules_to_save", ((f.DPO, f.KTO), f.QLORA, f.TRAINED_WHOLE),
          "the reference is the quantised base, which would be changed by training modules whole",
          "leave it out, or use method: lora"),
    _rule("router.aux_loss", (f.ROUTER, (f.SEQ2SEQ, f.MASKED)),
          "is for causal models and classifiers; others with routers are not supported", "leave it out"),
    _rule("parallel.context", (f.CONTEXTS, f.SEQ2SEQ),
          "divides one sequence, and {objective.type} has two with attention across them", "use tensor or pipeline"),
    _rule("parallel.context", (f.CONTEXTS, f.CLASSIFY),
          "a class is read from one place of a whole row, by the model's own code", "use tensor or pipeline"),
)  # fmt: skip

MEMORY = (
    _rule("checkpoint.memory", (f.COPIES, (f.STATES[1], f.PARAMETERS[1])),
          "what is offloaded to disk does not fit in memory, and copies of it would not either",
          "leave it out: checkpoint.every alone saves to disk"),
)  # fmt: skip

MACHINES = (
    _rule("fp8", (f.FP8, (f.PRECISIONS[0], f.FP16)), "computes beside bf16, not {precision}",
          f"set precision: bf16, or {NO_FP8}", shown="fp8.recipe"),
    _rule("fp8.modules_to_not_convert", (f.KEPT_16, f.NO_FP8), "nothing multiplies in 8 bits",
          "set precision: fp8, or leave it out"),
    _rule("fp8.use_fast_accum", (f.FP8_FAST, f.NO_FP8), "nothing multiplies in 8 bits",
          "set precision: fp8, or leave it out"),
    _rule("fp8.gather", (f.FP8_GATHER, f.NO_FP8), "nothing multiplies in 8 bits",
          "set precision: fp8, or leave it out"),
    _rule("fp8.gather", (f.FP8_GATHER, f.FP8[1]),
          "scales by row are of rows forward and of columns backward, and codes have one of the two",
          "use recipe: tensorwise, or leave it out: gathers are in bf16"),
    _rule("backend", (f.NCCL, f.CPU), "works on CUDA devices only", "use advanced.backend: gloo or leave it out"),
)  # fmt: skip

REMARKS = (
    _rule("data.packing", (f.PACKING, ROWS), "{objective.type} rows are read one at a time: packing is switched off",
          "set data.packing: false to say so", "remark"),
    _rule("parallel.expert", (f.EXPERT, (f.SEQ2SEQ, f.MASKED)),
          "no architecture of this kind is known whose experts can be divided", "leave it out", "remark"),
    _rule("precision", (f.FP16, f.CPU), "CPUs compute fp16 slower than fp32",
          "use precision: fp32 where time matters", "remark"),
    _rule("fp8", (f.FP8, f.EAGER), "a GPU scales and rounds each tensor by kernels of its own: slower than bf16",
          "add compile: true, which fuses them", "remark", shown="fp8.recipe"),
    _rule("fp8", (f.FP8, f.CPU), "a CPU gains nothing by it; its arithmetic is the same as a GPU's",
          "use precision: fp32 where time matters", "remark", shown="fp8.recipe"),
    _rule("offload.optimizer", (f.STATES[0], f.CPU), "the host's memory is the device's own: nothing is saved",
          "offload to disk, or leave it out", "remark"),
    _rule("offload.parameters", (f.PARAMETERS[0], f.CPU), "the host's memory is the device's own: nothing is saved",
          "offload to disk, or leave it out", "remark"),
    _rule("offload.activations", (f.ACTIVATIONS, f.CPU), "the host's memory is the device's own: nothing is saved",
          "leave it out", "remark"),
    _rule("compile", (f.COMPILE, f.CPU), "is made for CUDA; a CPU needs a C++ compiler, and gains little",
          "leave it out", "remark"),
)  # fmt: skip

RULES = (
    *SECTIONS, *BESIDE_AXES, *STAGES, *PLACES, *UPDATES, *METHODS, *WORKERS, *EVALUATIONS, *AIMS, *MEMORY, *MACHINES,
    *REMARKS,
)  # fmt: skip
